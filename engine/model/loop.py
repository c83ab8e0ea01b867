"""The thread that owns an engine: takes commands, steps while there is work, publishes the results."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from raydix.engine.core.types import Role
from raydix.engine.model.engine import Engine, StepResult

logger = logging.getLogger(__name__)

_SPIN_S = 0.001  # pause while requests exist but none can move: exports that hold blocks are about to release them

PREPARE_S = 3.0  # time without a step after which the engine prepares for requests of kinds that it has not had

NICENESS = {Role.PREFILL: 5, Role.MIXED: 5, Role.ELASTIC: 5, Role.DECODE: 10}
"""Niceness of an engine's thread and its child threads, on top of the process's.

While all cores compute, threads that handle messages go first. Where a prefill and a decode worker share cores, the
prefill gets three quarters of them: streams begin early and then decode in few full steps, and streams that decode
already go on meanwhile.
"""


class ModelBrokenError(Exception):
    """The model computes nothing any more, and its process can only be replaced."""


class EngineLoop:
    """Runs an engine in a thread of its own.

    `publish` is called in the thread after each step and each change of the pool, and must not block. `on_broken` is
    the thread's last call, when the model computes nothing any more.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[StepResult], None],
        on_broken: Callable[[str], None],
        role: Role = Role.MIXED,
    ) -> None:
        self._engine = engine
        self._publish = publish
        self._on_broken = on_broken
        self._niceness = NICENESS[role]
        # Time at which the engine prepares if it has had no step until then; None when it has prepared.
        self._prepares_at: float | None = None
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        if engine.grammars is not None:
            engine.grammars.compiler.wake = lambda: self.post(lambda engine: None)
        self._thread = threading.Thread(target=self._run_or_break, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way."""
        self._commands.put(None)
        self._thread.join()

    def post(self, command: Callable[[Engine], None]) -> None:
        """Have `command` run between two steps. Commands run in the order of posting."""
        self._commands.put(command)

    def _run_or_break(self) -> None:
        try:
            self._run()
        except BaseException as error:  # such as a panic of Rust's: no other thread would run the engine
            logger.exception("the engine's thread ends")
            self._on_broken(f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            os.nice(self._niceness)

        self._prepares_at = time.monotonic() + PREPARE_S
        wait_s: float | None = PREPARE_S
        while self._take_commands(wait_s):
            started = time.monotonic()
            try:
                result = self._step(started)
            except ModelBrokenError as error:
                self._on_broken(str(error))
                return
            sealed, evicted = self._engine.pool.drain_journal()
            if result.has_computed or sealed or evicted or result.failures:
                took = time.monotonic() - started
                self._publish(
                    replace(result, sealed=tuple(sealed), evicted=tuple(evicted), started_at=started, step_s=took)
                )
            if result.has_computed:
                wait_s = 0.0
                self._prepares_at = self._prepares_at and started + PREPARE_S
            else:
                wait_s = self._idle_s()

    def _step(self, now: float) -> StepResult:
        """Run one step; its failures include the ends of requests whose grammars are refused, or that failed in it."""
        refusals = self._engine.hear_of_grammars(now)
        try:
            result = self._engine.step(now) or StepResult()
        except Exception as error:
            logger.exception("step failed")
            if not self._engine.still_runs():
                raise ModelBrokenError(f"{type(error).__name__}: {error}") from error
            # No stream of a request that had a part in the step may stand still in silence.
            result = StepResult(failures=tuple(self._engine.fail_all(error, now)))
        return replace(result, failures=(*refusals, *result.failures)) if refusals else result

    def _idle_s(self) -> float | None:
        """Seconds for which nothing can happen without a command; None for ever."""
        scheduler = self._engine.scheduler
        if scheduler.running or scheduler.preempted:
            return _SPIN_S
        now, deadline = time.monotonic(), scheduler.imports.next_deadline()
        if self._prepares_at is not None and self._prepares_at <= now:
            self._engine.prepare()
            self._prepares_at = None
        times = [each for each in (deadline, self._prepares_at) if each is not None]
        return max(0.0, min(times) - now) if times else None

    def _take_commands(self, wait_s: float | None) -> bool:
        """Run the posted commands, waiting up to `wait_s` for the first; False when told to stop."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s != 0.0 else self._commands.get_nowait()
            while command is not None:
                self._carry_out(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _carry_out(self, command: Callable[[Engine], None]) -> None:
        try:
            command(self._engine)
        except Exception:  # of any kind: no other thread would run the engine
            logger.exception("command failed")
