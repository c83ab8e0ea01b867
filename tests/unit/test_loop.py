"""The thread that runs an engine. Every wait here is for something that must happen, with a limit."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

import pytest

from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import EvictionReason, FinishReason, Role, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.step import RunnerOutput, SchedulerOutput
from raydix.engine.model.engine import Engine, StepResult
from raydix.engine.model.grammar_source import GrammarError
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.loop import EngineLoop
from tests.unit.builders import FINGERPRINT, FakeModel, answer_to, hashes_of, make_assignment, tokens_of
from tests.unit.waits import WAIT_S

PROMPT = (1, 2, 3, 0, 1)

T = TypeVar("T")


class Watched:
    """A loop whose outputs are collected, and a model that fails, or breaks for good, when told to."""

    def __init__(self, role: Role = Role.MIXED) -> None:
        self.outputs: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.fails = threading.Event()
        self.is_broken = threading.Event()
        self.reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        pool = BlockPool(8, 4)
        self.model = FakeModel(pool)
        self.engine = Engine(self, self.model, pool, SchedulerLimits(8, 4), 32, FINGERPRINT)
        self.loop = EngineLoop(self.engine, self.outputs.put, self.reasons.put, role)

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        if self.fails.is_set():
            raise ValueError("out of luck")
        self.check()
        return self.model.run(output)

    def check(self) -> None:
        if self.is_broken.is_set():
            raise RuntimeError("illegal memory access")

    def warm_up(self, num_tokens: int) -> None:
        """It is always warm."""

    def submit(self, *args: Any, now: float = 0.0, **kwargs: Any) -> None:
        assignment = make_assignment(*args, **kwargs)
        self.loop.post(lambda engine: engine.submit(assignment, now))

    def events_until_end(self) -> list[TokenEvent]:
        """All events up to the first that ends a request."""
        events: list[TokenEvent] = []
        while not any(event.finish for event in events):
            output = self.outputs.get(timeout=WAIT_S)
            events += output.events
            events += output.failures
        return events

    def ask(self, question: Callable[[Engine], T]) -> T:
        """What a command sees, once it has run."""
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.loop.post(lambda engine: answers.put(question(engine)))
        return answers.get(timeout=WAIT_S)


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    watched.loop.start()
    yield watched
    watched.loop.stop()
    watched.engine.scheduler.check_integrity()


def test_it_steps_while_there_is_work_and_tells_of_the_pool(watched: Watched) -> None:
    watched.submit(prompt=PROMPT, max_tokens=2)
    output = watched.outputs.get(timeout=WAIT_S)
    assert output.shape.num_prefill_tokens == 5
    assert output.sealed == tuple(hashes_of(PROMPT)) and output.evicted == ()
    assert output.step_s > 0
    output = watched.outputs.get(timeout=WAIT_S)
    assert [event.token_id for event in output.events] == answer_to(make_assignment(prompt=PROMPT))[1:2]


def test_commands_run_in_order_and_changes_of_the_pool_are_told_without_a_step(watched: Watched) -> None:
    seen: list[int] = []

    def add(index: int, engine: Engine) -> None:
        seen.append(index)

    for index in range(5):
        watched.loop.post(partial(add, index))
    assert watched.ask(lambda engine: list(seen)) == [0, 1, 2, 3, 4]
    watched.submit(prompt=PROMPT, max_tokens=1)
    watched.events_until_end()
    watched.ask(lambda engine: engine.pool.reset())
    output = watched.outputs.get(timeout=WAIT_S)
    assert not output.has_computed and output.evicted == tuple(
        (gone, EvictionReason.RESET) for gone in hashes_of(PROMPT)
    )


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_engine_prepares_for_grammars_while_it_idles(monkeypatch: pytest.MonkeyPatch, is_idle: bool) -> None:
    monkeypatch.setattr("raydix.engine.model.loop.PREPARE_S", 0.0 if is_idle else 10 * WAIT_S)
    watched, loads = Watched(), queue.SimpleQueue[str]()

    def load() -> NoReturn:
        loads.put(threading.current_thread().name)
        raise GrammarError("no tokenizer")

    watched.engine.grammars = grammars = Grammars(load, 32)
    watched.loop.start()
    if is_idle:
        assert loads.get(timeout=WAIT_S).startswith("grammar"), "beside the engine's thread, without a request"
    watched.submit(prompt=PROMPT, max_tokens=2)
    assert len(watched.events_until_end()) == 2
    watched.loop.stop()
    grammars.compiler.settle()
    assert loads.empty(), "once, and not between steps"


def test_a_step_that_fails_ends_its_requests_and_the_loop_goes_on(watched: Watched) -> None:
    watched.fails.set()
    watched.submit(prompt=PROMPT)
    [event] = watched.events_until_end()
    assert event.finish is FinishReason.ERROR and event.token_id is None
    assert event.detail == "ValueError: out of luck"
    assert watched.ask(lambda engine: engine.pool.num_available) == 8
    watched.fails.clear()
    watched.submit("b", PROMPT)
    assert tokens_of(watched.events_until_end()) == answer_to(make_assignment(prompt=PROMPT))


def test_a_model_that_is_broken_for_good_ends_the_thread_and_no_request(watched: Watched) -> None:
    """Their streams go on at another worker, which an error event would prevent."""
    watched.submit(prompt=PROMPT)
    watched.events_until_end()
    watched.is_broken.set()
    watched.submit("s", prompt=PROMPT)
    assert watched.reasons.get(timeout=WAIT_S) == "RuntimeError: illegal memory access"
    watched.loop.stop()
    while not watched.outputs.empty():
        assert not watched.outputs.get().failures


def test_a_command_that_fails_does_not_end_the_thread(watched: Watched) -> None:
    def fail(engine: Engine) -> None:
        raise ZeroDivisionError

    watched.loop.post(fail)
    watched.submit(prompt=PROMPT)
    assert tokens_of(watched.events_until_end()) == answer_to(make_assignment(prompt=PROMPT))


def test_a_request_that_waits_starts_at_its_deadline(watched: Watched) -> None:
    """Without any command: the thread wakes by itself."""
    watched.submit(prompt=PROMPT, stage=Stage.DECODE, await_timeout_s=0.05, now=time.monotonic())
    assert tokens_of(watched.events_until_end()) == answer_to(make_assignment(prompt=PROMPT))


def test_a_request_moves_on_when_an_export_lets_go_of_its_blocks(watched: Watched) -> None:
    held = watched.ask(lambda engine: engine.pool.allocate(7, 0.0))
    watched.submit(prompt=PROMPT)
    waited = threading.Event()
    watched.loop.post(lambda engine: waited.set())
    assert waited.wait(WAIT_S)
    watched.loop.post(lambda engine: engine.pool.release(held, 0.0))
    assert tokens_of(watched.events_until_end()) == answer_to(make_assignment(prompt=PROMPT))


def test_stop_ends_the_thread_and_what_was_posted_before_it_runs() -> None:
    watched = Watched()
    watched.loop.start()
    ran = threading.Event()
    watched.loop.post(lambda engine: ran.set())
    watched.loop.stop()
    assert ran.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no niceness of its own")
def test_on_shared_cores_messages_go_before_prefills_and_these_before_decode_steps() -> None:
    niceness = {}
    for role in Role:
        watched = Watched(role)
        watched.loop.start()
        niceness[role] = watched.ask(lambda engine: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        watched.loop.stop()
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert here < niceness[Role.PREFILL] == niceness[Role.MIXED] < niceness[Role.DECODE]
