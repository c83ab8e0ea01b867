"""`raydix` as a command whose made-up tokens take a while.

    python -m tests.integration.paced_command GATE COMMAND ...

As long as the file GATE exists, each step takes at least `STEP_S`, on a machine of any speed.
"""

import sys
import time
from pathlib import Path
from typing import Any

from raydix.cli.main import main
from raydix.engine.model.runner import NullRunner

STEP_S = 0.2


def pace(gate: Path) -> None:
    compute = NullRunner.run

    def run(self: NullRunner, output: Any) -> Any:
        until = time.monotonic() + STEP_S
        done = compute(self, output)
        while (left_s := until - time.monotonic()) > 0 and gate.exists():
            time.sleep(min(left_s, 0.01))
        return done

    NullRunner.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    pace(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
