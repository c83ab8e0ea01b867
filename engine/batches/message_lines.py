"""Lines of a batch of messages, of the body of its request, for a large one in a process beside.

Reading megabytes of JSON as a whole keeps the interpreter for tens of milliseconds, in which nothing else runs.
"""

import asyncio
import pickle
import sys

from raydix.engine.api.anthropic.batches import lines_of
from raydix.engine.api.batches import LineLimits
from raydix.engine.batches.beside import BESIDE_BYTES, be_nice, run_beside
from raydix.engine.core.errors import RequestError


async def message_lines(body: bytes, limits: LineLimits) -> tuple[bytes, int]:
    """The lines of a file and their number, as `lines_of`. Raises RequestError naming the field at fault; OSError if
    the process ends without an answer."""
    if len(body) <= BESIDE_BYTES:
        return await asyncio.to_thread(lines_of, body, limits)
    found: tuple[bytes, int] | RequestError = await run_beside(__name__, (body, limits))
    if isinstance(found, RequestError):
        raise found
    return found


def _read_and_answer() -> None:
    """Be the process of `message_lines`."""
    be_nice()
    body, limits = pickle.load(sys.stdin.buffer)
    try:
        found: tuple[bytes, int] | RequestError = lines_of(body, limits)
    except RequestError as error:
        found = error
    pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    _read_and_answer()
