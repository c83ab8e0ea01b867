"""Tokens that requests exclude or ask about, from logits to the sampled token."""

import math
from typing import Any

import pytest
import torch

from raydix.engine.core.types import Assignment, Grammar, GrammarKind, Sampling, Stage
from raydix.engine.core.worker.drafts.rows import DraftedRow
from raydix.engine.core.worker.request import Request
from raydix.engine.model.grammars import StepMasks
from raydix.engine.model.masks import mask_of
from raydix.engine.model.sampler import MAX_RANKED, sample_requests, score_tokens
from tests.unit.builders import chain_of

VOCAB = 64
PROMPT = (9, 7)


def request(*generated: int, **fields: Any) -> Request:
    sampling = Sampling(max_tokens=99, **{"temperature": 0.0, **fields})
    token_ids = (*PROMPT, *generated)
    return Request(Assignment("r", 0, Stage.WHOLE, token_ids, len(PROMPT), sampling, ""), chain_of(), arrival=0)


@pytest.fixture
def logits() -> torch.Tensor:
    """One row; the likeliest tokens are 5, 6, 7."""
    row = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
    row[0, 5:8] = torch.tensor([9.0, 8.5, 8.0])
    return row


def sampled(logits: torch.Tensor, *requests: Request) -> list[int]:
    return [token.token_id for token in sample_requests(logits.repeat(len(requests), 1), requests)]


class Untold(DraftedRow):
    """A row whose tokens nobody needs to know."""

    @property
    def token_ids(self) -> list[int]:
        raise AssertionError("the tokens behind a draft are put together for each row that needs them")


def test_the_tokens_before_a_row_are_asked_for_only_where_they_count(logits: torch.Tensor) -> None:
    [token] = sample_requests(logits, [Untold(request(logprobs=1, logit_bias=((6, 9.0),)), (5,))])
    assert token.token_id == 6
    with pytest.raises(AssertionError):
        sample_requests(logits, [Untold(request(bad_words=((5, 6),)), (5,))])


def test_only_allowed_tokens_are_drawn(logits: torch.Tensor) -> None:
    before = logits.clone()
    plain, allowed = request(), request(allowed_token_ids=(6, 40))
    assert sampled(logits, plain, allowed, plain) == [5, 6, 5]
    hot = [request(allowed_token_ids=(1, 40), temperature=2.0, seed=seed) for seed in range(40)]
    assert set(sampled(logits, *hot)) == {1, 40}
    assert torch.equal(logits, before)


def test_a_bad_words_last_token_is_banned_behind_the_others_only(logits: torch.Tensor) -> None:
    words = {"bad_words": ((3, 5), (1, 2, 5))}
    assert sampled(logits, request(3, **words), request(1, 2, **words), request(0, 3, **words)) == [6, 6, 6]
    assert sampled(logits, request(**words), request(2, **words), request(3, 4, **words)) == [5, 5, 5]
    assert sampled(logits, request(bad_words=((5,),))) == [6]
    assert sampled(logits, request(bad_words=((PROMPT[-1], 5),))) == [5], "the prompt does not begin a word"


def test_a_bad_word_stays_where_nothing_else_is_allowed(logits: torch.Tensor) -> None:
    assert sampled(logits, request(allowed_token_ids=(5, 6), bad_words=((5,),))) == [6]
    assert sampled(logits, request(allowed_token_ids=(5,), bad_words=((5,),))) == [5]
    early: dict[str, Any] = {"allowed_token_ids": (5, 6), "stop_token_ids": (6,), "min_tokens": 1}
    assert sampled(logits, request(**early, bad_words=((5,),))) == [5]


def test_log_probabilities_are_those_before_the_exclusions(logits: torch.Tensor) -> None:
    free, bound = sample_requests(
        logits.repeat(2, 1), [request(logprobs=2), request(allowed_token_ids=(6,), logprobs=2)]
    )
    assert free.logprobs is not None and bound.logprobs is not None
    assert (free.token_id, bound.token_id) == (5, 6)
    assert bound.logprobs.top_ids == free.logprobs.top_ids == (5, 6)
    assert bound.logprobs.top_logprobs == free.logprobs.top_logprobs
    assert bound.logprobs.chosen == free.logprobs.top_logprobs[1]


def test_a_row_may_have_the_mask_of_a_grammar_beside_rows_that_exclude_tokens(logits: torch.Tensor) -> None:
    formed = request(grammar=Grammar(GrammarKind.REGEX, "x"), allowed_token_ids=(5,))
    masks = StepMasks([-1, 0, -1], mask_of({7, 40}, 2)[None], {}, frozenset({7}))
    rows = [request(allowed_token_ids=(6,)), formed, request()]
    tokens = sample_requests(logits.repeat(3, 1), rows, masks)
    assert [(token.token_id, token.is_last) for token in tokens] == [(6, False), (7, True), (5, False)]


