"""Reasoning ends in time: read from a request, and forced by the mask of one step."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from engine.api.reasoning import with_limit
from engine.api.requests import parse_chat, parse_completion
from engine.core.errors import RequestError
from engine.core.types import Assignment, ReasoningLimit, SamplingParams, Stage
from engine.core.worker.request import Request
from engine.model.masks import forced_end, mask_of, own_mask, restrict
from tests.unit.builders import chain_of

OPENING, CLOSING = 60, 61
OPENED = ReasoningLimit(3, CLOSING)
LIMIT = ReasoningLimit(3, CLOSING, OPENING)
TOKENS = {"<think>": [OPENING], "</think>": [CLOSING]}


def request(limit: ReasoningLimit | None, output: tuple[int, ...], **changes: Any) -> Request:
    sampling = SamplingParams(max_tokens=9, reasoning_limit=limit, **changes)
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
        (LIMIT._replace(num_tokens=0), (), False),
        (LIMIT._replace(num_tokens=0), (OPENING,), True),
        (OPENED._replace(num_tokens=0), (), True),
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
    return with_limit(parse_chat(body.encode()), prompt, tokens.__getitem__).sampling.reasoning_limit


def test_a_limit_of_a_request() -> None:
    assert limit_of("assistant\n", thinking_token_budget=3) == LIMIT
    assert limit_of("assistant\n<think>\n", thinking_token_budget=3) == OPENED
    assert limit_of("assistant\n") is None and limit_of("assistant\n", thinking_token_budget=-1) is None


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    for tokens in (TOKENS | {"</think>": [1, 2]}, TOKENS | {"<think>": [1, 2]}):
        with pytest.raises(RequestError, match="has no tokens for") as caught:
            limit_of("assistant\n", tokens, thinking_token_budget=3)
        assert caught.value.param == "thinking_token_budget"
    assert limit_of("<think>", TOKENS | {"<think>": [1, 2]}, thinking_token_budget=3) == OPENED
    with pytest.raises(RequestError) as caught:
        parse_completion(b'{"prompt": "a", "thinking_token_budget": 3}')
    assert caught.value.param == "thinking_token_budget"
