"""The thread that owns an engine: takes commands, steps while there is work, hands out what happened."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.types import BlockHash, EvictionReason, TokenEvent
from engine.model.engine import Engine, StepResult

logger = logging.getLogger(__name__)

_SPIN_S = 0.001
"""Pause when requests are here but none can move: exports that hold blocks are about to release them."""

_NICENESS = 5
"""Of the engine's thread and of those it starts, on top of its process's: while all cores compute, whoever handles a
message goes first."""


@dataclass(frozen=True, slots=True)
class LoopOutput:
    """What happened since the last one. `step` is None when only the pool changed."""

    step: StepResult | None
    sealed: tuple[BlockHash, ...]
    evicted: tuple[tuple[BlockHash, EvictionReason], ...]
    failures: tuple[TokenEvent, ...] = ()
    step_s: float = 0.0


class EngineLoop:
    """Runs an engine in a thread of its own.

    `publish` is called in that thread after each step and each change of the pool; it must not block.
    """

    def __init__(self, engine: Engine, publish: Callable[[LoopOutput], None]) -> None:
        self._engine = engine
        self._publish = publish
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way."""
        self._commands.put(None)
        self._thread.join()

    def post(self, command: Callable[[Engine], None]) -> None:
        """Have `command` run between two steps. Commands run in the order in which they were posted."""
        self._commands.put(command)

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            os.nice(_NICENESS)
        wait_s: float | None = None
        while self._take_commands(wait_s):
            started = time.monotonic()
            step, failures = self._step(started)
            sealed, evicted = self._engine.pool.drain_journal()
            if step is not None or sealed or evicted or failures:
                took = time.monotonic() - started
                self._publish(LoopOutput(step, tuple(sealed), tuple(evicted), tuple(failures), took))
            wait_s = 0.0 if step is not None else self._idle_s()

    def _step(self, now: float) -> tuple[StepResult | None, list[TokenEvent]]:
        try:
            return self._engine.step(now), []
        except Exception as error:  # a step that fails must not take the other requests' streams with it silently
            logger.exception("step failed")
            return None, self._engine.fail_all(f"{type(error).__name__}: {error}")

    def _idle_s(self) -> float | None:
        """How long nothing can happen without a command; None for ever."""
        scheduler = self._engine.scheduler
        if scheduler.running or scheduler.preempted:
            return _SPIN_S
        deadline = scheduler.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _take_commands(self, wait_s: float | None) -> bool:
        """Run what was posted, waiting up to `wait_s` for the first; False when told to stop."""
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
        except Exception:  # nobody else would run the engine
            logger.exception("command failed")
