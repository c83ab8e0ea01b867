"""An engine's thread as the event loop of its worker sees it: commands go in, outputs and answers come out."""

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from raydix.engine.core.log_fields import about
from raydix.engine.core.types import Assignment, Role

if TYPE_CHECKING:  # the engine imports torch, which only a worker's process needs
    from raydix.engine.model.engine import Engine, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class EngineThread:
    """Owns the thread of one engine, and the way back from that thread into the event loop."""

    def __init__(
        self,
        engine: "Engine",
        on_output: "Callable[[StepResult], None]",
        on_broken: Callable[[str], None],
        role: Role,
    ) -> None:
        """`on_output` is called in the event loop after each step and each change of the pool; `on_broken` in the
        engine's thread, as its last call, when the model computes nothing any more."""
        from raydix.engine.model.loop import EngineLoop  # with torch, in the worker's own process

        self._on_output = on_output
        self._loop = EngineLoop(engine, self.publish, on_broken, role)
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_started(self) -> bool:
        return self._event_loop is not None

    def connect(self) -> None:
        """Take the running event loop for the one that outputs go to. Called once, before `start`."""
        self._event_loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begin to compute."""
        self._loop.start()

    def stop(self) -> None:
        """End the thread after the step under way. Nothing is computed any more."""
        self._loop.stop()

    def post(self, command: "Callable[[Engine], None]") -> None:
        """Have `command` run in the engine's thread between two steps. Commands run in the order of posting."""
        self._loop.post(command)

    def take_on(self, assignments: Sequence[Assignment], epoch: int) -> None:
        """Have the engine of this incarnation compute requests, from its next step on; a request that it does not take
        ends with an error event."""
        now = time.monotonic()
        self.post(lambda engine: self._take_on(engine, assignments, epoch, now))

    def _take_on(self, engine: "Engine", assignments: Sequence[Assignment], epoch: int, now: float) -> None:
        from raydix.engine.model.engine import StepResult, error_event

        for assignment in assignments:
            try:
                engine.submit(assignment, now)
                if assignment.promised_to not in (0, epoch):  # what was sent went to an earlier incarnation
                    engine.scheduler.imports.stop_awaiting([assignment.request_id])
            except Exception as error:  # its ingress must hear that nothing will come
                logger.exception(
                    "%s not taken on",
                    assignment.request_id,
                    extra=about("not_taken_on", request=assignment.request_id, attempt=assignment.attempt),
                )
                position = len(assignment.token_ids) - assignment.num_prompt_tokens
                event = error_event(assignment, position, f"{type(error).__name__}: {error}")
                self.publish(StepResult(failures=(event,)))

    async def ask(self, question: "Callable[[Engine], T]") -> T:
        """Run `question(engine)` in the engine's thread and return its answer, or raise its error."""
        reply: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command(engine: "Engine") -> None:
            try:
                reply.set_result(question(engine))
            except Exception as error:  # the engine's thread must survive; the caller gets the error
                reply.set_exception(error)

        self.post(command)

        # A caller that is cancelled must not cancel the future, into which the thread will write its answer.
        return await asyncio.shield(asyncio.wrap_future(reply))

    def in_event_loop(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have the event loop call a function. Called in the engine's thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(function, *args)

    def publish(self, output: "StepResult") -> None:
        """Hand an output to the event loop. Called in the engine's thread."""
        self.in_event_loop(self._on_output, output)
