"""Log-probabilities of prompts in bfloat16 on CPU: the same bits, whatever happened around them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from raydix.engine.core.types import Assignment, Sampling, Stage, TokenLogprobs
from raydix.engine.model import runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine, StepResult
from tests.model.test_exactness import decoder, make_engine, prompt

__all__ = ["decoder"]

LENGTHS = (1, 2, 16, 17, 300, 700)
Scores = list[TokenLogprobs]


def scoring(token_ids: Sequence[int], name: str = "r", max_tokens: int = 0, num_top: int = 3) -> Assignment:
    sampling = Sampling(max_tokens, temperature=0.0, logprobs=num_top, prompt_logprobs=num_top)
    return Assignment(name, 0, Stage.WHOLE, tuple(token_ids), len(token_ids), sampling, "ingress")


def take(step: StepResult, scores: dict[str, Scores]) -> None:
    for event in step.scores:
        known = scores.setdefault(event.request_id, [])
        assert event.position == 1 + len(known)
        known += event.logprobs


def score(engine: Engine, *assignments: Assignment) -> dict[str, Scores]:
    for each in assignments:
        engine.submit(each, 0.0)
    scores: dict[str, Scores] = {each.request_id: [] for each in assignments}
    while (step := engine.step(0.0)) is not None:
        take(step, scores)
    engine.scheduler.check_integrity()
    assert engine.pool.num_available == engine.pool.num_blocks
    return scores


@pytest.fixture(scope="module")
def cold(decoder: Decoder) -> dict[int, Scores]:
    """Each prompt alone in a fresh engine: what everything below must equal."""
    return {length: score(make_engine(decoder), scoring(prompt(length, length)))["r"] for length in LENGTHS}


def test_every_token_but_the_first_is_scored(cold: dict[int, Scores]) -> None:
    for length, scores in cold.items():
        assert len(scores) == length - 1
        for at, token_id in zip(scores, prompt(length, length)[1:], strict=True):
            assert at.rank is not None
            assert len(at.top_ids) == 3
            if token_id in at.top_ids:
                place = at.top_ids.index(token_id)
                assert (at.rank, at.chosen) == (place + 1, at.top_logprobs[place])
            else:
                assert at.rank > 3
                assert at.chosen <= at.top_logprobs[-1]


@pytest.mark.parametrize("budget", [16, 64, 1024])
def test_chunk_sizes(decoder: Decoder, cold: dict[int, Scores], budget: int) -> None:
    for length in LENGTHS:
        engine = make_engine(decoder, budget, max_requests=16)
        assert score(engine, scoring(prompt(length, length)))["r"] == cold[length]


def test_rows_whose_logits_are_held_at_once(
    decoder: Decoder, cold: dict[int, Scores], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SCORED_ROWS", 7)
    assert score(make_engine(decoder), scoring(prompt(300, 300)))["r"] == cold[300]


def test_with_cached_blocks_and_with_scored_ones(decoder: Decoder, cold: dict[int, Scores]) -> None:
    for length in LENGTHS:
        engine = make_engine(decoder)
        plain = scoring(prompt(length, length), max_tokens=1)
        score(engine, replace(plain, sampling=Sampling(1)))
        assert score(engine, plain)["r"] == cold[length], "its KV was cached"
        assert score(engine, plain)["r"] == cold[length], "its scores were kept"
        engine.pool.reset()
        assert score(engine, plain)["r"] == cold[length], "its scores were kept, its KV was not"


def test_a_shared_prefix(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    shared = prompt(1, 200)
    score(engine, scoring(shared + prompt(2, 50)))
    for seed in (3, 4):
        token_ids = shared + prompt(seed, 60)
        alone = score(make_engine(decoder), scoring(token_ids))
        assert score(engine, scoring(token_ids)) == alone


def test_among_others(decoder: Decoder, cold: dict[int, Scores]) -> None:
    engine = make_engine(decoder, budget=200, num_blocks=900)
    ours = [scoring(prompt(length, length), f"ours {length}", max_tokens=9) for length in LENGTHS]
    others = [scoring(prompt(1000 + index, 5 + 9 * index), f"other {index}") for index in range(20)]
    together = score(engine, *others[:10], *ours, *others[10:])
    for length in LENGTHS:
        assert together[f"ours {length}"] == cold[length]


@pytest.mark.parametrize("length", [16, 17, 300])
def test_prefilled_by_one_engine_and_decoded_by_another(decoder: Decoder, cold: dict[int, Scores], length: int) -> None:
    prefill, decode = make_engine(decoder, budget=128), make_engine(decoder)
    whole = scoring(prompt(length, length), max_tokens=4)
    prefill.submit(replace(whole, stage=Stage.PREFILL), 0.0)
    decode.submit(replace(whole, stage=Stage.DECODE), 0.0)
    scores: dict[str, Scores] = {}
    while (step := prefill.step(0.0)) is not None:
        take(step, scores)
        for segment in step.segments:
            assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert scores["r"] == cold[length]
    while (step := decode.step(0.0)) is not None:
        assert (step.shape.num_prefill_tokens, step.shape.num_decodes) == (0, 1) and not step.scores


def test_generated_tokens_are_scored_as_they_were_sampled(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    token_ids = prompt(5, 40)
    engine.submit(scoring(token_ids, max_tokens=30), 0.0)
    generated: list[tuple[int, TokenLogprobs]] = []
    while (step := engine.step(0.0)) is not None:
        generated += [(event.token_id, event.logprobs) for event in step.events]  # type: ignore[misc]
    text = [*token_ids, *(token_id for token_id, _ in generated)]
    scores = score(make_engine(decoder), scoring(text))["r"][len(token_ids) - 1 :]
    assert [at._replace(rank=None) for at in scores] == [at for _, at in generated]
    assert [at.rank for at in scores] == [1] * len(generated), "greedy"
