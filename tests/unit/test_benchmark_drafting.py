"""The engines' side of the benchmark of drafts, on a model whose answers are known."""

from dataclasses import replace

import pytest

from benchmarks.drafting.engines import SteppedWorker, Workshop, settings
from benchmarks.drafting.questions import Question
from benchmarks.drafting.speed import MODES, Speed, counts_now
from benchmarks.drafting.statistics import compared, since
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import DraftSource, Sampling
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.step import RunnerOutput, SchedulerOutput
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.sources import DEFAULT_MODEL
from tests.unit.builders import FINGERPRINT, VOCAB, FakeModel

BUDGET = 64
PROMPTS = [tuple(range(100 * number, 107 * number + 30)) for number in range(1, 5)]


class SmallWorkshop(Workshop):
    """Makes engines of a model without weights."""

    def __init__(self, model: type[FakeModel] = FakeModel) -> None:
        self.settings = replace(settings(DEFAULT_MODEL), limits=SchedulerLimits(BUDGET, 32))
        self._model = model

    @property
    def num_blocks(self) -> int:
        return 400

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def grammars(self) -> Grammars:
        return Grammars(lambda: pytest.fail("no request has a grammar"), VOCAB)

    def drafter(self, grammars: Grammars) -> Drafter:
        return Drafter(self.draft_limits, grammars)

    def engine(self, grammars: Grammars, drafter: Drafter | None) -> Engine:
        pool = BlockPool(self.num_blocks, self.settings.block_size)
        model = self._model(pool)
        return Engine(
            runner=model,
            store=model,
            pool=pool,
            limits=self.settings.limits,
            max_model_len=pool.num_blocks * pool.block_size,
            fingerprint=FINGERPRINT,
            grammars=grammars,
            drafter=drafter,
        )


def questions() -> list[Question]:
    sampling = Sampling(20)
    return [Question("edits", prompt, sampling) for prompt in PROMPTS]


def test_the_default_engine_makes_drafts_of_all_sources() -> None:
    made = settings(DEFAULT_MODEL)
    assert made.drafts is not None and made.drafts.sources == tuple(DraftSource)
    assert made.limits == SchedulerLimits(256, 64)


def test_counts_are_those_of_their_time() -> None:
    worker = Speed(SmallWorkshop()).workers["auto"]
    before = counts_now(worker)
    worker.engine.scheduler.drafting.counts[DraftSource.PAST].add(3, 2)
    assert since(counts_now(worker), before)[DraftSource.PAST].num_drafted == 3


def test_speed_of_both_engines() -> None:
    speed = Speed(SmallWorkshop())
    for asked_before in (False, True):
        turns = speed.measure(questions(), 3, 2, asked_before=asked_before)
        assert list(turns) == list(MODES) and [len(found) for found in turns.values()] == [2, 2]
        for turn in (*turns["off"], *turns["auto"]):
            assert (turn.tokens, turn.decode_tokens) == (3 * 4 * 20, 3 * 4 * 19)
            assert turn.seconds > 0 and turn.decode_s > 0
        assert all(turn.decode_steps == turn.decode_tokens for turn in turns["off"])
        figures = compared(turns["off"], turns["auto"])
        assert figures["same_answers"] and figures["tokens"] == 240
    assert speed.workers["off"].engine.drafter is None
    speed.workers["auto"].engine.scheduler.check_integrity()


def test_a_turn_knows_nothing_of_the_turn_before() -> None:
    speed = Speed(SmallWorkshop())
    drafter = speed.workers["auto"].engine.drafter
    speed.measure(questions(), 1, 1, asked_before=False)
    assert speed.workers["auto"].engine.drafter is not drafter


def test_a_failed_request_ends_the_measurement() -> None:
    class Broken(FakeModel):
        def run(self, output: SchedulerOutput) -> RunnerOutput:
            raise ValueError("broken")

    workshop = SmallWorkshop(Broken)
    worker = SteppedWorker(workshop.engine(workshop.grammars(), None))
    with pytest.raises(RuntimeError, match="requests failed"):
        worker.submit(questions()[0].assignment("a"))
        worker.step()
