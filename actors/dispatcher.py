"""Sends an ingress replica's requests to their workers and follows their tokens, across failures.

Each generation holds the tokens delivered so far. A token event is taken if its position is the next one, dropped if
that position was delivered already. So whatever is retried, by whom and how often, every token appears exactly once,
and because the token at a position does not depend on who computes it, the text is the one it would have been.

When a decode worker dies, its generations are admitted again with what they have generated as part of the prompt.
When only the prefill worker of a split request dies, its decode worker is told to compute what did not arrive.
When the manager is out of reach, requests go whole to the worker their session hashes to.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.batching import Batch
from actors.names import MANAGER, find_actor
from engine.core.errors import NoWorkerError, OverloadedError, ServiceError
from engine.core.hashing import hash_blocks, root_hash
from engine.core.placement import rank_by_session
from engine.core.types import (
    Admission,
    AdmitRequest,
    Assignment,
    FinishReason,
    PromptEvent,
    Role,
    SamplingParams,
    Stage,
    TokenEvent,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

PING_S = 2.0
MANAGER_TIMEOUT_S = 5.0
RETRY_S = 0.25
MAX_ATTEMPTS = 10
DISPATCH_TIMEOUT_S = 30.0
"""How long a request waits for a worker that could take it."""


@dataclass(slots=True, eq=False)
class Generation:
    """One running request of this ingress: what it asked for, what it got, who works on it."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes = b""
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens behind the first; complete when the first token arrives."""
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    cached_tokens: int | None = None
    imported_tokens: int = 0
    """Prompt tokens whose KV the first attempt's prefill worker was promised from elsewhere."""
    inbox: list[TokenEvent] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    failure: ServiceError | None = None
    early: dict[int, TokenEvent] = field(default_factory=dict)
    """Events whose predecessors have not come yet: the first token and the others come from different workers."""
    finished_by: str | None = None

    @property
    def finished(self) -> bool:
        return self.finished_by is not None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are hashed with; equal to the workers'."""

    fingerprint: str
    block_size: int
    await_timeout_s: float


