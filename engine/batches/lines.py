"""The input file of a batch: all lines are checked once, and the body of each is fetched again when it runs.

Checking a line makes objects of it, which for megabytes of JSON takes a second in which nothing else of its interpreter
runs. So a server checks files above a few lines in a process beside (`read_beside`). A body that runs is fetched as
text, by its place in the file: who reads it has limits for hostile ones.
"""

import asyncio
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from raydix.engine.api.batches import NO_LIMITS, Line, LineEndpoint, LineLimits, body_place, parse_line
from raydix.engine.batches.beside import BESIDE_BYTES, run_beside
from raydix.engine.core.batches.lines import PrefixOrder
from raydix.engine.core.batches.records import Problem

MAX_PROBLEMS = 100  # most problems told of one file
BUSY_S = 0.002  # seconds of work between two pauses as long: other threads have turns


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line that runs."""

    custom_id: str
    url: LineEndpoint
    body: bytes
    """Body as the file has it."""


class _Place(NamedTuple):
    """A body in the file."""

    start: int
    length: int
    checksum: int


@dataclass(slots=True)
class Input:
    """The lines of a valid file by number, from 0 and without empty lines."""

    path: Path
    digest: str = ""
    """Digest of the file's content."""
    custom_ids: list[str] = field(default_factory=list)
    urls: list[LineEndpoint] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """The lines in the order of running."""
    bodies: list[_Place] = field(default_factory=list)

    def line(self, number: int) -> LineRequest:
        """Fetch a line. Raises OSError, also if the file has changed meanwhile."""
        place = self.bodies[number]
        with self.path.open("rb") as file:
            body = os.pread(file.fileno(), place.length, place.start)
        # A file that was changed in its place would run other requests than were checked.
        if zlib.crc32(body) != place.checksum:
            raise OSError(f"{self.path} has changed")
        return LineRequest(self.custom_ids[number], self.urls[number], body)


def read_input(
    path: Path,
    endpoint: LineEndpoint | None,
    limits: LineLimits = NO_LIMITS,
    rest: Callable[[float], None] | None = time.sleep,
) -> Input | list[Problem]:
    """Check every line of a file; returns the lines, or the problems. `rest` is called between pieces of
    work, with a time to pause; None: no pauses. Raises OSError."""
    reading = _Reading(Input(path), endpoint, limits)
    began = time.monotonic()
    for _ in reading.steps():
        # A pause as long as the work: the thread holds the interpreter at most half of the time.
        if rest is not None and time.monotonic() - began > BUSY_S:
            rest(BUSY_S)
            began = time.monotonic()
    return reading.problems or reading.finished()


async def read_beside(path: Path, endpoint: LineEndpoint | None, limits: LineLimits) -> Input | list[Problem]:
    """Read an input file as `read_input`, in a process beside if the file is large. Ends the process when cancelled.
    Raises OSError, also if the process ends without an answer."""
    if (await asyncio.to_thread(path.stat)).st_size <= BESIDE_BYTES:
        return await asyncio.to_thread(read_input, path, endpoint, limits)

    return await run_beside(read_input, path, endpoint, limits, rest=None)


class _Reading:
    """The reading of one file."""

    def __init__(self, found: Input, endpoint: LineEndpoint | None, limits: LineLimits) -> None:
        self.problems: list[Problem] = []
        self._found = found
        self._endpoint = endpoint
        self._limits = limits
        self._order = PrefixOrder()
        self._line_of: dict[str, int] = {}  # number of the line with a `custom_id`, from 1 and with empty lines

    def steps(self) -> Iterator[None]:
        """Read the file, a line at each step."""
        digest, place = blake2b(digest_size=16), 0
        with self._found.path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                digest.update(content)
                if not content.isspace():
                    self._take(content, number, place)
                place += len(content)
                # A file of a gigabyte of wrong lines is not read to its end.
                if self._is_too_long(number) or len(self.problems) >= MAX_PROBLEMS:
                    return
                yield
        self._found.digest = digest.hexdigest()
        if not (self._found.custom_ids or self.problems):
            self.problems.append(Problem("empty_file", "The file has no lines."))

    def finished(self) -> Input:
        """The lines, where there is no problem."""
        self._found.order = self._order.numbers()
        return self._found

    def _is_too_long(self, number: int) -> bool:
        limit = self._limits.max_lines
        if limit is None or len(self._found.custom_ids) <= limit:
            return False
        self.problems.append(Problem("too_many_lines", f"The file has more than {limit} lines.", number))
        return True

    def _take(self, content: bytes, number: int, place: int) -> None:
        line = self._parsed(content, number)
        if isinstance(line, Problem):
            self.problems.append(line)
            return
        self._order.add(len(self._found.custom_ids), line.prompt)
        self._found.custom_ids.append(line.custom_id)
        self._found.urls.append(line.url)
        start, length = body_place(content)
        # Of the body alone: that is what is fetched again.
        checksum = zlib.crc32(content[start : start + length])
        self._found.bodies.append(_Place(place + start, length, checksum))

    def _parsed(self, content: bytes, number: int) -> Line | Problem:
        max_bytes = self._limits.max_line_bytes
        if max_bytes is not None and len(content) > max_bytes:
            return Problem("line_too_large", f"This line has more than {max_bytes} bytes.", number)
        line = parse_line(content.rstrip(), number, self._endpoint)
        if isinstance(line, Line) and (other := self._line_of.setdefault(line.custom_id, number)) != number:
            message = f"'custom_id' must be unique, and line {other} has the same."
            return Problem("duplicate_custom_id", message, number, "custom_id")
        return line
