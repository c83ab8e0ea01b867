"""Sends an ingress replica's requests to their workers and follows their tokens, across failures.

What a token event means for its request is decided by `engine.core.generation.Generation`. Here are the ways to the
manager and the workers, and what happens when one of them is gone:

* a decode worker dies, or a prefill worker before the first token: the request is admitted again, with what it has
  generated as part of its prompt;
* a prefill worker dies after the first token: the decode worker is told to compute what did not arrive;
* the manager is out of reach: requests go whole to the worker their session hashes to.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.batching import Batch
from actors.calls import Background, apart, quietly
from actors.manager_link import ManagerLink
from actors.messages import Ended, FirstToken
from actors.names import find_actor
from engine.core.errors import NoWorkerError, ServiceError
from engine.core.generation import Generation
from engine.core.hashing import BlockChain
from engine.core.placement import preferred
from engine.core.room import Room
from engine.core.types import Admission, AdmitRequest, Assignment, BlockHash, PromptEvent, Role, TokenEvent

logger = logging.getLogger(__name__)

PING_S = 2.0
RETRY_S = 0.25
MAX_ATTEMPTS = 10
NUM_PREVIEW_TOKENS = 32
"""First tokens of a prompt that the manager keeps to show its prefix by."""
DISPATCH_TIMEOUT_S = 30.0
"""How long a request waits for a worker that could take it."""


@dataclass(slots=True, eq=False)
class _Delivery:
    """A generation and the tokens that its reader has not taken yet."""

    generation: Generation
    inbox: list[TokenEvent] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are hashed with; equal to the workers'."""

    root: BlockHash
    block_size: int
    await_timeout_s: float


