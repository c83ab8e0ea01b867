"""`/v1/embeddings` on a real cluster: OpenAI's client, equal bits, limits, a client that leaves, a worker that dies."""

import base64
import http.client
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import unpack
from typing import Any

import openai
import pytest
from ray import serve

import raydix
from raydix.cli.cluster import APP_NAME
from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt
from tests.integration.test_faults import PREFILL_PACE_S

HIDDEN = 576
TEXTS = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "The invoice is due on Friday.", "x"]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def embed(server: Server, given: object, **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "input": given, **fields}
    status, _, data = server.request("POST", "/v1/embeddings", body, timeout=WAIT_S)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [each["index"] for each in answer["data"]] == [*range(len(answer["data"]))]
    return [each["embedding"] for each in answer["data"]]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_openais_client(server: Server, client: openai.OpenAI) -> None:
    """The client asks for base64 by itself and decodes it."""
    response = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in response.data] == [0, 1, 2, 3]
    assert all(len(each.embedding) == HIDDEN for each in response.data)
    assert [each.embedding for each in response.data] == vectors(embed(server, TEXTS))
    assert response.usage.prompt_tokens == response.usage.total_tokens > len(TEXTS)


def test_vectors_have_length_one_and_tell_topics_apart(one_process: Server) -> None:
    cat, kitten, invoice, _ = vectors(embed(one_process, TEXTS))
    assert all(math.hypot(*each) == pytest.approx(1, abs=1e-5) for each in (cat, kitten, invoice))
    assert cosine(cat, kitten) > cosine(cat, invoice)


def test_base64_and_the_state_as_it_is(server: Server) -> None:
    [floats] = vectors(embed(server, "hello", use_activation=False))
    encoded = embed(server, "hello", use_activation=False, encoding_format="base64")["data"][0]["embedding"]
    assert list(unpack(f"<{HIDDEN}f", base64.b64decode(encoded))) == floats
    [scaled] = vectors(embed(server, "hello"))
    length = math.hypot(*floats)
    assert scaled == pytest.approx([value / length for value in floats], rel=1e-5)


def test_the_same_bits_alone_together_cached_and_in_chunks(server: Server) -> None:
    """Of several lengths, the longest in several chunks; again, when KV and sums are there; behind an answer's KV."""
    prompts = [random_prompt(600 + length, length) for length in (1, 16, 17, 250, 900)]
    alone = [vectors(embed(server, prompt, cache_salt=f"alone {len(prompt)}"))[0] for prompt in prompts]
    assert vectors(embed(server, prompts, cache_salt="together")) == alone
    again = embed(server, prompts, cache_salt="together")
    assert vectors(again) == alone
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    server.complete(prompts[-1], max_tokens=4, cache_salt="answered")
    assert vectors(embed(server, prompts[-1], cache_salt="answered")) == alone[-1:]
    others = [random_prompt(700 + index, 40) for index in range(12)]
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda each: vectors(embed(server, each)), (others[:6], prompts, others[6:]))
        assert [*answers][1] == alone


def test_many_inputs(server: Server) -> None:
    """More than the queue holds."""
    given = [[token] for token in range(100, 700)]
    answer = embed(server, given)
    assert len(vectors(answer)) == 600
    assert answer["usage"]["prompt_tokens"] == 600
    assert vectors(embed(server, given[450:452])) == vectors(answer)[450:452]


def test_truncation(server: Server) -> None:
    prompt = random_prompt(650, 5000)
    assert vectors(embed(server, prompt, truncate_prompt_tokens=20)) == vectors(embed(server, prompt[-20:]))
    right = embed(server, prompt, truncate_prompt_tokens=20, truncation_side="right")
    assert vectors(right) == vectors(embed(server, prompt[:20]))
    assert embed(server, prompt, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 4096


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [99_999_999]}, "input"),
        ({"input": [100] * 5000}, "input"),
        ({"dimensions": 256}, "dimensions"),
        ({"encoding_format": "binary"}, "encoding_format"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    status, _, data = server.request("POST", "/v1/embeddings", {"model": MODEL, "input": "a", **fields})
    assert (status, json.loads(data)["error"]["param"]) == (400, param)


def test_ranking_is_refused(server: Server) -> None:
    status, _, data = server.request("POST", "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert status == 404
    assert "/v1/embeddings" in json.loads(data)["error"]["message"]


def test_the_python_handle(server: Server) -> None:
    response = raydix.Client(serve.get_app_handle(APP_NAME)).embed(raydix.EmbedRequest(input=tuple(TEXTS)))
    assert [*map(list, response.embeddings)] == vectors(embed(server, TEXTS))


def test_a_client_that_leaves_ends_all_inputs(server: Server, tmp_path: Path) -> None:
    body = json.dumps({"input": [random_prompt(660 + index, 3000) for index in range(20)], "cache_salt": "gone"})
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    with paced(server, tmp_path / "gate", PREFILL_PACE_S):
        connection.request("POST", "/v1/embeddings", body, server.headers)
        eventually(lambda: server.workers()["prefill"]["num_running"] > 0, "the embedding has begun")
        connection.close()
        eventually(lambda: server.workers()["prefill"]["num_running"] == 0, "its inputs are given up")
        assert server.workers()["prefill"]["num_waiting"] == 0


def test_a_vector_survives_the_death_of_its_worker(server: Server, tmp_path: Path) -> None:
    prompt = random_prompt(640, 4000)
    expected = vectors(embed(server, prompt, cache_salt="reference"))
    worker = server.workers()["prefill"]
    with ThreadPoolExecutor(1) as pool:
        with paced(server, tmp_path / "gate", PREFILL_PACE_S):
            answer = pool.submit(embed, server, prompt, cache_salt="killed")
            eventually(lambda: server.workers()["prefill"]["num_running"] > 0, "the embedding has begun")
            server.kill(worker)
        assert vectors(answer.result()) == expected
    eventually(lambda: server.workers()["prefill"]["epoch"] != worker["epoch"], "the prefill worker is back")
