"""What the manager records of each worker and of each admitted request."""

from dataclasses import dataclass, field

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.placement import WorkerLoad
from raydix.engine.core.types import Admission, BlockHash, CacheHints, Role

US_PER_S = 1_000_000  # predicted times are summed as whole microseconds: sums of floats would not come back to 0


@dataclass(slots=True)
class WorkerRecord:
    """Load and costs of one worker incarnation. Only `Fleet` writes to the fields."""

    worker_id: str
    role: Role
    epoch: int
    costs: WorkerCosts
    token_budget: int
    device: str = "cpu"
    fingerprint: str = ""
    """KV of another fingerprint has other bits."""
    node: str = ""
    """Node that the worker runs on, in whose object store its exports stay."""
    num_free_blocks: int | None = None
    """Blocks without a holder at the last report."""
    num_empty_blocks: int | None = None
    """Free blocks without contents at the last report."""
    num_blocks: int | None = None
    """All blocks of the pool at the last report."""
    num_steps: int | None = None
    """Steps behind the fit of the costs at the last report."""
    num_reserved_blocks: int = 0
    """Blocks to be filled by queued prefills."""
    requests: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)
    """Requests that decode here, now or after the prefill."""
    queued_us: int = 0
    """Predicted time of the queued, unfinished prefills."""
    behind_us: int = 0
    """Predicted time of those queued prefills that are behind all others."""
    num_queued: int = 0
    """Number of prefills in `queued_us`."""
    is_leaving: bool = False
    """True once the worker is about to stop: new requests go to others, as long as there are others."""
    duty: Role = Role.MIXED
    """Main work of an elastic worker now."""
    tpots: dict[str, float] = field(default_factory=dict)
    """Objectives of the requests that decode on an elastic worker."""

    def measured(self, num_free_blocks: int, num_empty_blocks: int | None, num_steps: int | None) -> bool:
        """Take a report; returns whether the worker may have stepped since the last one."""
        # A worker that does not count its steps is taken to have stepped: doubt must not hide progress.
        has_stepped = num_steps is None or num_steps != self.num_steps
        self.num_free_blocks, self.num_empty_blocks, self.num_steps = num_free_blocks, num_empty_blocks, num_steps
        return has_stepped

    def ahead_us(self, is_behind: bool) -> int:
        """Time of the queued prefills before a new request."""
        return self.queued_us if is_behind else self.queued_us - self.behind_us

    @property
    def is_elastic(self) -> bool:
        return self.role is Role.ELASTIC

    @property
    def load(self) -> WorkerLoad:
        num_free, num_empty = self.num_free_blocks, self.num_empty_blocks
        return WorkerLoad(
            # Placement knows roles only; an elastic worker has the role of its duty, until that changes.
            role=self.duty if self.is_elastic else self.role,
            costs=self.costs,
            token_budget=self.token_budget,
            queued_s=self.queued_us / US_PER_S,
            behind_s=self.behind_us / US_PER_S,
            num_decoding=len(self.decoding),
            num_free_blocks=None if num_free is None else _rounded(num_free),
            num_queued=self.num_queued,
            # Queued prefills will fill these blocks before a new request does, though the report does not show it yet.
            num_empty_blocks=None if num_empty is None else _rounded(num_empty - self.num_reserved_blocks),
            is_elastic=self.is_elastic,
            # The strictest of those that decode: a step serves all of them, so it must be short enough for this one.
            tpot_s=min(self.tpots.values(), default=None),
            node=self.node,
        )


@dataclass(slots=True)
class Reservation:
    """An admitted request: its blocks, and its load on workers. It lives from the admission to the request's end."""

    admission: Admission
    hashes: tuple[BlockHash, ...]
    hints: CacheHints
    queued_us: int
    num_new_blocks: int
    """Blocks of the prompt that the prefill worker lacked at admission: reserved room while `is_queued`."""
    leased: list[Segment] = field(default_factory=list)
    is_queued: bool = True
    """True until the prefill is done."""
    awaits_handover: bool = field(init=False)
    """True until the prefill worker has handed over to the worker that decodes, where that is another."""
    tpot_s: float | None = None
    """Objective for the time of a token."""
    is_behind: bool = False
    """True if the request gives way to others."""

    def __post_init__(self) -> None:
        self.awaits_handover = self.admission.prefill != self.admission.decode

    def dequeue(self) -> None:
        """The prefill is done, or not needed any more."""
        self.queued_us, self.is_queued = 0, False

    @property
    def needs_prefill(self) -> bool:
        """True until the prefill worker has computed and sent what the request needs of it."""
        return self.is_queued or self.awaits_handover


def _rounded(num_blocks: int) -> int:
    """Round down to three binary digits, so that workers with nearly equal room have equal loads: those are one
    candidate of a placement together (`WorkerGroups`)."""
    num_dropped_bits = max(0, num_blocks.bit_length() - 3)
    return max(0, num_blocks) >> num_dropped_bits << num_dropped_bits
