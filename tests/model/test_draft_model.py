"""A draft model changes no bit of any answer: a truncated copy of the model, which errs, and the model itself, whose
guesses are all right."""

import json
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.drafting.truncated import truncated_copy
from engine.core.errors import StartupError
from engine.core.settings import DraftLimits, DraftModelSettings, EngineSettings, SchedulerLimits
from engine.core.types import DraftSource
from engine.core.worker.drafts.draft import DraftCounts
from engine.core.worker.drafts.draft_model import ModelCosts, Wanted
from engine.core.worker.drafts.drafter import Drafter
from engine.core.worker.request import Request
from engine.model.build import make_draft_model, make_drafter, make_pool
from engine.model.decoder import Decoder, ForwardBatch
from engine.model.draft_model import BEGUN_PER_STEP, PagedDraftModel
from engine.model.engine import Engine
from engine.model.kv_pool import KVPool
from engine.model.preparing import prepare
from engine.model.sources import DEFAULT_MODEL, resolve_model
from tests.model import test_grammar_drafts
from tests.model.test_drafts import CHEAP, NUM_TOKENS, Output, make_engine, requests, run
from tests.model.test_exactness import BLOCK_SIZE, load_decoder
from tests.model.test_grammars import grammars
from tests.unit.builders import chain_of

NUM_LAYERS = 24
"""Of the truncated copy; the model has 30."""
ONLY = DraftLimits(sources=(DraftSource.MODEL,))
NEXT_TO_NOTHING = ModelCosts(1e-9, 1e-9, 1e-9)


class Asked(PagedDraftModel):
    """A draft model that seems to cost next to nothing, so that it is asked in each step."""

    def costs(self) -> ModelCosts:
        return NEXT_TO_NOTHING

    def keep(self, requests: Collection[Request]) -> None:
        super().keep(requests)
        self.check_integrity()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, decoder: Decoder) -> Path:
    """The truncated copy."""
    return truncated_copy(resolve_model(DEFAULT_MODEL), tmp_path_factory.mktemp("draft") / "truncated", NUM_LAYERS)


@pytest.fixture(scope="module")
def truncated(folder: Path) -> Decoder:
    return Decoder.from_folder(folder, torch.bfloat16, "cpu", 2048)


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> dict[str, Output]:
    """Each request alone in its turn, without drafts."""
    engine, outputs = make_engine(decoder), dict[str, Output]()
    for each in requests():
        outputs |= run(engine, [each])
        engine.scheduler.reset()
    return outputs


def asked(draft: Decoder, target: Decoder, num_blocks: int = 400) -> Asked:
    pool = make_pool(draft.config, num_blocks, BLOCK_SIZE, torch.bfloat16, draft.device)
    return Asked(draft, pool, target.config.vocab_size)


def drafting(target: Decoder, model: PagedDraftModel, limits: DraftLimits = ONLY, num_blocks: int = 400) -> Engine:
    return make_engine(target, Drafter(limits, model=model), num_blocks=num_blocks)


def counts_of(engine: Engine) -> DraftCounts:
    return engine.scheduler.drafting.counts[DraftSource.MODEL]


def test_a_truncated_copy_changes_no_bit(
    decoder: Decoder, truncated: Decoder, plain: dict[str, Output], record_property: Callable[[str, object], None]
) -> None:
    """Alone first, and then all together, beside the drafts of all other sources, too."""
    engine = drafting(decoder, model := asked(truncated, decoder))
    for each in requests()[::3]:
        assert run(engine, [each]) == {each.request_id: plain[each.request_id]}
    assert run(engine, requests()) == plain
    counts = counts_of(engine)
    record_property("accepted", f"{counts.num_accepted} of {counts.num_drafted}")
    assert 0 < counts.num_accepted < counts.num_drafted
    model.keep(())
    assert model.num_free_blocks == 400

    assert run(drafting(decoder, model, DraftLimits()), requests()) == plain


def test_the_model_itself_is_always_right(decoder: Decoder, plain: dict[str, Output]) -> None:
    """Its noise is the answer's: sampled guesses are right, too, whatever the parameters."""
    engine = drafting(decoder, asked(decoder, decoder))
    assert run(engine, requests()) == plain
    counts = counts_of(engine)
    num_tokens = sum(len(output) for output in plain.values())
    assert counts.num_accepted > num_tokens / 2
    assert counts.num_drafted == counts.num_accepted, "a draft ends before a stop token"


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_requests_that_are_preempted_are_begun_again(
    decoder: Decoder, truncated: Decoder, plain: dict[str, Output], swap_bytes: int
) -> None:
    drafter = Drafter(ONLY, model=asked(truncated, decoder))
    engine = make_engine(decoder, drafter, num_blocks=30, swap_bytes=swap_bytes)
    engine.scheduler.learn_costs(replace(CHEAP, swap_s=0.0, swap_byte_s=0.0))
    assert run(engine, requests()) == plain
    counts = engine.preemptions
    assert counts.num_swapped > 0 if swap_bytes else counts.num_recomputed > 0
    assert counts_of(engine).num_accepted > 0


