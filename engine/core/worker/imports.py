"""Waiting for KV and handovers from elsewhere and for grammars, and the blocks kept for waiting requests.

| message | blocks in the pool | other blocks of the message | other awaited blocks |
|---|---|---|---|
| `settled` (arrived, or will not come) | held for the request | computed by the request | awaited as long again |
| `keep_awaiting` (the sender is busy) | | | awaited as long again |
| `stop_awaiting` (the sender is gone) | | | computed by the request |

Manager, ingress and workers talk to a worker independently, so a segment, a loss or a handover may overtake the
submission of its request. Such early messages are kept for a moment (`EarlyMessages`), and `Scheduler.submit` looks
there first.

Grammars are compiled in this process, so waiting for one has no deadline.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from raydix.engine.core.types import BlockHash, Handover
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Request

KEEP_S = 1.0  # messages overtake each other by milliseconds; the request of an older message will not come


class EarlyMessages:
    """Settled blocks (arrived or lost) and handovers without a request, none older than `KEEP_S`."""

    def __init__(self) -> None:
        self._settled: OrderedDict[BlockHash, float] = OrderedDict()
        # Early handovers by request and attempt, with the time of arrival.
        self._handovers: OrderedDict[tuple[str, int], tuple[Handover, float]] = OrderedDict()

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


class Imports:
    """Owner of `held`, `protected`, `awaited`, `awaits_handover`, `await_deadline` and `awaits_grammar` of a worker's
    requests.

    `waiting`: the scheduler's queue; `registry`: all requests of the worker by id. Both are only read.
    """

    def __init__(
        self, pool: BlockPool, waiting: deque[Request], registry: Mapping[str, Request], early: EarlyMessages
    ) -> None:
        self._pool = pool
        self._waiting = waiting
        self._registry = registry
        self._early = early

    def begin(self, request: Request, now: float) -> None:
        """Apply the messages that came before a request, which is waiting now."""
        assignment = request.assignment
        for block_hash in assignment.awaited:
            self._hold_if_here(request, block_hash)
            # The block has arrived, or was lost, before the request came.
            if self._early.is_settled(block_hash, now):
                request.awaited.discard(block_hash)

        handover = self._early.take_handover(assignment.request_id, assignment.attempt)
        if handover is not None:
            self.handed_over(handover, now)

    def settled(self, hashes: Iterable[BlockHash], now: float) -> None:
        """Hold the arrived blocks for waiting requests; the requests compute the missing ones."""
        settled = list(hashes)
        self._early.settle(settled, now)
        self.arrived(settled, now)
        for request in self._awaiting():
            request.awaited.difference_update(settled)

    def arrived(self, hashes: Iterable[BlockHash], now: float) -> None:
        """Hold blocks that entered the pool for waiting requests, and extend the wait for the others."""
        here = dict.fromkeys(hashes)  # in order, so that the order of release is no matter of chance
        if not here:
            return
        for request in self._awaiting():
            for block_hash in [block_hash for block_hash in here if block_hash in request.awaited]:
                self._hold_if_here(request, block_hash)
                # A sender that sends has not stalled.
                request.await_deadline = now + request.assignment.await_timeout_s

    def keep_awaiting(self, request_ids: Iterable[str], now: float) -> None:
        """Wait as long again: the sender is alive, only busy."""
        for request_id in request_ids:
            request = self._registry.get(request_id)
            if request is not None:
                request.await_deadline = now + request.assignment.await_timeout_s

    def stop_awaiting(self, request_ids: Iterable[str]) -> None:
        """Compute missing KV: the sender is gone."""
        for request_id in request_ids:
            request = self._registry.get(request_id)
            if request is not None:
                request.awaited.clear()
                request.awaits_handover = False

    def stop_awaiting_all(self) -> None:
        """Compute all missing KV: the manager is gone, so no block will be sent."""
        self.stop_awaiting([request.request_id for request in self._awaiting()])

    def handed_over(self, handover: Handover, now: float) -> None:
        """Continue a decode assignment from the token that its prefill worker sampled."""
        request = self._registry.get(handover.request_id)
        # The request of this attempt is still to come.
        if request is None or request.assignment.attempt < handover.attempt:
            self._early.hand_over(handover, now)
            return
        # An older attempt's, or this worker has sampled the same token already.
        if request.assignment.attempt > handover.attempt or not request.awaits_handover:
            return
        request.awaits_handover = False
        # The prefill worker has reported the scores of the prompt.
        request.num_to_score = 0
        request.token_ids.append(handover.token_id)

    def grammar_settled(self, digest: bytes) -> list[Request]:
        """Have no request wait for the grammar of this digest any longer; returns the requests that did."""
        waiting = [request for request in self._waiting if request.awaits_grammar and _digest(request) == digest]
        for request in waiting:
            request.awaits_grammar = False
        return waiting

    def next_deadline(self) -> float | None:
        """The earliest time at which a waiting request gives up on its imports; None without any."""
        awaiting = (request for request in self._awaiting() if not request.awaits_grammar)
        return min((request.await_deadline for request in awaiting), default=None)

    def protect(self, requests: Iterable[Request]) -> None:
        """Have the blocks that waiting requests will use evicted late, except blocks with a swapped copy."""
        for request in requests:
            # Swapped KV comes back from outside, so its blocks may go.
            if not request.protected and request.swapped is None:
                request.protected = tuple(request.full_hashes())
                self._pool.protect(request.protected)

    def end(self, request: Request, now: float) -> None:
        """Release the held blocks of a request that starts or goes, and end their protection."""
        self._drop_holds(request, now)
        self._pool.unprotect(request.protected)
        request.protected = ()

    def drop_all_holds(self, now: float) -> bool:
        """Release the held blocks of all waiting requests, which compute them if evicted; False if there were none."""
        dropped = [self._drop_holds(request, now) for request in self._waiting]
        return any(dropped)

    def _awaiting(self) -> list[Request]:
        return [request for request in self._waiting if request.awaited or request.awaits_handover]

    def _hold_if_here(self, request: Request, block_hash: BlockHash) -> None:
        block = self._pool.lookup(block_hash)
        if block is not None:
            self._pool.acquire([block])
            request.held.append(block)
            request.awaited.discard(block_hash)
        # A state is not held: as the one used last it is the last to go, and its loss costs time only.
        elif self._pool.states is not None and self._pool.states.is_known(block_hash):
            request.awaited.discard(block_hash)

    def _drop_holds(self, request: Request, now: float) -> bool:
        held, request.held = request.held, []
        self._pool.release_awaited(held, now)
        return bool(held)


def _digest(request: Request) -> bytes | None:
    grammar = request.assignment.sampling.grammar
    return None if grammar is None else grammar.digest


def is_ready(request: Request, now: float) -> bool:
    """True if a waiting request's grammar is there, and it awaits no KV or has waited long enough."""
    if request.awaits_grammar:
        return False
    return not (request.awaited or request.awaits_handover) or now >= request.await_deadline
