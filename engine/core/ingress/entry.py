"""The requests under way, as the data plane of one ingress replica has them."""

from collections.abc import Iterable
from dataclasses import dataclass

from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.instructions import Ping
from raydix.engine.core.types import Admission

UNTAKEN_S = 5.0  # a submission that is not answered after so long counts as answered: either side may have lost it


@dataclass(slots=True, eq=False)
class Entry:
    """A request under way. It is being admitted, or `admission` waits for workers to be followed, or the request waits
    for another admission (`Dispatch.retries`), or it has been submitted."""

    generation: Generation
    waiting_since: float
    admission: Admission | None = None
    avoided: tuple[str, ...] = ()
    """Workers that were silent or doubted when the request was last sent to the manager."""
    num_moves: int = 0
    """Attempts that ended because their worker was about to stop."""

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

    def pings(self, followed: Iterable[str], now: float) -> list[Ping]:
        """A ping for each followed worker, with the attempts of both kinds. Only prefill workers among the followed are
        awaited."""
        pings = {worker_id: Ping(worker_id, [], [], []) for worker_id in followed}
        for generation in (entry.generation for entry in self.values()):
            is_overdue = now - generation.placed_at >= UNTAKEN_S
            # Both workers of a split request, or the one that has it whole, as far as they are followed.
            for worker_id in {generation.prefill or "", generation.decode or ""} & pings.keys():
                if not generation.may_be_at(worker_id):
                    continue
                is_taken = is_overdue or worker_id in generation.taken_by
                named = pings[worker_id].taken if is_taken else pings[worker_id].sent
                named.append(generation.attempt_name)
                # The prefill worker lives, so the decode worker may go on waiting for its KV.
                if worker_id == generation.decode and generation.awaits_prefill and generation.prefill in pings:
                    pings[worker_id].awaiting.append(generation.request_id)
        return [*pings.values()]