def test_requests_without_room_have_no_drafts(decoder: Decoder, plain: dict[str, Output]) -> None:
    """Three blocks have room for one short request at a time."""
    engine = drafting(decoder, asked(decoder, decoder, num_blocks=3))
    assert run(engine, requests()) == plain
    short = [len(output) for name, output in plain.items() if name.startswith(("one ", "block "))]
    assert 0 < counts_of(engine).num_drafted <= sum(short)


def test_a_prompt_longer_than_one_step_begins(decoder: Decoder) -> None:
    chance = random.Random(3)
    prompt = tuple(chance.randrange(49_000) for _ in range(2 * BEGUN_PER_STEP + 70))
    first = requests()[0]
    long = replace(first, request_id="long", token_ids=prompt, num_prompt_tokens=len(prompt))
    alone = run(make_engine(decoder), [long]) | run(make_engine(decoder), [first])
    engine = drafting(decoder, asked(decoder, decoder))
    assert run(engine, [long, first]) == alone
    counts = counts_of(engine)
    assert counts.num_drafted == counts.num_accepted > NUM_TOKENS


def test_answers_with_a_grammar(decoder: Decoder, truncated: Decoder) -> None:
    wanted = test_grammar_drafts.requests()
    alone = run(make_engine(decoder, grammars=grammars()), wanted)
    accepted = 0
    for sources in ([DraftSource.MODEL], [DraftSource.MODEL, DraftSource.GRAMMAR], list(DraftSource)):
        drafter = Drafter(DraftLimits(sources=tuple(sources)), grammars(), asked(truncated, decoder))
        engine = make_engine(decoder, drafter, grammars=grammars())
        assert run(engine, wanted) == alone
        accepted += counts_of(engine).num_accepted
    assert accepted > 0


class Failing(Decoder):
    """A decoder that computes nothing."""

    def hidden(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_a_model_that_fails_harms_no_request(
    decoder: Decoder, folder: Path, plain: dict[str, Output], caplog: pytest.LogCaptureFixture
) -> None:
    model = asked(Failing.from_folder(folder, torch.bfloat16, "cpu", 2048), decoder)
    engine = drafting(decoder, model)
    wanted = requests()[:3]
    assert run(engine, wanted) == {each.request_id: plain[each.request_id] for each in wanted}
    assert counts_of(engine).num_drafted == 0
    assert [record.message for record in caplog.records] == ["the draft model fails: there are no more drafts of it"]


def test_vocabularies_may_be_padded_differently(decoder: Decoder) -> None:
    """Tokens that the draft model has alone are never guessed, and the ones that it lacks have no chance."""
    wanted, vocab_size = requests()[:2], decoder.config.vocab_size
    for num_more in (-40_000, 64):
        model = asked(decoder, decoder)
        model._vocab_size = vocab_size + num_more
        request = Request(wanted[0], chain_of(), arrival=0)
        request.token_ids = [token_id % 5000 for token_id in request.token_ids]
        guesses = model.guesses([Wanted(request, 8)])[request.request_id]
        assert len(guesses) == 8 and max(guesses) < vocab_size + min(0, num_more)
        assert model.num_missing(request, 8) == 0

    request.token_ids.append(vocab_size)
    assert model.num_missing(request, 8) is None, "a token that the draft model does not have"


# At the start


def settings(source: str, pool_bytes: int = 64 << 20) -> EngineSettings:
    return EngineSettings(
        source=DEFAULT_MODEL,
        dtype="bfloat16",
        device="cpu",
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        num_blocks=200,
        pool_gib=1.0,
        limits=SchedulerLimits(256, 8),
        drafts=DraftLimits(model=DraftModelSettings(source, pool_bytes)),
    )


def test_a_draft_model_is_loaded_from_its_folder(decoder: Decoder, folder: Path, plain: dict[str, Output]) -> None:
    """With its costs as measured, whatever these make of it."""
    made = settings(str(folder))
    drafter = make_drafter(decoder, made.drafts, None, lambda: make_draft_model(made, decoder))
    engine = make_engine(decoder, drafter)
    assert run(engine, requests()) == plain
    assert counts_of(engine).num_drafted > 0 and drafter is not None and drafter.take_model_s() == 0.0


def test_a_pool_without_a_block_is_refused(decoder: Decoder, folder: Path) -> None:
    with pytest.raises(StartupError, match=r"speculation\.draft_pool_mib holds no block"):
        make_draft_model(settings(str(folder), 1000), decoder)


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    truncated_copy(folder, other, 1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {token_id: name for name, token_id in vocabulary.items()}
    vocabulary[names[300]], vocabulary[names[301]] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError) as raised:
        prepare([settings(str(other))], lambda line: None)
    message = str(raised.value)
    assert str(other) in message and DEFAULT_MODEL in message
    assert "2 of 49,152 token ids differ, the first is 300" in message
    assert repr(names[300]) in message and repr(names[301]) in message


def test_a_draft_model_that_computes_nothing_is_refused() -> None:
    with pytest.raises(StartupError, match="computes nothing"):
        prepare([settings(f"null:{DEFAULT_MODEL}")], lambda line: None)
