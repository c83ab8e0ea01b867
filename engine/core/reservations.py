"""What the directory knows of each worker and of each admitted request."""

from dataclasses import dataclass, field

from engine.core.block_index import Segment
from engine.core.costs import WorkerCosts
from engine.core.placement import Offer
from engine.core.types import Admission, BlockHash, CacheWish, Role

US_PER_S = 1_000_000


@dataclass(slots=True)
class WorkerRecord:
    """What is known of one worker incarnation."""

    worker_id: str
    role: Role
    epoch: int
    costs: WorkerCosts
    token_budget: int
    num_free_blocks: int | None = None
    blocks: set[BlockHash] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)
    """Those of `requests` that decode here, now or once their prefill is done."""
    queued_us: int = 0
    """Predicted time of the prefills promised to it and not done yet."""
    exporting: dict[BlockHash, None] = field(default_factory=dict)
    """Blocks, in order, that it was asked to export: it is their producer."""
    silent_since: float | None = None
    """Since when, as far as noted, some of `exporting` have been waited for and none has come."""
    has_sealed: bool = False
    """Whether it has sealed any block since that was last looked at."""
    unsaved: list[BlockHash] = field(default_factory=list)
    """Blocks that it sealed and no segment contained, to be exported for the disk."""
    alone: frozenset[str] = field(init=False)
    """Its id: a set that the records of blocks which only this worker has, or wants, have in common."""

    def __post_init__(self) -> None:
        self.alone = frozenset((self.worker_id,))

    @property
    def offer(self) -> Offer:
        queued_s = self.queued_us / US_PER_S
        return Offer(self.role, self.costs, self.token_budget, queued_s, len(self.decoding), self.num_free_blocks)


@dataclass(slots=True)
class Reservation:
    """An admitted request: what it was promised and what load it puts on whom."""

    admission: Admission
    hashes: tuple[BlockHash, ...]
    wish: CacheWish
    queued_us: int
    producing: dict[BlockHash, None]
    """Blocks, in order, that others may rely on it to compute."""
    leased: list[Segment]
    lacking: dict[BlockHash, None]
    """Blocks, in order, that its prefill worker may have to compute yet: others are to send it some of them."""
    is_awaited: bool = False
    """Whether somebody may wait for some of `producing`."""
    silent_since: float | None = None
    """The same of `producing`, while the request does not wait for others itself."""


class Workers(dict[str, WorkerRecord]):
    """The registered workers, by id."""

    def current(self, worker_id: str, epoch: int | None) -> WorkerRecord | None:
        """The worker, if it is there and this incarnation of it; None for any."""
        worker = self.get(worker_id)
        return worker if worker is not None and epoch in (None, worker.epoch) else None
