"""The requests under way, as the data plane of one ingress replica has them."""

from collections.abc import Container
from dataclasses import dataclass, field
from math import inf

from engine.core.ingress.generation import Generation
from engine.core.types import Admission

MISSED_S = 0.5
"""An attempt that is not there in two answers to pings this far apart is lost. Less than the time between two pings,
and longer than it takes to read answers that arrive together."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request under way. It is being admitted, or `admission` waits for workers to be followed, or the request waits
    for another admission (`Dispatch._retries`), or it has been submitted."""

    generation: Generation
    waiting_since: float
    admission: Admission | None = None
    avoided: tuple[str, ...] = ()
    """Workers that were silent or doubted when the request was last sent to the manager."""
    num_moves: int = 0
    """Attempts that ended because their worker was about to stop."""
    missed_since: dict[str, float] = field(default_factory=dict)
    """Since when each worker of the present attempt says that the attempt is not there; infinity once acted upon."""

    def is_missed(self, worker_id: str, now: float) -> bool:
        """Note that a worker does not have the present attempt; returns True, once, if it stays so: the first answer
        may have come before the attempt, or overtaken the attempt's last events."""
        since = self.missed_since.setdefault(worker_id, now)
        if now - since < MISSED_S:
            return False
        self.missed_since[worker_id] = inf
        return True

    def awaits(self, worker_id: str, epoch: int) -> bool:
        """True if the admission names this incarnation."""
        admission = self.admission
        return admission is not None and (worker_id, epoch) in (
            (admission.prefill, admission.prefill_epoch),
            (admission.decode, admission.decode_epoch),
        )


class Entries(dict[str, Entry]):
    """The requests under way, by id."""

    def current(self, request_id: str, attempt: int) -> Entry | None:
        """The request, if this is its present attempt."""
        entry = self.get(request_id)
        return entry if entry is not None and entry.generation.attempt == attempt else None

    def at(self, worker_id: str) -> list[Entry]:
        """Requests whose present attempt was sent to a worker."""
        return [entry for entry in self.values() if worker_id in (entry.generation.prefill, entry.generation.decode)]

    def affected_by(self, worker_id: str) -> list[Entry]:
        """Requests that cannot go on as they are without a worker."""
        return [
            entry
            for entry in self.values()
            if entry.generation.dies_with(worker_id) or entry.generation.loses_kv_with(worker_id)
        ]

    def awaiting(self, worker_id: str, epoch: int) -> list[Entry]:
        """Requests whose admission waits for this incarnation, in the order of `priority`."""
        awaiting = [entry for entry in self.values() if entry.awaits(worker_id, epoch)]
        return sorted(awaiting, key=lambda entry: entry.generation.priority)

    def awaiting_prefill(self, worker_id: str, followed: Container[str]) -> list[str]:
        """Ids of the requests that wait at this decode worker for a prefill worker that lives and has not come to them
        yet."""
        return [
            generation.request_id
            for generation in (entry.generation for entry in self.values())
            if generation.decode == worker_id and generation.awaits_prefill and generation.prefill in followed
        ]
