"""Models with recurrent layers find their prefixes in the cache, with and without drafts, and give the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import DraftLimits, EngineSettings, SchedulerLimits
from raydix.engine.core.types import Stage, TokenEvent
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.model.build import build_engine
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.runner import ModelRunner
from tests.model.random_models import reference
from tests.model.test_family_exactness import ask, make_engine
from tests.skips import NO_PRODUCT

RECURRENT = ["qwen 3.5", "lfm 2", "qwen 3 next", "granite 4", "granite 4 moe", "bamba", "nemotron h", "nemotron 3"]
GENERATOR = torch.Generator().manual_seed(3)
TEXT = tuple(torch.randint(1, 200, (400,), generator=GENERATOR).tolist())
DOCUMENT = TEXT[:160]
"""The beginning that prompts share: ten blocks."""
QUESTIONS = {length: TEXT[200 : 200 + length] for length in (5, 64, 65, 100)}


@pytest.fixture(params=RECURRENT)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    reference(request.param, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu")
    if not decoder.has_independent_rows:
        pytest.skip(NO_PRODUCT)
    return decoder


def engine_of(decoder: Decoder, drafter: Drafter | None = None, budget: int = 512) -> Engine:
    return make_engine(decoder, drafter=drafter, budget=budget, max_len=400)


def answer(engine: Engine, prompt: Sequence[int]) -> tuple[list[tuple[object, object]], int]:
    """The tokens of an answer with their log-probabilities, and the tokens of the prompt that were cached."""
    engine.submit(ask("ours", prompt), 0.0)
    events: list[TokenEvent] = []
    while (step := engine.step(0.0)) is not None:
        events += step.events
    engine.scheduler.check_integrity()
    return [(event.token_id, event.logprobs) for event in events], events[-1].cached_tokens


@pytest.mark.parametrize("length", QUESTIONS)
def test_prompts_that_begin_alike_hit_however_long_their_ends_are(decoder: Decoder, length: int) -> None:
    """The second one makes the snapshot where it parts from the first."""
    engine = engine_of(decoder)
    ends = [QUESTIONS[length], QUESTIONS[length][::-1], (*QUESTIONS[length][1:], 7)]
    cached = []
    for end in ends:
        prompt = (*DOCUMENT, *end)
        found, num_cached = answer(engine, prompt)
        assert found == answer(engine_of(decoder), prompt)[0]
        cached.append(num_cached)
    # Behind a short question the first prompt's own last snapshot lies at the end of the document.
    assert cached == [0, 160 if length < 16 else 0, 160]


def test_drafts_change_no_hits(decoder: Decoder) -> None:
    plain, drafting = engine_of(decoder), engine_of(decoder, Drafter(DraftLimits()))
    said: tuple[int, ...] = DOCUMENT
    for turn in range(4):
        with_drafts, without = answer(drafting, said), answer(plain, said)
        assert with_drafts == without
        assert (without[1] > 0) == (turn > 0)
        tokens = [int(token) for token, _ in without[0]]  # type: ignore[call-overload]
        assert with_drafts[1] == (0 if turn == 0 else (len(said) - 10 - 1) // 16 * 16)
        said = (*said, *tokens, *TEXT[300 + 10 * turn : 310 + 10 * turn])
    assert any(counts.num_accepted for counts in drafting.scheduler.drafting.counts.values())


@pytest.mark.parametrize("budget", [16, 33, 50, 512])
def test_chunks_of_any_size_leave_the_same_snapshots(decoder: Decoder, budget: int) -> None:
    prompt = (*DOCUMENT, *QUESTIONS[100])
    cold, _ = answer(engine_of(decoder), prompt)
    engine = engine_of(decoder, budget=budget)
    assert answer(engine, prompt) == (cold, 0)
    assert answer(engine, prompt) == (cold, (len(prompt) - 1) // 16 * 16)


@pytest.mark.parametrize("length", [15, 160, 165])
def test_prefilled_by_one_engine_and_decoded_by_another(decoder: Decoder, length: int) -> None:
    """Within a block, and at the end of one."""
    whole = ask("ours", TEXT[:length])
    cold, _ = answer(engine_of(decoder), TEXT[:length])
    prefill, decode = engine_of(decoder, budget=50), engine_of(decoder)
    prefill.submit(replace(whole, stage=Stage.PREFILL), 0.0)
    decode.submit(replace(whole, stage=Stage.DECODE), 0.0)
    assert decode.step(0.0) is None, "it waits for the hand-over"
    outputs: list[tuple[object, object]] = []
    while (step := prefill.step(0.0)) is not None:
        outputs += [(event.token_id, event.logprobs) for event in step.events]
        for segment in step.segments:
            assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    while (step := decode.step(0.0)) is not None:
        assert step.shape.num_prefill_tokens == 0, "nothing of the prompt is computed twice"
        outputs += [(event.token_id, event.logprobs) for event in step.events]
    assert outputs == cold
    for engine in (prefill, decode):
        engine.scheduler.check_integrity()


def test_a_hit_with_another_engine_s_state(decoder: Decoder) -> None:
    prompt = (*DOCUMENT, *QUESTIONS[64])
    first, second = engine_of(decoder), engine_of(decoder)
    cold = answer(first, prompt)
    segments, missing = first.exchange.export(first.pool.hashes(), 0.0)
    assert missing == ()
    for segment in segments:
        assert len(segment.header.states) > 1
        assert second.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert answer(second, prompt) == (cold[0], (len(prompt) - 1) // 16 * 16)


def test_a_step_that_fails_once_is_computed_again_from_the_same_states(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is halved until the request that raises is alone; the others' states are what they were."""
    expected, _ = answer(engine_of(decoder), DOCUMENT)
    engine, num_failures = engine_of(decoder), 0
    whole = ModelRunner.hidden

    def fails_for_bad(runner: ModelRunner, chunks: Sequence[object]) -> torch.Tensor:
        nonlocal num_failures
        hidden = whole(runner, chunks)  # type: ignore[arg-type]
        if any(chunk.request.request_id == "bad" for chunk in chunks):  # type: ignore[attr-defined]
            num_failures += 1
            raise RuntimeError("computed, and then failed")
        return hidden

    monkeypatch.setattr(ModelRunner, "hidden", fails_for_bad)
    engine.submit(ask("bad", TEXT[200:230]), 0.0)
    assert answer(engine, DOCUMENT)[0] == expected
    assert num_failures >= 2


