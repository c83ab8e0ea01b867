"""`python -m raydix` is the command `raydix`."""

import sys

from cli.main import main

sys.exit(main())
