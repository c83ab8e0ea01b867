"""Generates responses in the background: whether their clients wait or not, and whether this replica lives or not.

A response under way lies among the stored ones with all that is needed to generate it again (`Run`). The replica that
got the request generates it and renews its claim every `RENEW_S`. Where that replica dies, another one takes the
response over, and generates it from its beginning, with the same seed and so the same bits. A claim that does not
stand any more is of a response that was cancelled or deleted, at whichever replica: its generation ends.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from raydix.engine.api.openai_responses.answers import queued
from raydix.engine.api.openai_responses.stored import Claim, StoredResponse
from raydix.engine.api.wire import WireFormat
from raydix.engine.background import Background
from raydix.engine.core.errors import RaydixError, RequestError, ResponseCancelledError, ServiceError
from raydix.engine.core.log_fields import about
from raydix.engine.core.memory.response_store import Abandoned
from raydix.engine.core.tenants import Tenant, Tenants
from raydix.engine.serving.accounting import internal_error
from raydix.engine.serving.job import Job
from raydix.engine.serving.preparation import Preparation
from raydix.engine.serving.rendering import Renderer
from raydix.engine.serving.stored_responses import StoredResponses

logger = logging.getLogger(__name__)

RENEW_S = 2.0
# Most that waits for a slow reader: the response ends, and with it its place among the requests, while this stays. The
# stream ends beyond, and may be read again behind the last event.
MAX_WAITING_EVENTS, MAX_WAITING_BYTES = 4096, 8 << 20


class Listener:
    """The stream of the client whose request began the response. The client may leave, or be slow: the response is
    generated all the same."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | RaydixError | None] = asyncio.Queue()
        self._num_bytes = 0  # bytes of the events that wait
        self._has_begun = self._is_over = False

    def send(self, event: bytes) -> None:
        if self._is_over:
            return
        self._has_begun = True
        self._num_bytes += len(event)
        if self._waiting.qsize() < MAX_WAITING_EVENTS and self._num_bytes <= MAX_WAITING_BYTES:
            self._waiting.put_nowait(event)
        else:
            self._end(ServiceError("The stream was not read in time; read it behind its last event."))

    def end(self, error: RaydixError | None = None, wire: WireFormat | None = None) -> None:
        """End the stream, where an error is given by that: by an event in this form where the stream has begun."""
        if error is not None and wire is not None and self._has_begun:
            self.send(wire.error_event(error))
            error = None
        self._end(error)

    def _end(self, error: RaydixError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._waiting.put_nowait(error)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events. Raises the error by which the stream ends."""
        try:
            while (event := await self._waiting.get()) is not None:
                if isinstance(event, RaydixError):
                    raise event
                self._num_bytes -= len(event)
                yield event
        finally:
            self._is_over = True  # the client has left: nothing is kept for it any more
            self._waiting = asyncio.Queue()


@dataclass(slots=True)
class _Running:
    claim: Claim
    task: "asyncio.Task[object]"


class BackgroundResponses:
    """The responses in the background that one replica generates. `begin_anew`, `renderer` and `events` run a job
    (`Compaction.begin_anew`, `Frontend.renderer`, `Frontend.events`)."""

    def __init__(
        self,
        responses: StoredResponses,
        preparation: Preparation,
        tenants: Tenants,
        begin_anew: Callable[[Job], Awaitable[Job]],
        renderer: Callable[[Job], Renderer],
        events: Callable[[Job, Renderer], AsyncGenerator[bytes]],
    ) -> None:
        self._responses = responses
        self._preparation = preparation
        self._tenants = tenants
        self._begin_anew = begin_anew
        self._renderer = renderer
        self._events = events
        self._background = Background()
        self._running: dict[bytes, _Running] = {}
        self._being_taken: set[bytes] = set()  # names of abandoned responses that are being prepared here

    def start(self) -> None:
        """Begin to renew claims, and to look for responses of dead replicas; needs a running event loop."""
        self._background.start(self._watch())

    async def begin(self, job: Job) -> tuple[bytes, Listener]:
        """Generate the response of a job, which is closed here; returns the response as it is now, and the listener of
        its events.

        Raises:
            ServiceError: there is no room for the response, or the manager is out of reach.
        """
        try:
            claim = await self._responses.begin(job)
        except BaseException:
            job.close()
            raise
        listener = Listener()
        self._start(claim, job, listener)
        return queued(claim.stored.response), listener

    async def cancel(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> bytes:
        """End a response, at whichever replica it is generated, and return it; errors as `StoredResponses.cancel`."""
        name, stored = await self._responses.cancel(response_id, tenant, cache_salt)
        self._stop(name)
        return stored.response

    async def repeated(self, stored: StoredResponse, tenant: Tenant, num_had_events: int) -> Job:
        """The job of the stream of a stored response, whose reader has the first events already: the answer is
        generated again, with the same bits. The caller closes the job; errors as `Preparation.again`, and RequestError
        for a response without such a stream."""
        if stored.run is None or not stored.run.streams:
            raise RequestError(
                "The response has no stream to be read: only one that was created with 'background' and 'stream', and "
                "that was not cancelled and has not failed, has.",
                param="stream",
            )
        job = await self._preparation.again(stored.run, tenant)
        job.is_repeated = True
        job.num_had_events = num_had_events
        return job

    def _start(self, claim: Claim, job: Job, listener: Listener | None) -> None:
        task = self._background.start(self._run(claim, job, listener))
        self._running[claim.name] = _Running(claim, task)

        def ended(_: object) -> None:
            job.close()  # of a task that was cancelled before its first step
            del self._running[claim.name]

        task.add_done_callback(ended)

    def _stop(self, name: bytes) -> None:
        """End the generation of a response that is not wanted any more."""
        running = self._running.get(name)
        if running is not None and not running.claim.is_over:
            running.task.cancel()

    async def _run(self, claim: Claim, job: Job, listener: Listener | None) -> None:
        """Generate a response to its end."""
        error: RaydixError | None = None
        wire: WireFormat | None = None
        try:
            if job.begins_anew:
                job = await self._begin_anew(job)
            job.claim = claim  # by which the whole answer takes the place of the response under way
            renderer = self._renderer(job)
            wire = renderer.wire
            async with aclosing(self._events(job, renderer)) as events:
                async for data in events:
                    if listener is not None:
                        listener.send(data)
        except asyncio.CancelledError:
            error = ResponseCancelledError("The response was cancelled or deleted.")
            raise
        except RaydixError as raised:
            error = raised
        except Exception as fault:
            error = internal_error(fault, request_id=job.request_id)
        finally:
            job.close()
            if listener is not None:
                listener.end(error, wire)
        if error is not None and not claim.is_over:
            await self._responses.fail(claim, error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                abandoned = await self._renew()
            except ServiceError:
                continue  # The manager is away, and a successor gives each claim its time again.
            # Beside: the next renewal does not wait until the bodies of others' responses are read.
            self._background.start(self._take_over_all(abandoned))

    async def look(self) -> None:
        """Renew the claims of this replica, and take over what another one has left. Raises ServiceError if the manager
        is out of reach."""
        await self._take_over_all(await self._renew())

    async def _renew(self) -> list[Abandoned]:
        """Renew the claims of this replica; returns responses that another one has left."""
        claims = [running.claim for running in self._running.values()]
        stand, abandoned = await self._responses.renew(claims)
        for claim, stands in zip(claims, stand, strict=True):
            if not stands:
                self._stop(claim.name)
        return abandoned

    async def _take_over_all(self, abandoned: Sequence[Abandoned]) -> None:
        for each in abandoned:
            # One whose preparation takes long is given to this replica again.
            if each.name in self._running or each.name in self._being_taken:
                continue
            self._being_taken.add(each.name)
            try:
                await self._take_over(Claim.of(each))
            except Exception:  # such as of data that another version has written: the others are to be generated
                logger.exception("a response was not taken over", extra=about("response_not_taken_over"))
            finally:
                self._being_taken.discard(each.name)

    async def _take_over(self, claim: Claim) -> None:
        """Generate a response whose replica is gone. Where there is no room, it is taken again later."""
        run = claim.stored.run
        assert run is not None
        try:
            job = await self._preparation.again(run, self._tenants.named(claim.tenant))
        except ServiceError:
            return
        except RequestError as error:  # such as for a tenant who is not known any more
            await self._responses.fail(claim, error)
            return
        logger.info(
            "response %s is generated here now",
            job.head.id,
            extra=about("response_taken_over", request=job.request_id, tenant=claim.tenant),
        )
        self._start(claim, job, None)
