"""Hand-over of a living manager's state to its successor, in another process.

| step, called by | predecessor | successor |
|---|---|---|
| `prepare`, the successor's host | gives its folder on disk up | |
| `start`, the host | | takes the folder |
| `expect_memory`, the host | | lets questions for answers and responses wait |
| the host announces the successor | | is found from now on |
| `retire`, the successor | refuses every request (`RetiredError`) | has the workers register |
| `memory`, the successor | | takes transcripts, beginnings of answers, stored responses |
| `offers`, `copies`, `moved_away`, the successor | drops a segment when its copy is there | owns the copies |

What a streaming generator yields belongs to the caller of the generator (Ray): the copies outlive the predecessor. A
predecessor that dies in the middle leaves the successor with what has come. If the successor dies while the predecessor
lives, the predecessor goes on. Nothing of a manager with other terms is taken (`disagreement`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.exceptions import RayError

from raydix.actors.calls import answer, quietly
from raydix.actors.manager.client_memory import ClientMemory
from raydix.actors.manager.disk_tier import DiskTier
from raydix.actors.manager.executor import Executor
from raydix.actors.messages import Memory, RetiredError
from raydix.actors.rpc import Handle, ManagerClient, SuccessionClient, WorkerClient
from raydix.engine.background import Background
from raydix.engine.core.errors import StartupError
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.succession import Offer, Terms, batches, chosen, disagreement, terms

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # limit of a predecessor's answers, but for copies
COPY_S = 10.0  # limit of fetching a segment that is to be copied
SEGMENTS_S = 20.0  # limit of taking over segments; what has not come then stays behind


class Succession:
    """The hand-over to this manager from its predecessor, and from this manager to its successor.

    Others call the methods by `SuccessionClient`. Handles of managers come in lists, because Ray would take
    a handle that is an argument by itself for a dependency of the call.
    """

    def __init__(
        self,
        directory: Directory,
        memory: ClientMemory,
        executor: Executor,
        disk: DiskTier | None,
        background: Background,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._executor = executor
        self._disk = disk
        self._background = background
        self._successor: Handle | None = None
        self.is_retired = False
        """True if another manager has taken over."""
        self._has_memory = asyncio.Event()  # cleared while the data of a predecessor are on their way
        self._has_memory.set()

    def check_not_retired(self) -> None:
        """Raise RetiredError if another manager has taken over."""
        if self.is_retired:
            raise RetiredError

    async def memory_is_ready(self) -> None:
        """Wait for a predecessor's data, if some are on their way.

        Raises:
            RetiredError: the successor is to be asked.
        """
        await self._has_memory.wait()
        self.check_not_retired()

    # The predecessor

    async def prepare(self, successors: Sequence[Handle]) -> Terms:
        """Give the folder on disk to the one manager that is about to start; returns this manager's terms."""
        [successor] = successors
        self._successor = successor
        self._background.start(self._go_on_without(successor))
        if self._disk is not None:
            await self._disk.close()
        return self._terms()

    async def retire(self) -> list[Handle]:
        """Refuse all requests from now on; returns the workers' handles."""
        self.is_retired = True
        logger.info("another manager takes over", extra=about("manager_retires"))
        return [client.handle for client in self._executor.clients.values()]

    async def memory(self) -> Memory:
        """Transcripts, answers and responses, for the successor."""
        return self._memory.all()

    async def offers(self) -> list[Offer]:
        """The segments in the object store, the most valuable first."""
        return self._directory.stock.offers(time.time())

    async def copies(self, segment_ids: Sequence[int]) -> AsyncIterator[object]:
        """Yield a copy of each segment's payload, which the caller owns; None for a segment that is gone."""
        for segment_id in segment_ids:
            segment = self._directory.stock.segments.get(segment_id)
            ref: Any = None if segment is None else segment.ref
            try:
                yield None if ref is None else await answer(ref, COPY_S)
            except (RayError, TimeoutError):
                yield None

    async def moved_away(self, segment_ids: Sequence[int]) -> None:
        """Drop segments of which the successor has copies."""
        for segment_id in segment_ids:
            self._directory.stock.segments.moved_away(segment_id)

    async def _go_on_without(self, successor: Handle) -> None:
        """Take requests again when the successor dies first."""
        await quietly(ManagerClient(successor).join())
        if self._successor is not successor:
            return
        self.is_retired = False
        logger.warning("the manager that was to take over died", extra=about("successor_lost"))
        if self._disk is not None:
            try:
                await self._disk.open()
            except (StartupError, OSError) as error:
                logger.warning("nothing is written to disk any more: %s", error)

    # The successor

    async def expect_memory(self) -> None:
        """Let questions for answers and responses wait until a predecessor's have come."""
        self._has_memory.clear()

    async def take_over(self, predecessors: Sequence[Handle], others: Terms) -> None:
        """Have the one manager with these terms retire, and take over what it has."""
        [predecessor] = predecessors
        began, client = time.monotonic(), SuccessionClient(predecessor)
        num_segments = 0
        try:
            for worker in await answer(client.of_succession(Succession.retire), ANSWER_S):
                self._background.start(quietly(WorkerClient(worker).register_again()))
            if reason := disagreement(self._terms(), others):
                logger.warning("nothing is taken over: %s", reason, extra=about("not_taken_over", reason=reason))
                return
            self._memory.take_over(await answer(client.of_succession(Succession.memory), ANSWER_S))
            self._has_memory.set()
            num_segments = await self._take_segments(client)
        except (RayError, TimeoutError) as error:
            reason = type(error).__name__
            logger.warning("the last manager is gone (%s)", reason, extra=about("predecessor_lost", reason=reason))
        finally:
            self._has_memory.set()

        took_s = round(time.monotonic() - began, 3)
        extra = about("took_over", segments=num_segments, took_s=took_s, **self._memory.statistics())
        logger.info("took over %d segments in %.1f s", num_segments, took_s, extra=extra)

    async def _take_segments(self, client: SuccessionClient) -> int:
        """Copy the predecessor's segments, the most valuable first; returns their number."""
        segments, now = self._directory.stock.segments, time.time()
        offers = await answer(client.of_succession(Succession.offers), ANSWER_S)
        node = offers[0].node if offers else ""
        # Copies go into the object store of the predecessor's node: its part of the budget has room for them.
        room_bytes = segments.store_budget_bytes - segments.node_bytes[node]
        fingerprint = self._directory.fleet.fingerprint
        taken: list[int] = []
        try:
            async with asyncio.timeout(SEGMENTS_S):
                for batch in batches(chosen(offers, self._directory.stock.lacks, fingerprint, room_bytes, now)):
                    await self._take_batch(client, batch, taken)
        except (RayError, TimeoutError) as error:
            reason = type(error).__name__
            logger.warning("segments stay behind (%s)", reason, extra=about("predecessor_lost", reason=reason))

        # Taken later is used later: now the most valuable are the ones used last.
        for segment_id in reversed(taken):
            self._directory.stock.segments.refresh(segment_id, time.time())
        return len(taken)

    async def _take_batch(self, client: SuccessionClient, batch: Sequence[Offer], taken: list[int]) -> None:
        segment_ids = [offer.segment_id for offer in batch]
        stream = aiter(client.copies(segment_ids))
        for offer in batch:
            ref = await anext(stream)
            if await ref is not None:
                segment, instructions = self._directory.stock.exported(offer.header, ref, time.time(), node=offer.node)
                self._executor.carry_out(instructions)
                taken.append(segment.segment_id)
        await client.of_succession(Succession.moved_away, segment_ids)

    def _terms(self) -> Terms:
        return terms(self._directory.costs.block_size, self._directory.stock.keeps_segments)