@pytest.mark.parametrize("token_id", [0, 30, 31, 32, 63])
def test_every_token_can_be_allowed_and_banned(logits: torch.Tensor, token_id: int) -> None:
    assert sampled(logits, request(allowed_token_ids=(token_id,))) == [token_id]
    likeliest = logits.index_fill(1, torch.tensor([token_id]), 20.0)
    assert sampled(likeliest, request(), request(bad_words=((token_id,),)))[0] == token_id
    assert sampled(likeliest, request(bad_words=((token_id,),))) == [5]


def test_chosen_tokens_are_reported_in_place_of_the_likeliest(logits: torch.Tensor) -> None:
    bias = ((40, 3.0),)
    plain, asked = sample_requests(
        logits.repeat(2, 1),
        [request(logprobs=1, logit_bias=bias), request(logprobs=1, logit_bias=bias, logprob_token_ids=(40, 5, 0))],
    )
    expected = torch.log_softmax(logits[0].double() + torch.zeros(VOCAB).double().index_fill(0, torch.tensor(40), 3), 0)
    assert plain.logprobs is not None and asked.logprobs is not None
    assert plain.logprobs.top_ids == (5,) and asked.logprobs.top_ids == (40, 5, 0)
    for token_id, logprob in zip((40, 5, 0), asked.logprobs.top_logprobs, strict=True):
        assert math.isclose(logprob, expected[token_id].item(), rel_tol=1e-6)
    assert math.isclose(asked.logprobs.chosen, plain.logprobs.chosen, rel_tol=1e-6)


def test_all_tokens_can_be_ranked(logits: torch.Tensor) -> None:
    ranked, few = sample_requests(logits.repeat(2, 1), [request(logprobs=VOCAB), request(logprobs=MAX_RANKED)])
    assert ranked.logprobs is not None and few.logprobs is not None
    assert sorted(ranked.logprobs.top_ids) == list(range(VOCAB))
    assert ranked.logprobs.top_ids[:MAX_RANKED] == few.logprobs.top_ids
    assert list(ranked.logprobs.top_logprobs) == sorted(ranked.logprobs.top_logprobs, reverse=True)
    assert math.isclose(sum(math.exp(logprob) for logprob in ranked.logprobs.top_logprobs), 1, rel_tol=1e-5)


def test_a_given_token_can_be_listed_among_all_tokens(logits: torch.Tensor) -> None:
    """Its own log-probability and rank have the bits that they have beside a short list, in a row of its own or not."""
    given = [6, 40, 6, 5]
    num_top = [VOCAB, VOCAB, MAX_RANKED, 0]
    first, second, few, none = score_tokens(logits.repeat(4, 1), given, num_top)
    assert (first.chosen, first.rank) == (few.chosen, few.rank) and first.rank == 2 and none.top_ids == ()
    [alone] = score_tokens(logits, given[1:2], [1])
    assert (second.chosen, second.rank) == (alone.chosen, alone.rank)
    assert first.top_ids == second.top_ids and sorted(first.top_ids) == list(range(VOCAB))
    assert first.top_ids[:MAX_RANKED] == few.top_ids and alone.rank is not None
    assert second.top_ids[alone.rank - 1] == 40
    assert math.isclose(sum(map(math.exp, first.top_logprobs)), 1, rel_tol=1e-5)


def test_a_tokens_noise_is_that_of_its_seed_and_its_position(logits: torch.Tensor) -> None:
    def drawn(seed: int, position: int) -> int:
        return sampled(logits, request(*[3] * position, temperature=3.0, seed=seed))[0]

    tokens = [[drawn(seed, position) for position in range(8)] for seed in range(8)]
    assert tokens == [[drawn(seed, position) for position in range(8)] for seed in range(8)]
    assert len(set(map(tuple, tokens))) == len(set(zip(*tokens, strict=True))) == 8
    together = [request(*[3] * position, temperature=3.0, seed=seed) for seed in range(8) for position in range(8)]
    assert sampled(logits, *together) == [token for row in tokens for token in row]


def test_seeds_of_64_bits_are_taken_whole(logits: torch.Tensor) -> None:
    hot = {"temperature": 50.0}
    seeds = (0, -1, 1 << 32, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
    tokens = [sampled(logits, *(request(*[3] * position, seed=seed, **hot) for position in range(6))) for seed in seeds]
    assert tokens[1] == tokens[6], "the same 64 bits"
    assert tokens[4] == tokens[5], "the same 64 bits"
    assert len(set(map(tuple, tokens))) == 5
