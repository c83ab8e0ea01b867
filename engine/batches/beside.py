"""Work of a size that clients choose, in a process beside the server's: its interpreter is its own.

Making objects of megabytes of JSON keeps an interpreter for tens of milliseconds to seconds, in which no token passes.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raydix.engine.core.errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")

# Size of JSON above which it is read in a process beside: as much keeps the interpreter for some ten milliseconds.
BESIDE_BYTES = 64 << 10
NICENESS = 5  # priority of such a process below those that pass tokens on


async def run_beside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function of a module, whose arguments and result can be pickled. Ends the process when cancelled.
    Raises the RequestError or OSError of the function; OSError if the process ends without a result."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        answer, _ = await process.communicate(pickle.dumps((work, args, kwargs)))
    finally:
        # Cancelled, or the pipe broke: nobody waits for the result any more.
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"the process of {work.__name__} has ended with {process.returncode}")
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _work() -> None:
    """Be the process: do the work on the standard input, and write the result or the error to the output."""
    os.nice(NICENESS)
    work, args, kwargs = pickle.load(sys.stdin.buffer)
    result, error = None, None
    try:
        result = work(*args, **kwargs)
    except (RequestError, OSError) as failure:  # any other error is a fault: its traceback is on the error output
        error = failure
    pickle.dump((result, error), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    _work()
