"""Hand-overs that will not arrive although the prefill worker lives."""

from collections.abc import Container, Mapping

from raydix.engine.core.manager.instructions import HandoverLost
from raydix.engine.core.manager.reservations import Reservation
from raydix.engine.core.types import Attempt


def handovers_lost(
    reservations: Mapping[str, Reservation],
    workers: Container[str],
    worker_id: str,
    epoch: int,
    attempts: Container[Attempt] = (),
) -> list[HandoverLost]:
    """Have the registered decode workers wait no longer for a prefill worker, whose messages to the manager were lost
    or cannot come; but for `attempts`, which are still under way. After a worker's death the ingress replicas decide
    where a request goes on."""
    instructions: list[HandoverLost] = []
    for request_id, reservation in reservations.items():
        admission = reservation.admission
        is_sender = (admission.prefill, admission.prefill_epoch) == (worker_id, epoch)
        is_lost = reservation.awaits_handover and Attempt(request_id, admission.attempt) not in attempts
        if is_sender and is_lost and admission.decode in workers:
            instructions.append(HandoverLost(admission.decode, request_id))
    return instructions