def test_adapters_are_refused_by_name(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="recurrent layers, which take no adapters"):
        decoder.load_lora(tmp_path)


def test_an_engine_of_a_folder_keeps_states_beside_its_blocks(tmp_path: Path) -> None:
    reference(RECURRENT[0], tmp_path)
    settings = EngineSettings(
        source=str(tmp_path),
        dtype="bfloat16",
        device="cpu",
        max_model_len=400,
        block_size=16,
        num_blocks=None,
        pool_gib=0.01,
        limits=SchedulerLimits(64, 4),
        swap_bytes=1 << 20,
        drafts=DraftLimits(),
    )
    tensors: list[int] = []
    with pytest.raises(StartupError, match="recurrent layers, which take no adapters"):
        build_engine(replace(settings, adapters=(("name", "folder"),)), on_tensor=lambda: tensors.append(1))
    assert not tensors, "refused before the weights are read"
    engine = build_engine(settings)
    states = engine.pool.states
    assert states is not None and states.num_slots > 8
    policy = engine.scheduler.swap_policy
    assert policy.max_blocks > policy.num_extra > 0 and policy.state_bytes == engine.exchange.state_bytes
    cold = answer(engine, DOCUMENT)
    assert cold[1] == 0 and answer(engine, DOCUMENT) == (cold[0], 144)
    engine.runner.check()