class Dispatcher:
    """The data plane of one ingress replica."""

    def __init__(
        self,
        ingress_id: str,
        app_name: str,
        manager: ManagerLink,
        model: ModelFacts,
        room: Room,
        on_failover: Callable[[], None],
    ) -> None:
        self._ingress_id = ingress_id
        self._app_name = app_name
        self._model = model
        self._room = room
        self._on_failover = on_failover
        self._active: dict[str, _Delivery] = {}
        self._workers: dict[str, ActorHandle[Any]] = {}
        self._known_workers: dict[str, Role] = {}
        self._manager = manager
        self._background = Background()
        self._admits = Batch(self._admit_all)
        self._first_tokens: list[FirstToken] = []
        self._ended: list[Ended] = []
        self._assignments: dict[str, list[Assignment]] = {}
        self._flush_scheduled = False

    def start(self) -> None:
        """Begin to tell workers that this ingress is alive. Needs a running event loop."""
        self._background.start(self._keep_alive())

    async def generate(self, generation: Generation) -> AsyncGenerator[list[TokenEvent]]:
        """Run a request; yields the tokens in order, each once, as many at a time as have arrived.

        Raises:
            ServiceError: no worker could take it, or every attempt failed.
        """
        delivery = self._active[generation.request_id] = _Delivery(generation)
        self._room.begin(generation)
        try:
            await self._dispatch(generation)
            while True:
                await delivery.arrived.wait()
                delivery.arrived.clear()
                if generation.failure is not None:
                    raise generation.failure
                events, delivery.inbox = delivery.inbox, []
                if events:
                    yield events
                    if events[-1].finish is not None:
                        return
        finally:
            self._end(generation)

    async def workers(self) -> dict[str, Role]:
        """The workers that the manager knows now; empty when it is out of reach."""
        try:
            infos = await self._manager.ask("workers", self._ingress_id, list(self._active))
        except ServiceError:
            return {}
        self._known_workers = {info.worker_id: info.role for info in infos}
        return self._known_workers

    # Sending

    async def _dispatch(self, generation: Generation) -> None:
        """Place a generation and send it to its workers, trying again while workers come and go."""
        deadline = time.monotonic() + DISPATCH_TIMEOUT_S
        while time.monotonic() < deadline:
            admission = await self._admit(generation)
            if generation.request_id not in self._active:
                self._release(generation)
                return
            if admission is not None and await self._send(generation, admission):
                return
            await asyncio.sleep(RETRY_S)
        raise NoWorkerError("no worker is ready to take the request", retry_after_s=5)

    async def _admit(self, generation: Generation) -> Admission | None:
        token_ids = generation.token_ids
        chain = BlockChain(self._model.root, generation.salt, self._model.block_size)
        request = AdmitRequest(
            generation.request_id,
            generation.attempt,
            tuple(chain.hashes(token_ids)),
            len(token_ids),
            generation.session,
            self._ingress_id,
            generation.cache,
            generation.prompt[:NUM_PREVIEW_TOKENS],
            generates=generation.sampling.max_tokens > 0,
        )
        try:
            admission: Admission | None = await self._admits.add(request)
        except ServiceError:
            return self._place_alone(request)
        return admission

    async def _admit_all(self, requests: list[AdmitRequest]) -> list[Admission | None]:
        admissions: list[Admission | None] = await self._manager.ask("admit", requests)
        # Whoever left meanwhile may have been settled before it was admitted.
        self._ended += [Ended(request.request_id) for request in requests if request.request_id not in self._active]
        return admissions

    def _place_alone(self, request: AdmitRequest) -> Admission | None:
        """Without the manager: whole, on the worker that the session prefers."""
        able = [w for w, role in self._known_workers.items() if role is not Role.PREFILL] or [*self._known_workers]
        if not able:
            return None
        worker_id = preferred(request.session or request.request_id, able)
        return Admission(request.request_id, request.attempt, worker_id, worker_id, 0, 0, (), ())

    async def _send(self, generation: Generation, admission: Admission) -> bool:
        """Submit to the admitted workers; False if one of them is not there."""
        for worker_id in (admission.prefill, admission.decode):
            await self._follow(worker_id)
        if not self._workers.keys() >= {admission.prefill, admission.decode}:
            self._release(generation)
            return False
        generation.place(admission, self._model.block_size, time.monotonic())
        self._known_workers.setdefault(admission.decode, Role.DECODE)
        timeout_s = self._model.await_timeout_s
        for worker_id, assignment in generation.assignments(admission, self._ingress_id, timeout_s):
            self._assignments.setdefault(worker_id, []).append(assignment)
        self._flush_soon()
        return True

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            apart(asyncio.get_running_loop().call_soon, self._flush)

    def _flush(self) -> None:
        """Send what has gathered in this turn of the event loop: one call per receiver."""
        self._flush_scheduled = False
        assignments, self._assignments = self._assignments, {}
        for worker_id, batch in assignments.items():
            # Who left meanwhile has been aborted already, and that call must not be overtaken by this one.
            batch = [each for each in batch if each.request_id in self._active]
            if batch and worker_id in self._workers:
                call: Any = self._workers[worker_id].submit.remote(batch)
                self._background.start(self._submitted(call, worker_id, batch))
        if (self._first_tokens or self._ended) and self._manager.handle is not None:
            first_tokens, self._first_tokens = self._first_tokens, []
            ended, self._ended = self._ended, []
            self._background.start(self._settle(self._manager.handle, first_tokens, ended))

    async def _submitted(self, call: Any, worker_id: str, assignments: list[Assignment]) -> None:
        try:
            await call
        except RayError as error:
            logger.warning("%s took no requests: %s", worker_id, type(error).__name__)
            for assignment in assignments:
                delivery = self._active.get(assignment.request_id)
                if delivery is not None and delivery.generation.attempt == assignment.attempt:
                    self._fail_over(delivery.generation)

    async def _settle(self, manager: ActorHandle[Any], first_tokens: list[FirstToken], ended: list[Ended]) -> None:
        try:
            await manager.settle.remote(self._ingress_id, first_tokens, ended)
        except RayError:
            self._ended += ended  # for the next one; what it does not know does no harm

    def _call(self, worker_id: str, method: str, *args: Any) -> None:
        """Call a worker without waiting; if it is dead, its token stream will tell."""
        handle = self._workers.get(worker_id)
        if handle is not None:
            self._background.start(quietly(apart(getattr(handle, method).remote, *args)))

    # Receiving

    async def _follow(self, worker_id: str) -> None:
        """Make sure that a worker's token stream is being read, if there is such a worker."""
        handle = None if worker_id in self._workers else await find_actor(worker_id, self._app_name)
        if handle is not None and worker_id not in self._workers:  # another request may have been first
            self._workers[worker_id] = handle
            self._background.start(self._read(worker_id, handle))

    async def _read(self, worker_id: str, handle: ActorHandle[Any]) -> None:
        try:
            async for ref in handle.token_stream.remote(self._ingress_id):
                self._receive(worker_id, await ref)
        except Exception as error:  # whatever it was, this worker's streams must not stand still
            logger.warning("token stream of %s ended: %s", worker_id, type(error).__name__)
        self._worker_lost(worker_id)

    def _receive(self, worker_id: str, events: list[PromptEvent | TokenEvent]) -> None:
        for event in events:
            delivery = self._active.get(event.request_id)
            if delivery is None:
                continue
            generation = delivery.generation
            if isinstance(event, PromptEvent):
                generation.take_scores(event)
                continue
            was_answered = generation.is_answered
            due = generation.take(event, worker_id)
            if due or generation.failure is not None:
                delivery.inbox += due
                delivery.arrived.set()
            if due and not was_answered:
                ttft_s = time.monotonic() - generation.placed_at
                self._first_tokens.append(FirstToken(generation.request_id, generation.attempt, ttft_s))
                self._flush_soon()  # after the token is on its way: the call takes a while

    def _end(self, generation: Generation) -> None:
        """The request is over: free what it holds."""
        del self._active[generation.request_id]
        self._room.end(generation)
        self._abort(generation, generation.workers_to_abort(), generation.has_ended)
        self._release(generation)

    def _release(self, generation: Generation) -> None:
        how = "finished" if generation.has_ended else "failed" if generation.failure else "aborted"
        self._ended.append(Ended(generation.request_id, generation.attempt, how, generation.num_preemptions))
        self._flush_soon()

    # Failures

    def _worker_lost(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._known_workers.pop(worker_id, None)
        for generation in [delivery.generation for delivery in self._active.values()]:
            if generation.dies_with(worker_id):
                self._fail_over(generation)
            elif generation.loses_kv_with(worker_id):
                assert generation.decode is not None
                self._call(generation.decode, "stop_awaiting", [generation.request_id])

    def _abort(self, generation: Generation, workers: set[str], has_ended: bool = False) -> None:
        for worker_id in workers:
            self._call(worker_id, "abort", [generation.request_id], has_ended)

    def _fail_over(self, generation: Generation) -> None:
        """Go on elsewhere from the last token delivered."""
        if not generation.is_over:
            self._abort(generation, generation.start_over())
            self._on_failover()
            self._background.start(self._dispatch_again(generation))

    async def _dispatch_again(self, generation: Generation) -> None:
        try:
            if generation.attempt >= MAX_ATTEMPTS:
                raise ServiceError(f"given up after {MAX_ATTEMPTS} workers died under this request")
            await self._dispatch(generation)
        except ServiceError as error:
            generation.failure = error
            delivery = self._active.get(generation.request_id)
            if delivery is not None:
                delivery.arrived.set()

    async def _keep_alive(self) -> None:
        while True:
            for worker_id in list(self._workers):
                self._call(worker_id, "ping", self._ingress_id, self._awaiting_at(worker_id))
            await self.workers()
            self._flush_soon()  # what could not be told while the manager was away
            await asyncio.sleep(PING_S)

    def _awaiting_at(self, worker_id: str) -> list[str]:
        """Requests that wait at this decode worker for a prefill worker that lives and has not come to them yet."""
        return [
            generation.request_id
            for generation in (delivery.generation for delivery in self._active.values())
            if generation.decode == worker_id and generation.awaits_prefill and generation.prefill in self._workers
        ]
