"""Work of a size that clients choose, in a process beside the server's: its interpreter is its own."""

import asyncio
import os
import pickle
import sys
from typing import Any

BESIDE_BYTES = 64 << 10
"""Size of JSON above which it is read in a process beside: as much keeps the interpreter for some ten milliseconds."""
NICENESS = 5
"""Priority of such a process below those that pass tokens on."""


async def run_beside(module: str, request: object) -> Any:
    """The answer of a module that is run as a program, with a pickled request on its standard input and a pickled
    answer on its output. Ends the process when cancelled. Raises OSError if the process ends without an answer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        answer, _ = await process.communicate(pickle.dumps(request))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"the process that runs {module} has ended with {process.returncode}")
    return pickle.loads(answer)


def be_nice() -> None:
    """Run behind the processes that pass tokens on."""
    os.nice(NICENESS)
