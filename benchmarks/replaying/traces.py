"""Reading traces: Mooncake's JSON lines, which name the blocks of each prompt, and Azure's CSV, which does not."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from raydix.engine.core.types import BlockHash, FinishReason

MOONCAKE_BLOCK_TOKENS = 512


class ReplayError(Exception):
    """The user's request cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the first request."""
    hashes: tuple[BlockHash, ...]
    """Hashes of the blocks of the prompt, the partial last one included."""
    num_prompt_tokens: int
    num_output_tokens: int
    stop: FinishReason | None = None
    """Reason for the answer's end, where the trace has it."""
    has_session: bool = True
    """True if the client names its sessions."""

    @property
    def session(self) -> str:
        """Key of the conversation: its first two blocks, as the very first one may be everybody's; empty without a
        name."""
        return b"".join(self.hashes[:2]).hex() if self.has_session else ""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the first `limit` requests of a trace, by arrival. Requests of a CSV file share nothing with each other.

    Raises:
        ReplayError: the file cannot be read, or a line is invalid; the message names the line.
    """
    parse = _azure if path.suffix == ".csv" else _mooncake
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = [request for request, _ in zip(parse(lines, path.name), range(limit or 1 << 62), strict=False)]
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"cannot read {path.name}: {error}") from error
    if not requests:
        raise ReplayError(f"{path.name} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    return [TraceRequest(r.arrival_s - start, r.hashes, r.num_prompt_tokens, r.num_output_tokens) for r in requests]


def _mooncake(lines: Iterator[str], name: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _checked(name, number, partial(_mooncake_request, line))


def _mooncake_request(line: str) -> TraceRequest:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")

    ids = row["hash_ids"]
    if not isinstance(ids, list) or not ids:
        raise ValueError("hash_ids must be a list of block ids")

    hashes = tuple(_whole(block, "hash_ids").to_bytes(16, "big") for block in ids)
    arrival = row["timestamp"]
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or arrival < 0:
        raise ValueError("timestamp must be a number of milliseconds")

    tokens = _whole(row["input_length"], "input_length")
    needed = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    if len(hashes) != needed:
        raise ValueError(f"{tokens} tokens are {needed} blocks of {MOONCAKE_BLOCK_TOKENS}, but there are {len(hashes)}")

    return TraceRequest(arrival / 1000, hashes, tokens, max(1, _whole(row["output_length"], "output_length")))


def _azure(lines: Iterator[str], name: str) -> Iterator[TraceRequest]:
    reader = csv.DictReader(lines)
    for index, row in enumerate(reader):
        yield _checked(name, reader.line_num, partial(_azure_request, row, index))


def _azure_request(row: dict[str, str], index: int) -> TraceRequest:
    when = row["TIMESTAMP"]
    arrival = datetime.fromisoformat(when[:26]).timestamp()
    tokens = max(1, int(row["ContextTokens"]))
    num_blocks = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    hashes = tuple(index.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(num_blocks))
    return TraceRequest(arrival, hashes, tokens, max(1, int(row["GeneratedTokens"])))


def _checked(name: str, number: int, parse: Callable[[], TraceRequest]) -> TraceRequest:
    try:
        return parse()
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ReplayError(f"{name}, line {number}: {reason}") from error


def _whole(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{field} must hold whole numbers from 0")
    return value
