"""What reached a worker before the request it is for.

Manager, ingress and workers talk to a worker independently, so a segment, a loss or a handover may overtake the
submission of the request that waits for it. It is remembered for a moment, and `Scheduler.submit` looks here first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.core.types import BlockHash, Handover

KEEP_S = 1.0
"""Messages overtake each other by milliseconds; what is older belongs to a request that will not come."""


class EarlyMessages:
    """Blocks that were settled (arrived or lost) and handovers without a request, none older than `KEEP_S`."""

    def __init__(self) -> None:
        self._settled: OrderedDict[BlockHash, float] = OrderedDict()
        self._handovers: OrderedDict[tuple[str, int], tuple[Handover, float]] = OrderedDict()

    def settle(self, hashes: Iterable[BlockHash], now: float) -> None:
        """These blocks came, or will not come: nobody who is submitted within the next moment needs to wait."""
        while self._settled and next(iter(self._settled.values())) < now - KEEP_S:
            self._settled.popitem(last=False)
        for block_hash in hashes:
            self._settled[block_hash] = now
            self._settled.move_to_end(block_hash)

    def is_settled(self, block_hash: BlockHash, now: float) -> bool:
        return self._settled.get(block_hash, now - 2 * KEEP_S) >= now - KEEP_S

    def hand_over(self, handover: Handover, now: float) -> None:
        """Keep a handover for the attempt it names."""
        while self._handovers and next(iter(self._handovers.values()))[1] < now - KEEP_S:
            self._handovers.popitem(last=False)
        self._handovers[handover.request_id, handover.attempt] = handover, now

    def take_handover(self, request_id: str, attempt: int) -> Handover | None:
        """The handover that came before this attempt; it is forgotten here."""
        handover, _ = self._handovers.pop((request_id, attempt), (None, 0.0))
        return handover
