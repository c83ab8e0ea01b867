"""Hand-over from a manager to its successor: the terms of both, and the choice of the segments that move.

A segment moves by a copy, which the successor owns. So a copy costs bytes in the object store and time, and the
segments that eviction would keep longest go first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from raydix.engine.core.types import BlockHash, SegmentHeader

# Form of what is handed over. A manager of another form hands over nothing.
SCHEMA = 2
# Bytes copied before the predecessor drops the originals: so many are in the object store twice.
MAX_BATCH_BYTES = 64 << 20

Terms: TypeAlias = Mapping[str, object]
"""Facts that two managers must share, by name, in plain values: the two may run different code."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A segment of the predecessor's, with the present retention in its header."""

    segment_id: int
    header: SegmentHeader
    node: str
    """The predecessor's, whose object store gets the copy."""


def terms(block_size: int, keeps_segments: bool) -> dict[str, object]:
    """The terms of a manager with these settings."""
    return {"schema": SCHEMA, "block_size": block_size, "keeps_segments": keeps_segments}


def disagreement(own: Terms, others: Terms) -> str | None:
    """The first terms that differ between two managers, in words; None if there are none."""
    for name in sorted({*own, *others}):
        if own.get(name) != others.get(name):
            return f"{name} is {others.get(name)} there and {own.get(name)} here"
    return None


def chosen(
    offers: Iterable[Offer], lacks: Callable[[BlockHash], bool], fingerprint: str | None, room_bytes: int, now: float
) -> list[Offer]:
    """The segments that a successor takes, of the offers in their order: they fit into `room_bytes`, have blocks that
    the successor lacks, are not expired, and are of the registered workers' model, if there are workers."""
    found: list[Offer] = []
    for offer in offers:
        header = offer.header
        expires_at = header.retention.expires_at
        is_wanted = any(map(lacks, header.names))
        is_alive = expires_at is None or expires_at > now
        is_readable = fingerprint is None or header.fingerprint == fingerprint
        if is_wanted and is_alive and is_readable and header.num_bytes <= room_bytes:
            room_bytes -= header.num_bytes
            found.append(offer)
    return found


def batches(offers: Iterable[Offer]) -> Iterator[Sequence[Offer]]:
    """The offers in their order, in runs of at most `MAX_BATCH_BYTES`, or of one."""
    batch: list[Offer] = []
    num_bytes = 0
    for offer in offers:
        if batch and num_bytes + offer.header.num_bytes > MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(offer)
        num_bytes += offer.header.num_bytes
    if batch:
        yield batch
