"""Messages to a worker that arrive before their request.

Manager, ingress and workers talk to a worker independently, so a segment, a loss or a handover may overtake the
submission of its request. Early messages are kept for a moment, and `Scheduler.submit` looks here first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from raydix.engine.core.types import BlockHash, Handover

KEEP_S = 1.0
"""Messages overtake each other by milliseconds; the request of an older message will not come."""


class EarlyMessages:
    """Settled blocks (arrived or lost) and handovers without a request, none older than `KEEP_S`."""

    def __init__(self) -> None:
        self._settled: OrderedDict[BlockHash, float] = OrderedDict()
        self._handovers: OrderedDict[tuple[str, int], tuple[Handover, float]] = OrderedDict()
        """By request and attempt, with the time of arrival."""

    def settle(self, hashes: Iterable[BlockHash], now: float) -> None:
        """Note blocks as arrived or lost: requests submitted within `KEEP_S` need not wait."""
        while self._settled and next(iter(self._settled.values())) < now - KEEP_S:
            self._settled.popitem(last=False)
        for block_hash in hashes:
            self._settled[block_hash] = now
            self._settled.move_to_end(block_hash)

    def is_settled(self, block_hash: BlockHash, now: float) -> bool:
        return self._settled.get(block_hash, now - 2 * KEEP_S) >= now - KEEP_S

    def hand_over(self, handover: Handover, now: float) -> None:
        """Keep a handover for its attempt."""
        while self._handovers and next(iter(self._handovers.values()))[1] < now - KEEP_S:
            self._handovers.popitem(last=False)
        self._handovers[handover.request_id, handover.attempt] = handover, now

    def take_handover(self, request_id: str, attempt: int) -> Handover | None:
        """Remove and return the early handover of this attempt."""
        handover, _ = self._handovers.pop((request_id, attempt), (None, 0.0))
        return handover
