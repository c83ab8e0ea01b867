"""`/generative_scoring` and `/v1/score` on a real cluster: equal to completions' log-probabilities, and exact."""

import json
import math
from typing import Any

import pytest

from tests.integration.conftest import MODEL, WAIT_S, Server, random_prompt

QUERY = "The capital of France is"
ITEMS = [" Paris", " London", " a city"]


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, data = server.request("POST", path, {"model": MODEL, **body}, timeout=WAIT_S)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def labels_of(server: Server, *texts: str) -> list[int]:
    answers = [post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}) for text in texts]
    return [answer["tokens"][0] for answer in answers]


def test_scores_are_the_log_probabilities_of_a_completion(server: Server) -> None:
    labels = labels_of(server, ".", ",", " and")
    scored = post(server, "/v1/score", {"query": QUERY, "items": ITEMS, "label_token_ids": labels})
    for item, scores in zip(ITEMS, scored["scores"], strict=True):
        completion = {
            "prompt": QUERY + item,
            "max_tokens": 1,
            "logprobs": 1,
            "logprob_token_ids": labels,
            "return_tokens_as_token_ids": True,
        }
        [choice] = post(server, "/v1/completions", completion)["choices"]
        top = choice["logprobs"]["top_logprobs"][0]
        assert scores == [math.exp(top[f"token_id:{label}"]) for label in labels]


def test_both_routes_agree(server: Server) -> None:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": labels_of(server, ".", ",")}
    generative = post(server, "/generative_scoring", body)
    relative = post(server, "/v1/score", {**body, "apply_softmax": True})
    assert [each["score"] for each in generative["data"]] == [scores[0] for scores in relative["scores"]]
    assert all(sum(scores) == pytest.approx(1.0) for scores in relative["scores"])
    assert generative["usage"]["completion_tokens"] == len(ITEMS)
    assert relative["usage"]["completion_tokens"] == 0


def test_the_query_is_computed_once_and_changes_no_score(server: Server) -> None:
    query = random_prompt(77, 200)
    items = [[number] * 5 for number in range(300, 320)]
    body = {"query": query, "items": items, "label_token_ids": [500, 600]}
    first = post(server, "/v1/score", body)
    again = post(server, "/v1/score", body)
    alone = [post(server, "/v1/score", {**body, "items": [item]})["scores"][0] for item in items[:3]]
    assert first["scores"] == again["scores"]
    assert first["scores"][:3] == alone
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * len(query) * len(items)


def test_what_is_refused(server: Server) -> None:
    body = {"model": MODEL, "query": QUERY, "items": ITEMS, "label_token_ids": [999_999]}
    status, _, data = server.request("POST", "/v1/score", body)
    assert (status, json.loads(data)["error"]["param"]) == (400, "label_token_ids")
