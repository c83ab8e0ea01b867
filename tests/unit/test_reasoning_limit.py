"""Reasoning ends in time: read from a request, and forced by the mask of one step."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.api.reasoning import with_limit
from raydix.engine.api.requests import parse_chat, parse_completion
from raydix.engine.core.answers.lead import Lead
from raydix.engine.core.answers.reasoning_limit import MAX_BEFORE, ReasoningLimit, tag_pieces
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.reasoning import ReasoningParser
from raydix.engine.core.types import Assignment, Sampling, Stage
from raydix.engine.core.worker.request import Request
from raydix.engine.model.masks import forced_end, mask_of, own_mask, restrict
from tests.unit.builders import chain_of

OPENING, CLOSING = 60, 61
TAGS = (b"<think>", b"</think>")
TAG_IDS = {OPENING: b"<think>", CLOSING: b"</think>"}
OPENED = ReasoningLimit(3, CLOSING, Lead(*TAGS, is_open=True), TAG_IDS)
LIMIT = ReasoningLimit(3, CLOSING, Lead(*TAGS), TAG_IDS)
TOKENS = {"<think>": [OPENING], "</think>": [CLOSING]}


def request(limit: ReasoningLimit | None, output: tuple[int, ...], **changes: Any) -> Request:
    sampling = Sampling(max_tokens=9, reasoning_limit=limit, **changes)
    return Request(
        Assignment("r", 0, Stage.WHOLE, (1, OPENING, *output), 2, sampling, "ingress"), chain_of(), arrival=0
    )


@pytest.mark.parametrize(
    ("limit", "output", "is_forced"),
    [
        (OPENED, (), False),
        (OPENED, (5, 6), False),
        (OPENED, (5, 6, 7), True),
        (OPENED, (5, CLOSING, 7), False),
        (OPENED, (5, 6, 7, CLOSING), False),
        (LIMIT, (OPENING, 6, 7), True),
        (LIMIT, (OPENING, CLOSING, 7), False),
        (LIMIT, (5, OPENING, 7), False),
        (replace(LIMIT, num_tokens=0), (), False),
        (replace(LIMIT, num_tokens=0), (OPENING,), True),
        (replace(OPENED, num_tokens=0), (), True),
        (None, (5, 6, 7), False),
    ],
)
def test_the_end_is_forced_once_and_only_where_it_is_missing(
    limit: ReasoningLimit | None, output: tuple[int, ...], is_forced: bool
) -> None:
    asked = request(limit, output)
    assert forced_end(asked) == (CLOSING if is_forced else None)
    mask = own_mask(asked, 2)
    assert (None if mask is None else mask.tolist()) == (mask_of([CLOSING], 2).tolist() if is_forced else None)


WORDS = [b"", b"a", b" ", b"\n\n", b"<", b"</", b"think", b">", b">\n", b"a</", b"hi", b"x>y", b" <think", b"b<c"]
SPELLING = {word.decode(): number for number, word in enumerate(WORDS, start=100)}
SPELLED = {**tag_pieces([b"zz"] * 100 + WORDS, TAGS), **TAG_IDS}


def ids_of(*words: str) -> tuple[int, ...]:
    return tuple({**SPELLING, "<think>": OPENING, "</think>": CLOSING}[word] for word in words)


def test_pieces_of_tags() -> None:
    known = {word.decode() for token, word in SPELLED.items() if token >= 100}
    assert known == {word.decode() for word in WORDS} - {"a", "x>y", "b<c"}, "what has no part of a tag is left out"


@pytest.mark.parametrize(
    ("limit", "words", "is_forced"),
    [
        (OPENED, ("a", "a", "a"), True),
        (OPENED, ("</", "think", ">"), False),
        (replace(OPENED, num_tokens=4), ("a</", "think", ">\n", "a"), False),
        (replace(OPENED, num_tokens=4), ("a</", "think", "a", ">"), True),
        (OPENED, ("a", "</", "think"), True),
        (LIMIT, ("<think>", "a", "a"), True),
        (LIMIT, ("\n\n", "<think>", "a"), True),
        (LIMIT, (" ", "\n\n", "", "<think>"), True),
        (LIMIT, (" ", "\n\n", "", "<think>", "a"), False),
        (LIMIT, (" ", "\n\n", "a", "<think>"), False),
        (LIMIT, (" <think", ">", "a"), True),
        (LIMIT, ("<", "think", ">\n"), True),
        (LIMIT, ("\n\n", "<think>", "</think>"), False),
        (replace(LIMIT, num_tokens=0), ("\n\n",), False),
        (replace(LIMIT, num_tokens=0), ("\n\n", "<think>"), True),
        (replace(LIMIT, num_tokens=0), ("\n\n", "<think>", "a"), False),
        (LIMIT, (" ",) * (MAX_BEFORE - 1) + ("<think>",), True),
        (LIMIT, (" ",) * MAX_BEFORE + ("<think>",), False),
    ],
)
def test_tags_in_pieces_and_white_space_before(limit: ReasoningLimit, words: tuple[str, ...], is_forced: bool) -> None:
    asked = request(replace(limit, pieces=SPELLED), ids_of(*words))
    assert forced_end(asked) == (CLOSING if is_forced else None)


@given(st.lists(st.sampled_from([*SPELLING, "<think>", "</think>"]), max_size=10), st.integers(0, 4), st.booleans())
def test_the_end_is_forced_where_readers_see_open_reasoning(words: list[str], most: int, is_open: bool) -> None:
    limit = replace(OPENED if is_open else LIMIT, num_tokens=most, pieces=SPELLED)
    forced = [
        count for count in range(len(words) + 1) if forced_end(request(limit, ids_of(*words[:count]))) is not None
    ]
    inside = []
    for count in range(len(words) + 1):
        reader = ReasoningParser(is_inside=is_open)
        reader.push("".join(words[:count]))
        inside.append(reader.is_inside)
    assert forced == [count for count, is_inside in enumerate(inside) if is_inside and count >= most][:1]


def test_the_end_comes_before_other_wishes_but_for_allowed_ids() -> None:
    output = (5, 6, 7)
    for changes in ({"bad_words": ((CLOSING,),)}, {"min_tokens": 5, "stop_token_ids": (CLOSING,)}):
        mask = own_mask(request(OPENED, output, **changes), 2)
        assert mask is not None and mask.tolist() == mask_of([CLOSING], 2).tolist()
    without = own_mask(request(OPENED, output, allowed_token_ids=(5, 6)), 2)
    assert without is not None and without.tolist() == mask_of([5, 6], 2).tolist()
    mask = np.full(2, -1, np.int32)
    restrict(mask, request(OPENED, output), ())
    assert mask.tolist() == mask_of([CLOSING], 2).tolist(), "under a grammar, too"


def limit_of(prompt: str, tokens: Mapping[str, list[int]] = TOKENS, **fields: Any) -> ReasoningLimit | None:
    body = json.dumps({"messages": [{"role": "user", "content": "?"}], **fields})
    return with_limit(parse_chat(body.encode()), prompt, tokens.__getitem__, {}).sampling.reasoning_limit


def test_a_limit_of_a_request() -> None:
    assert limit_of("assistant\n", thinking_token_budget=3) == LIMIT
    assert limit_of("assistant\n<think>\n", thinking_token_budget=3) == OPENED
    assert limit_of("assistant\n") is None and limit_of("assistant\n", thinking_token_budget=-1) is None


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    for tokens in (TOKENS | {"</think>": [1, 2]}, TOKENS | {"<think>": [1, 2]}):
        with pytest.raises(RequestError, match="has no tokens for") as caught:
            limit_of("assistant\n", tokens, thinking_token_budget=3)
        assert caught.value.param == "thinking_token_budget"
    opened = limit_of("<think>", TOKENS | {"<think>": [1, 2]}, thinking_token_budget=3)
    assert opened == replace(OPENED, pieces={CLOSING: b"</think>"})
    with pytest.raises(RequestError) as caught:
        parse_completion(b'{"prompt": "a", "thinking_token_budget": 3}')
    assert caught.value.param == "thinking_token_budget"
