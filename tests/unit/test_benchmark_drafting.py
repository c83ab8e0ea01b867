"""The engines' side of the benchmark of drafts, on a model whose answers are known."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.drafting import gaps, identity
from benchmarks.drafting.comparing import Tally
from benchmarks.drafting.drafters import Kind, Told, adversarial
from benchmarks.drafting.engines import Worker, Workshop, settings
from benchmarks.drafting.identity import CIRCUMSTANCES, Bench
from benchmarks.drafting.questions import Question
from benchmarks.drafting.speed import MODES, Speed, counts_now
from benchmarks.drafting.statistics import compared, since
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import DraftSource, SamplingParams
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.step import RunnerOutput, SampledToken, SchedulerOutput
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.sources import DEFAULT_MODEL
from tests.unit.builders import FINGERPRINT, VOCAB, FakeModel

BUDGET = 64
PROMPTS = [tuple(range(100 * number, 107 * number + 30)) for number in range(1, 5)]


class Careless(FakeModel):
    """A model whose first row is another token where a draft stands behind."""

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        computed = super().run(output)
        drafted = {chunk.request.request_id for chunk in output.chunks if chunk.draft}
        sampled = {
            name: [SampledToken((found[0].token_id + 1) % VOCAB)] if name in drafted else found
            for name, found in computed.sampled.items()
        }
        return replace(computed, sampled=sampled)


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

    def engine(
        self, grammars: Grammars, drafter: Drafter | None, *, num_blocks: int | None = None, swap_bytes: int = 0
    ) -> Engine:
        pool = BlockPool(num_blocks or self.num_blocks, self.settings.block_size)
        model = self._model(pool)
        return Engine(
            runner=model,
            store=model,
            pool=pool,
            limits=self.settings.limits,
            max_model_len=pool.num_blocks * pool.block_size,
            fingerprint=FINGERPRINT,
            swap_bytes=swap_bytes,
            grammars=grammars,
            drafter=drafter,
        )


def questions() -> list[Question]:
    sampling = SamplingParams(20)
    return [Question("edits", prompt, sampling) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def report() -> Iterator[identity.Report]:
    yield identity.check(SmallWorkshop(), {"edits": questions(), "chats": questions()}, 20, 20)


def test_the_default_engine_makes_drafts_of_all_sources() -> None:
    made = settings(DEFAULT_MODEL)
    assert made.drafts is not None and made.drafts.sources == tuple(DraftSource)
    assert made.limits == SchedulerLimits(256, 64)


def test_nothing_differs_and_every_circumstance_occurs(report: identity.Report) -> None:
    assert list(report) == ["off", *DraftSource, "choices", "all", "adversarial", "random"]
    for kind, tallies in report.items():
        assert list(tallies) == list(CIRCUMSTANCES)
        assert all(each["compared"] == 20 and each["differing"] == 0 for each in tallies.values()), kind
        assert all(each["events"] > 0 for name, each in tallies.items() if name != "alone"), kind
    drafted = {kind: sum(each["drafted"] for each in tallies.values()) for kind, tallies in report.items()}
    assert drafted["off"] == drafted["grammar"] == 0
    assert (
        min(drafted[kind] for kind in ("request", "prediction", "past", "choices", "all", "adversarial", "random")) > 50
    )


def test_a_model_that_drafts_change_is_found_out() -> None:
    found = identity.check(SmallWorkshop(Careless), {"edits": questions()}, 4, 20)
    assert all(each["differing"] == 0 for each in found["off"].values())
    assert all(each["differing"] > 0 and each["first_differences"] for each in found["adversarial"].values())


def test_drafts_are_of_the_vocabulary() -> None:
    workshop = SmallWorkshop()
    asked = identity.requests({"edits": questions()}, 4, 20)
    expected = identity.alone(Bench(workshop, Kind("off", lambda grammars: None), Tally()), asked)
    drafter = Told(workshop.draft_limits, VOCAB, expected, adversarial)
    engine = workshop.engine(workshop.grammars(), drafter)
    engine.submit(asked[0], 0.0)
    engine.step(0.0)
    drafts = [draft for _ in range(50) for draft in drafter.propose(engine.scheduler)]
    assert {token_id for draft in drafts for token_id in draft.token_ids} == set(range(VOCAB))


# Speed and gaps


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


def test_gaps_beside_a_prompt() -> None:
    speed = Speed(SmallWorkshop())
    found = {mode: [gaps.measure(speed.workers[mode], questions(), 5, 300, seed)] for seed, mode in enumerate(MODES)}
    for [each] in found.values():
        assert each.quiet_ms > 0 and 0 < each.median_ms <= each.longest_ms and each.budget_step_ms > 0
        assert 5 < each.most_tokens <= BUDGET
    assert found["off"][0].draft_tokens == 0
    result = gaps.report(found, BUDGET)
    assert result["within_budget"] and result["longest_auto_over_off"] > 0
    assert not gaps.report({mode: [replace(each, most_tokens=65) for each in it] for mode, it in found.items()}, 64)[
        "within_budget"
    ]
    for worker in speed.workers.values():
        assert worker.engine.scheduler.num_requests == 0


def test_a_failed_request_ends_the_measurement() -> None:
    class Broken(FakeModel):
        def run(self, output: SchedulerOutput) -> RunnerOutput:
            raise ValueError("broken")

    workshop = SmallWorkshop(Broken)
    worker = Worker(workshop.engine(workshop.grammars(), None))
    with pytest.raises(RuntimeError, match="requests failed"):
        worker.run([questions()[0].assignment("a")])
