"""Messages between actors, beyond the values of `raydix.engine.core.types`."""

from array import array
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from ray.exceptions import RayError

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.types import Adapter, AttemptName, BlockHash, EvictionReason, ProcessName, Role, SegmentHeader

# Silence after which an ingress replica counts as gone, and its requests are given up everywhere.
INGRESS_SILENCE_S = 10.0

WORKER_SILENCE_S = 4.0  # silence of a worker after which the manager forgets the worker until it registers again
# Seconds without a heartbeat after which a worker counts as silent if an ingress replica takes it for silent, too.
DOUBTED_SILENCE_S = 2.0

STARTING_REPORT_S = 1.0  # interval at which a host tells the manager that its worker is starting
STARTING_SILENCE_S = 5.0  # silence of a host after which its worker does not count as starting any more


@dataclass(frozen=True, slots=True)
class ExportItem:
    """One message of the export stream. If `header` names any bytes, the next item is the payload."""

    header: SegmentHeader | None = None
    sealed: tuple[BlockHash, ...] = ()
    evicted: tuple[tuple[BlockHash, EvictionReason], ...] = ()
    missing: tuple[BlockHash, ...] = ()
    """Requested blocks that the pool does not hold any more."""
    unsent: tuple[BlockHash, ...] = ()
    """Blocks that could not be sent; `evicted` tells whether they leave the pool."""
    reset: int | None = None
    """Number of the reset with which the worker has forgotten its cached blocks: whatever it had exported of them has
    come before."""


class Imported(Enum):
    """Fate of a segment at the receiving worker."""

    TAKEN = auto()
    NOT_FETCHED = auto()
    """The object store could not provide the segment, or not in time."""
    DAMAGED = auto()
    """The content contradicts the header."""


class ImportReport(NamedTuple):
    """A worker's answer to a segment."""

    fate: Imported
    seconds: float | None = None
    """Time of fetching and unpacking the segment, without the wait for a running step, or of trying in vain; None if
    nothing was to be fetched, or the segment is gone."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Introduction of a worker to the manager."""

    worker_id: str
    epoch: int
    role: Role
    block_bytes: int
    token_budget: int
    device: str
    fingerprint: str
    """Two workers share KV only if their fingerprints are equal."""
    hashes: tuple[BlockHash, ...]
    node: str = ""
    """Ray's id of the node that the worker runs on."""
    attempts: frozenset[AttemptName] = frozenset()
    """Attempts under way at the worker."""
    process: ProcessName | None = None
    adapters: tuple[Adapter, ...] = ()
    """Adapters that were loaded at run time and are in the worker's memory."""
    num_blocks: int | None = None
    """All blocks of the pool."""
    state_bytes: int = 0
    """Bytes of a recurrent state; 0: its model has none."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A manager's memory of answers and responses, for its successor. In all lists the least recently used comes
    first."""

    transcripts: "list[tuple[bytes, array[int], str]]"
    """Name, token ids and tenant."""
    answers: list[tuple[bytes, list[tuple[bytes, int]]]]
    """First token ids and counts of the answers under each name."""
    responses: list[tuple[bytes, bytes | None, bytes, float, str]]
    """Name, parent, data, seconds since the last use, and tenant."""


class RetiredError(RayError):
    """A manager that has a successor is asked: the caller is to look for the successor."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Contents of a worker's heartbeat."""

    costs: WorkerCosts | None
    """None before the first measurement."""
    num_free_blocks: int
    """Blocks that no request holds."""
    num_empty_blocks: int
    """Free blocks that contain nothing."""
    num_steps: int
    """Steps that `costs` were fitted to so far."""
    token_budget: int
    """Tokens of a step now."""
    num_blocks: int | None = None
    """All blocks of the pool."""