class Dispatcher:
    """The data plane of one ingress replica."""

    def __init__(
        self, ingress_id: str, app_name: str, model: ModelFacts, max_active: int, on_failover: Callable[[], None]
    ) -> None:
        self._ingress_id = ingress_id
        self._app_name = app_name
        self._model = model
        self._max_active = max_active
        self._on_failover = on_failover
        self._active: dict[str, Generation] = {}
        self._workers: dict[str, ActorHandle[Any]] = {}
        self._known_workers: dict[str, Role] = {}
        self._manager: ActorHandle[Any] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._admits = Batch(self._admit_all)
        self._first_tokens: list[str] = []
        self._released: list[str] = []
        self._assignments: dict[str, list[Assignment]] = {}
        self._flush_scheduled = False

    def start(self) -> None:
        """Begin to tell workers that this ingress is alive. Needs a running event loop."""
        self._spawn(self._keep_alive())

    @property
    def num_active(self) -> int:
        return len(self._active)

    def reserve(self, count: int) -> None:
        """Raises OverloadedError if `count` more requests would be too many."""
        if len(self._active) + count > self._max_active:
            raise OverloadedError(
                f"{len(self._active)} requests are under way and at most {self._max_active} are accepted; "
                "try again later",
                retry_after_s=1,
            )

    async def generate(self, generation: Generation) -> AsyncGenerator[list[TokenEvent]]:
        """Run a request; yields the tokens in order, each once, as many at a time as have arrived.

        Raises:
            ServiceError: no worker could take it, or every attempt failed.
        """
        self._active[generation.request_id] = generation
        try:
            await self._dispatch(generation)
            while True:
                await generation.arrived.wait()
                generation.arrived.clear()
                if generation.failure is not None:
                    raise generation.failure
                events, generation.inbox = generation.inbox, []
                if events:
                    yield events
                    if events[-1].finish is not None:
                        return
        finally:
            self._end(generation)

    async def workers(self) -> dict[str, Role]:
        """The workers that the manager knows now; empty when it is out of reach."""
        try:
            manager = await self._get_manager()
            infos = await asyncio.wait_for(_answer(manager.workers.remote(self._ingress_id)), MANAGER_TIMEOUT_S)
        except (RayError, TimeoutError, ServiceError):
            self._manager = None  # look for its successor the next time
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
            if admission is not None and self._send(generation, admission):
                return
            await asyncio.sleep(RETRY_S)
        raise NoWorkerError("no worker is ready to take the request", retry_after_s=5)

    async def _admit(self, generation: Generation) -> Admission | None:
        token_ids = (*generation.prompt, *generation.tokens)
        root = root_hash(self._model.fingerprint, generation.salt)
        request = AdmitRequest(
            generation.request_id,
            generation.attempt,
            tuple(hash_blocks(root, token_ids, self._model.block_size)),
            len(token_ids),
            generation.session,
            self._ingress_id,
            generates=generation.sampling.max_tokens > 0,
        )
        try:
            return await asyncio.wait_for(self._admits.add(request), MANAGER_TIMEOUT_S)
        except (RayError, TimeoutError, ServiceError):
            self._manager = None
            return self._place_alone(request)

    async def _admit_all(self, requests: list[AdmitRequest]) -> list[Admission | None]:
        manager = await self._get_manager()
        admissions: list[Admission | None] = await manager.admit.remote(requests)
        # Whoever left meanwhile may have been settled before it was admitted.
        self._released += [request.request_id for request in requests if request.request_id not in self._active]
        return admissions

    def _place_alone(self, request: AdmitRequest) -> Admission | None:
        """Without the manager: whole, on the worker that the session prefers."""
        able = [w for w, role in self._known_workers.items() if role is not Role.PREFILL] or [*self._known_workers]
        if not able:
            return None
        worker_id = rank_by_session(request.session or request.request_id, able)[0]
        return Admission(request.request_id, request.attempt, worker_id, worker_id, 0, 0, (), (), 0.0)

    def _send(self, generation: Generation, admission: Admission) -> bool:
        """Submit to the admitted workers; False if one of them is not there."""
        if not (self._follow(admission.prefill) and self._follow(admission.decode)):
            self._release(generation)
            return False
        generation.prefill, generation.decode = admission.prefill, admission.decode
        if generation.attempt == 0:
            generation.imported_tokens = len(admission.prefill_awaited) * self._model.block_size
        self._known_workers.setdefault(admission.decode, Role.DECODE)
        if admission.prefill == admission.decode:
            self._assign(generation, admission.decode, Stage.WHOLE, admission.prefill_awaited)
        else:
            self._assign(generation, admission.prefill, Stage.PREFILL, admission.prefill_awaited)
            self._assign(generation, admission.decode, Stage.DECODE, admission.decode_awaited)
        return True

    def _assign(self, generation: Generation, worker_id: str, stage: Stage, awaited: tuple[bytes, ...]) -> None:
        assignment = Assignment(
            generation.request_id,
            generation.attempt,
            stage,
            (*generation.prompt, *generation.tokens),
            len(generation.prompt),
            generation.sampling,
            self._ingress_id,
            generation.salt,
            awaited,
            self._model.await_timeout_s,
            num_scored=len(generation.prompt_logprobs),
        )
        self._assignments.setdefault(worker_id, []).append(assignment)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what has gathered in this turn of the event loop: one call per receiver."""
        self._flush_scheduled = False
        assignments, self._assignments = self._assignments, {}
        for worker_id, batch in assignments.items():
            # Who left meanwhile has been aborted already, and that call must not be overtaken by this one.
            self._call(worker_id, "submit", [each for each in batch if each.request_id in self._active])
        if (self._first_tokens or self._released) and self._manager is not None:
            first_tokens, self._first_tokens = self._first_tokens, []
            released, self._released = self._released, []
            self._spawn(self._settle(self._manager, first_tokens, released))

    async def _settle(self, manager: ActorHandle[Any], first_tokens: list[str], released: list[str]) -> None:
        try:
            await manager.settle.remote(self._ingress_id, first_tokens, released)
        except RayError:
            self._released += released  # for the next one; what it does not know does no harm

    def _call(self, worker_id: str, method: str, *args: Any) -> None:
        """Call a worker without waiting; if it is dead, its token stream will tell."""
        handle = self._workers.get(worker_id)
        if handle is not None:
            self._spawn(_quietly(getattr(handle, method).remote(*args)))

    async def _get_manager(self) -> ActorHandle[Any]:
        if self._manager is None:
            self._manager = find_actor(MANAGER, self._app_name)
        if self._manager is None:
            raise NoWorkerError("the KV cache manager is not there")
        return self._manager

    # Receiving

    def _follow(self, worker_id: str) -> bool:
        """Make sure that a worker's token stream is being read; False if there is no such worker."""
        if worker_id in self._workers:
            return True
        handle = find_actor(worker_id, self._app_name)
        if handle is None:
            return False
        self._workers[worker_id] = handle
        self._spawn(self._read(worker_id, handle))
        return True

    async def _read(self, worker_id: str, handle: ActorHandle[Any]) -> None:
        try:
            async for ref in handle.token_stream.remote(self._ingress_id):
                self._receive(worker_id, await ref)
        except Exception as error:  # whatever it was, this worker's streams must not stand still
            logger.warning("token stream of %s ended: %s", worker_id, type(error).__name__)
        self._worker_lost(worker_id)

    def _receive(self, worker_id: str, events: list[PromptEvent | TokenEvent]) -> None:
        for event in events:
            generation = self._active.get(event.request_id)
            if generation is None or event.attempt != generation.attempt or generation.finished:
                continue
            if isinstance(event, PromptEvent):
                _take_scores(generation, event)
                continue
            if event.finish is FinishReason.ERROR:
                generation.failure = ServiceError(f"the model could not be run: {event.detail}")
                generation.failure.status = 500
            elif event.position >= len(generation.tokens):
                generation.early[event.position] = event
                while (due := generation.early.pop(len(generation.tokens), None)) is not None:
                    self._take(generation, due)
                    if due.finish is not None:
                        generation.finished_by = worker_id
            generation.arrived.set()

    def _take(self, generation: Generation, event: TokenEvent) -> None:
        if not generation.tokens:
            self._first_tokens.append(generation.request_id)
            self._flush_soon()
        if generation.cached_tokens is None:
            generation.cached_tokens = event.cached_tokens
        if event.token_id is not None:
            generation.tokens.append(event.token_id)
        generation.inbox.append(event)

    def _end(self, generation: Generation) -> None:
        """The request is over: free what it holds. Whoever finished it has done so."""
        self._active.pop(generation.request_id, None)
        generation.inbox.clear()
        self._abort(generation)
        self._release(generation)

    def _release(self, generation: Generation) -> None:
        self._released.append(generation.request_id)
        self._flush_soon()

    # Failures

    def _worker_lost(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._known_workers.pop(worker_id, None)
        for generation in list(self._active.values()):
            if generation.finished:
                continue
            if generation.decode == worker_id or (generation.prefill == worker_id and not generation.tokens):
                self._fail_over(generation)
            elif generation.prefill == worker_id and generation.decode is not None:
                generation.prefill = None
                self._call(generation.decode, "stop_awaiting", [generation.request_id])

    def _abort(self, generation: Generation) -> None:
        """Tell the workers of a generation, but for the one that finished it, to forget it."""
        for worker_id in {generation.prefill, generation.decode} - {generation.finished_by}:
            if worker_id is not None:
                self._call(worker_id, "abort", [generation.request_id])

    def _fail_over(self, generation: Generation) -> None:
        """Go on elsewhere from the last token delivered."""
        self._abort(generation)
        generation.prefill = generation.decode = None
        generation.early.clear()
        generation.attempt += 1
        self._on_failover()
        self._spawn(self._dispatch_again(generation))

    async def _dispatch_again(self, generation: Generation) -> None:
        try:
            if generation.attempt >= MAX_ATTEMPTS:
                raise ServiceError(f"given up after {MAX_ATTEMPTS} workers died under this request")
            await self._dispatch(generation)
        except ServiceError as error:
            generation.failure = error
            generation.arrived.set()

    async def _keep_alive(self) -> None:
        while True:
            for worker_id in list(self._workers):
                self._call(worker_id, "ping", self._ingress_id, self._awaiting_at(worker_id))
            await self.workers()
            await asyncio.sleep(PING_S)

    def _awaiting_at(self, worker_id: str) -> list[str]:
        """Requests that wait at this decode worker for a prefill worker that lives and has not come to them yet."""
        return [
            generation.request_id
            for generation in self._active.values()
            if generation.decode == worker_id != generation.prefill
            and generation.prefill in self._workers
            and not generation.tokens
        ]

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _take_scores(generation: Generation, event: PromptEvent) -> None:
    """Take what is new: a prefill worker and a decode worker that gave up waiting for it report the same positions."""
    known = len(generation.prompt_logprobs) + 1 - event.position
    assert known >= 0, "log-probabilities of prompt tokens come in order"
    generation.prompt_logprobs += event.logprobs[known:]


async def _answer(ref: Any) -> Any:
    return await ref


async def _quietly(ref: Any) -> None:
    """Wait for a call whose failure is somebody else's to notice."""
    try:
        await ref
    except RayError as error:
        logger.debug("call failed: %s", type(error).__name__)
