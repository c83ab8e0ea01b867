"""Records of the journal of a batch, each written as one line.

A line is a checksum, the record's kind, and the content. A torn line, of a writer or machine that died, has another
checksum: the record, and everything behind, did not happen. Times are seconds since 1970.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TypeAlias
from zlib import crc32


class Status(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OUTCOMES = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})  # last states of batches


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a batch failed: OpenAI's error of a batch. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The lines were read and are valid. `digest`: of the input file."""

    at: float
    num_lines: int
    digest: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A line has an answer. `output` is a line of the output file, or of the error file if `has_failed`."""

    number: int
    has_failed: bool
    output: bytes


@dataclass(frozen=True, slots=True)
class Stopped:
    """No line runs any more; the answers so far become the output."""

    at: float
    outcome: Status
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputEnded:
    """The output is complete and in place."""

    at: float


Record: TypeAlias = Opened | Answered | Stopped | OutputEnded


def encode(record: Record) -> bytes:
    match record:
        case Answered(number, has_failed, output):
            assert b"\n" not in output, "a record is one line"
            content = b"%s %d %b" % (b"failed" if has_failed else b"answered", number, output)
        case Opened():
            content = _named(b"opened", record)
        case Stopped():
            content = _named(b"stopped", record)
        case OutputEnded():
            content = _named(b"ended", record)
    return b"%08x %b\n" % (crc32(content), content)


def _named(kind: bytes, record: Opened | Stopped | OutputEnded) -> bytes:
    """The content of a line of this kind: the record's fields as JSON."""
    return b"%b %b" % (kind, json.dumps(asdict(record), separators=(",", ":")).encode())


def decode(line: bytes) -> Record | None:
    """The record of a line; None if the line is not whole."""
    checksum, _, content = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % crc32(content):
        return None
    kind, _, rest = content.partition(b" ")
    if kind in (b"answered", b"failed"):
        number, _, output = rest.partition(b" ")
        return Answered(int(number), kind == b"failed", output)
    fields = json.loads(rest)
    if kind == b"opened":
        return Opened(**fields)
    if kind == b"ended":
        return OutputEnded(**fields)
    problems = tuple(Problem(**problem) for problem in fields["problems"])
    return Stopped(fields["at"], Status(fields["outcome"]), problems)
