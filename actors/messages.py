"""Values that actors send each other, beyond those of `engine.core.types`."""

from dataclasses import dataclass
from enum import Enum, auto

from engine.core.costs import WorkerCosts
from engine.core.types import BlockHash, EvictionReason, Role, SegmentHeader

INGRESS_SILENCE_S = 10.0
"""An ingress replica that says nothing for so long is gone, and its requests are given up everywhere."""


@dataclass(frozen=True, slots=True)
class ExportItem:
    """One message of the export stream. If `header` names any bytes, the next item is the payload."""

    header: SegmentHeader | None = None
    sealed: tuple[BlockHash, ...] = ()
    evicted: tuple[tuple[BlockHash, EvictionReason], ...] = ()
    missing: tuple[BlockHash, ...] = ()
    """Blocks that were asked for and are not here any more."""
    unsent: tuple[BlockHash, ...] = ()
    """Blocks that could not be sent; what becomes of them here, `evicted` tells."""


class Imported(Enum):
    """What became of a segment at the worker that was to take it."""

    TAKEN = auto()
    NOT_FETCHED = auto()
    """It could not be had from the object store, or not in time."""
    DAMAGED = auto()
    """It was not what its header says."""


@dataclass(frozen=True, slots=True)
class Registration:
    """How a worker introduces itself to the manager."""

    worker_id: str
    epoch: int
    role: Role
    block_bytes: int
    token_budget: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A registered worker, as others may know it."""

    worker_id: str
    role: Role
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker's heartbeat says."""

    costs: WorkerCosts | None
    """None before it has measured anything."""
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An attempt got its first token, so long after it was admitted."""

    request_id: str
    attempt: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over."""

    request_id: str
    attempt: int = 0
    how: str = "aborted"
    num_preemptions: int = 0
