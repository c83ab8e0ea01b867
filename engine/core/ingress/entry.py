"""A request as the data plane of one ingress replica has it."""

from dataclasses import dataclass

from engine.core.ingress.generation import Generation
from engine.core.types import Admission


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

    def awaits(self, worker_id: str, epoch: int) -> bool:
        """True if the admission names this incarnation."""
        admission = self.admission
        return admission is not None and (worker_id, epoch) in (
            (admission.prefill, admission.prefill_epoch),
            (admission.decode, admission.decode_epoch),
        )
