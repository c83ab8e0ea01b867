"""`/generative_scoring` and `/v1/score` from a body to a response."""

from collections.abc import Awaitable, Callable
from math import exp
from typing import Any

import orjson
import pytest

from raydix.engine.api.responses import ResponseHead, TokenUsage
from raydix.engine.api.scoring import parse_generative_scoring, parse_score, scores, scores_body
from raydix.engine.api.spec import LabelScoring
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import TokenLogprobs
from raydix.engine.serving.preparation import INPUTS_AT_ONCE
from tests.unit.ingress import MODEL, Replica, Reply, Served, call
from tests.unit.served_app import app

HEAD = ResponseHead("completion", "generative-scoring-r", 7, MODEL)
AT = TokenLogprobs(-0.1, (65, 66, 67), (-1.0, -2.0, -3.0))
FIELDS: dict[str, Any] = {"query": "one ", "items": ["two", "six"], "label_token_ids": [65, 66]}


def post(path: str, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    body = orjson.dumps({"model": MODEL, **FIELDS, **fields})
    return lambda: call(app, "POST", path, body)


def test_probabilities_are_among_all_tokens_or_among_the_labels() -> None:
    assert scores(LabelScoring("score", (66, 65), is_relative=False), AT) == [exp(-2.0), exp(-1.0)]
    relative = scores(LabelScoring("score", (66, 65), is_relative=True), AT)
    assert sum(relative) == pytest.approx(1.0)
    assert relative[1] / relative[0] == pytest.approx(exp(1.0))


def test_a_label_that_is_named_twice_counts_once() -> None:
    assert scores(LabelScoring("score", (66, 65, 66), is_relative=True), AT)[:2] == scores(
        LabelScoring("score", (66, 65), is_relative=True), AT
    )


def test_impossible_labels_still_have_probabilities() -> None:
    far = TokenLogprobs(0.0, (65, 66), (-2000.0, -2000.0))
    assert scores(LabelScoring("score", (65, 66), is_relative=True), far) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({}, ("one two", "one six")),
        ({"item_first": True}, ("twoone ", "sixone ")),
        ({"items": "two"}, ("one two",)),
        ({"query": [1], "items": [[2, 3], [4]]}, ((1, 2, 3), (1, 4))),
        ({"query": [1], "items": [[2, 3], [4]], "item_first": True}, ((2, 3, 1), (4, 1))),
    ],
    ids=str,
)
def test_each_item_makes_a_prompt(fields: dict[str, Any], prompts: tuple[Any, ...]) -> None:
    spec = parse_score(orjson.dumps({**FIELDS, **fields}))
    assert spec.prompts == prompts
    assert (spec.max_tokens, spec.sampling.logprob_token_ids) == (1, (65, 66))


def test_the_routes_differ_in_what_they_do_by_default() -> None:
    body = orjson.dumps(FIELDS)
    generative, plain = parse_generative_scoring(body).scoring, parse_score(body).scoring
    assert generative is not None and plain is not None
    assert (generative.is_relative, plain.is_relative) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"items": []}, "items"),
        ({"items": [""]}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": [1]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [1] * 129}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids[0]"),
        ({"temperature": 1}, "temperature"),
        ({"rid": "a"}, "rid"),
        ({"query": "1" * 4000, "items": ["a"] * 1100}, "items"),
        ({"query": [1] * 4000, "items": [[1]] * 1100}, "items"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_generative_scoring(orjson.dumps({**FIELDS, **fields}))
    assert caught.value.param == param


def test_the_forms_of_the_responses() -> None:
    found = [[0.25, 0.75], [0.5, 0.5]]
    generative = orjson.loads(scores_body(HEAD, "generative_scoring", found, TokenUsage(9, 2, 4)))
    assert [each["score"] for each in generative["data"]] == [0.25, 0.5]
    assert (generative["object"], generative["usage"]["completion_tokens"]) == ("list", 2)
    plain = orjson.loads(scores_body(HEAD, "score", found, TokenUsage(9, 2, 4)))
    assert plain["scores"] == found
    assert (plain["object"], plain["usage"]["completion_tokens"], plain["usage"]["total_tokens"]) == ("scoring", 0, 9)


@pytest.mark.parametrize("path", ["/generative_scoring", "/v1/score"])
def test_a_score_for_each_item(served: Served, path: str) -> None:
    replica = Replica()
    reply = served(replica, post(path, request_id="r"))
    assert reply.status == 200, reply.json
    assert reply.json["id"] == "generative-scoring-r"
    assert len(reply.json["data" if path == "/generative_scoring" else "scores"]) == 2
    assert [generation.prompt for generation in replica.dispatcher.begun] == [(*b"one two",), (*b"one six",)]
    assert replica.room.num_held == 0


def test_a_label_outside_the_vocabulary_is_named(served: Served) -> None:
    reply = served(Replica(), post("/v1/score", label_token_ids=[65, 9999]))
    assert (reply.status, reply.json["error"]["param"]) == (400, "label_token_ids")
    assert "9999" in reply.json["error"]["message"]


def test_items_are_limited_in_number_at_a_time_and_all_are_answered(served: Served) -> None:
    replica = Replica(max_requests=INPUTS_AT_ONCE)
    reply = served(replica, post("/v1/score", items=["x"] * 100))
    assert len(reply.json["scores"]) == 100
    assert replica.room.num_held == 0


def test_a_prompt_that_fills_the_context_is_refused(served: Served) -> None:
    reply = served(Replica(max_model_len=7), post("/v1/score"))
    assert (reply.status, reply.json["error"]["param"]) == (400, "items")
    assert served(Replica(max_model_len=8), post("/v1/score")).status == 200
