"""`python -m raydix` is the command `raydix`."""

import sys

from raydix.cli.main import main

sys.exit(main())
