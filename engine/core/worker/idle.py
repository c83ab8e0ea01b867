"""Idle work: KV computed ahead of a request, with the capacity that a worker's steps leave over.

An idle assignment asks that the KV of its tokens be in the pool, since a later request may begin with the same tokens.

* A step that prefills, or leaves a request waiting or preempted, computes none. Beside decodes it computes one block,
  alone an eighth of the token budget: this bounds the wait of a new request.
* Between steps idle work holds no block, and it takes none that running requests are about to need.
* An idle request is dropped when room is short, when its beginning has been evicted, when it is too long or has waited
  too long, and the oldest one when they are too many.

Blocks that others have computed meanwhile are found. Only full blocks are computed: partial ones are never hit.
"""

from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Request

MAX_REQUESTS = 16  # limit of waiting idle requests
# Limit of tokens computed for one idle request: as many as a compacted chat may have behind its beginning.
MAX_TOKENS = 8192
SHARE = 8  # a step without other work takes 1 / SHARE of the token budget


@dataclass(slots=True)
class IdleCounts:
    """Outcomes of idle requests since the engine began."""

    num_tokens: int = 0
    """Tokens computed for idle requests."""
    num_computed: int = 0
    num_found: int = 0
    """Requests with all blocks found in the pool."""
    num_dropped: int = 0


class IdleWork:
    """The idle requests of a worker, oldest first. `registry`: all requests of the worker by id, including idle
    ones."""

    def __init__(self, pool: BlockPool, token_budget: int, registry: MutableMapping[str, Request]) -> None:
        self._pool = pool
        self.token_budget = token_budget
        self._registry = registry
        self._queue: deque[Request] = deque()
        self.counts = IdleCounts()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request, now: float) -> None:
        """Add a request. The oldest is dropped above the limit; all are where no step could compute a block, and where
        the model has recurrent states: between steps idle work holds nothing, so it could not go on from them."""
        if self.token_budget < self._pool.block_size or self._pool.states is not None:
            self.counts.num_dropped += 1
            return
        if len(self._queue) >= MAX_REQUESTS:
            self.drop(self._queue[0], now)
        self._queue.append(request)
        self._registry[request.request_id] = request

    def drop(self, request: Request, now: float) -> None:
        """Forget a request and release its blocks."""
        self.counts.num_dropped += 1
        self._end(request, now)

    def take(self, now: float, num_left: int, room: int, *, is_alone: bool) -> tuple[Request, int] | None:
        """The request to continue in this step and its number of tokens; the request holds its blocks until `computed`.

        `num_left`: rest of the step's token budget; `room`: blocks not needed by running requests. `is_alone`: the step
        computes nothing else.
        """
        block_size = self._pool.block_size
        # Tokens: a new request waits for the step under way, so idle work is a small part of one.
        share = max(block_size, self.token_budget // SHARE) if is_alone else block_size
        num_blocks = min(share, num_left) // block_size
        while self._queue and num_blocks:
            request = self._queue[0]
            hashes = request.full_hashes()
            matched = self._pool.match(hashes)
            num_missing = len(hashes) - len(matched)
            num_new = min(num_missing, num_blocks)
            # Cached blocks that are held now are no longer there for running requests.
            num_taken = sum(self._pool.is_cached(block) for block in matched)

            if not num_missing:
                self.counts.num_found += 1
                self._end(request, now)
            elif (
                now >= request.await_deadline
                # Its beginning was evicted: the room is needed for something else.
                or len(matched) < request.num_sealed
                or num_missing * block_size > MAX_TOKENS
                or num_taken + num_new > room
            ):
                self.drop(request, now)
            else:
                self._pool.acquire(matched)
                request.blocks = [*matched, *self._pool.allocate(num_new, now)]
                request.num_sealed = len(matched)
                request.num_computed = request.num_shared = len(matched) * block_size
                return request, num_new * block_size
        return None

    def computed(self, request: Request, num_tokens: int, now: float) -> None:
        """The step is done and the new blocks are sealed: release all blocks."""
        self.counts.num_tokens += num_tokens
        # Not `retire`: nobody has used these blocks yet, and eviction must not learn that somebody has.
        self._pool.pause(request.blocks, now, request.retention(now), request.marked(now))
        request.blocks = []
        if request.num_sealed == len(request.hashes):
            self.counts.num_computed += 1
            self._end(request, now)

    def check_integrity(self) -> None:
        """Assert that the requests are few and registered."""
        assert len(self._queue) <= MAX_REQUESTS
        assert all(self._registry.get(request.request_id) is request for request in self._queue)

    def _end(self, request: Request, now: float) -> None:
        self._queue.remove(request)
        del self._registry[request.request_id]
        self._pool.release(request.blocks, now)
        request.blocks = []
