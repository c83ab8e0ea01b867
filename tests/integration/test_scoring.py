"""Log-probabilities of prompts over HTTP and the handle: what harnesses that score texts ask for."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from openai.types import CompletionChoice
from ray import serve

from cli.cluster import APP_NAME
from engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from engine.core.types import FinishReason
from tests.integration.answers import (
    CompletionFields,
    prompt_logprobs,
    prompt_token_ids,
    scores_of,
    token_ids,
    usage_of,
)
from tests.integration.conftest import MODEL, Server, eventually, random_prompt

TEXT = "The river was full of boats, and the 🌊 waves were high."


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def cached(answer: dict[str, Any]) -> int:
    num_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_tokens


def positions(choice: CompletionChoice) -> list[tuple[str, float | None, int]]:
    """Token, log-probability and offset in the text at each position of a choice."""
    scores = scores_of(choice)
    return list(zip(scores.tokens, scores.token_logprobs, scores.text_offset, strict=True))


def score(server: Server, prompt: list[int] | list[list[int]], **fields: object) -> dict[str, Any]:
    """The answer to a completion that only scores its prompt."""
    return server.complete(prompt, **{"max_tokens": 0, "echo": True, "logprobs": 1, **fields})


def test_a_text_is_scored_without_generating(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=0, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text == TEXT
    assert choice.finish_reason == "length"
    assert usage_of(answer).completion_tokens == 0
    logprobs = scores_of(choice)
    assert len(logprobs.tokens) == usage_of(answer).prompt_tokens
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(value is not None and value < 0 for value in logprobs.token_logprobs[1:])
    for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
        assert top is not None
        assert len(top) in (2, 3) and token in top, "the two likeliest, and the token itself where it is none of them"
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)


def test_the_prompt_comes_before_the_answer(client: openai.OpenAI) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
    prompt_alone: CompletionFields = {**fields, "max_tokens": 0}
    plain = client.completions.create(**fields, logprobs=1).choices[0]
    scored = client.completions.create(**prompt_alone, logprobs=1, echo=True).choices[0]
    both = client.completions.create(**fields, logprobs=1, echo=True).choices[0]
    assert both.text == TEXT + plain.text
    of_prompt, of_answer, of_both = scores_of(scored), scores_of(plain), scores_of(both)
    assert of_both.token_logprobs == [*of_prompt.token_logprobs, *of_answer.token_logprobs]
    assert of_both.top_logprobs == [*of_prompt.top_logprobs, *of_answer.top_logprobs]
    assert of_both.text_offset[len(of_prompt.tokens)] == len(TEXT)
    assert client.completions.create(**fields, logprobs=None, echo=True).choices[0].text == both.text


def test_a_stream_begins_with_the_prompt(client: openai.OpenAI) -> None:
    prompts = [TEXT, "One, two,"]
    fields: CompletionFields = {"model": MODEL, "prompt": prompts, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=1, echo=True)
    texts = {0: "", 1: ""}
    logprobs: dict[int, list[tuple[str, float | None, int]]] = {0: [], 1: []}
    with client.completions.create(**fields, logprobs=1, echo=True, stream=True) as chunks:
        for chunk in chunks:
            [choice] = chunk.choices
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += positions(choice)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert logprobs[choice.index] == positions(choice)


def test_a_stream_of_the_prompt_alone(server: Server) -> None:
    chunks = list(server.stream(TEXT, max_tokens=0, echo=True, logprobs=0))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_of_completions_and_chats(client: openai.OpenAI) -> None:
    """vLLM's field, in vLLM's shape: of each choice of a completion, of a chat as a whole."""
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    completion = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=1, temperature=0, extra_body=extra)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": TEXT}], max_tokens=1, extra_body=extra
    )
    for prompt, scores in (
        (prompt_token_ids(completion.choices[0]), prompt_logprobs(completion.choices[0])),
        (prompt_token_ids(chat), prompt_logprobs(chat)),
    ):
        assert scores[0] is None
        assert len(scores) == len(prompt)
        for token_id, at in zip(prompt[1:], scores[1:], strict=True):
            assert at is not None
            assert next(iter(at)) == str(token_id)
            assert {entry["rank"] for entry in at.values()} >= {1, 2}
            assert len(at) == (2 if at[str(token_id)]["rank"] <= 2 else 3)
            assert all(entry["logprob"] <= 0 and isinstance(entry["decoded_token"], str) for entry in at.values())
    assert len(token_ids(completion.choices[0])) == 1


def test_the_cache_changes_nothing(server: Server) -> None:
    """Cold, with scores kept, with KV cached alone, split between two workers: the same figures."""
    prompt = random_prompt(880, 500)
    cold = score(server, prompt)
    warm = score(server, prompt)
    assert (cached(cold), cached(warm)) == (0, 496)
    server.complete(prompt, max_tokens=2, cache_salt="kv alone")
    shared = score(server, prompt, cache_salt="kv alone")
    assert cached(shared) == 496, "their KV was found, though they had to be computed for their scores"
    split = server.complete(prompt, max_tokens=3, echo=True, logprobs=1, cache_salt="split")
    assert cached(split) == 0
    expected = cold["choices"][0]["logprobs"]
    for answer in (warm, shared):
        assert answer["choices"][0]["logprobs"] == expected
    logprobs = split["choices"][0]["logprobs"]
    assert {name: values[:500] for name, values in logprobs.items()} == expected
    assert len(logprobs["tokens"]) == 503


def test_continuations_of_one_prefix(server: Server) -> None:
    """How a harness asks: many endings of the same examples, at once."""
    shared = random_prompt(881, 400)
    prompts = [shared + random_prompt(200 + index, 3 + index) for index in range(8)]
    together = score(server, prompts)
    assert [choice["index"] for choice in together["choices"]] == list(range(8))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: score(server, prompt, cache_salt=str(len(prompt))), prompts))
    for choice, answer in zip(together["choices"], answers, strict=True):
        assert choice["logprobs"] == answer["choices"][0]["logprobs"]


def test_the_handle_scores_and_streams_scores(server: Server) -> None:
    handle: Any = serve.get_app_handle(APP_NAME)
    request = GenerateRequest(prompt=random_prompt(882, 100), max_tokens=0, prompt_logprobs=1)
    answer: GenerateResponse = handle.generate.remote(request).result(timeout_s=60)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), FinishReason.LENGTH)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == 100
    over_http = score(server, random_prompt(882, 100))["choices"][0]["logprobs"]["token_logprobs"]
    assert [None if at is None else at.chosen for at in answer.prompt_logprobs] == over_http
    streamed = GenerateRequest(prompt=random_prompt(882, 100), max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    chunks: list[GenerateChunk] = list(handle.options(stream=True).stream.remote(streamed))
    assert chunks[0].prompt_logprobs == answer.prompt_logprobs
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])


def peak_bytes(server: Server) -> int:
    """The most memory that the prefill worker's process has held."""

    def read(_: object) -> int:
        with Path("/proc/self/status").open() as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    worker = server.actor(server.workers()["prefill"]["worker_id"])
    peak: int = ray.get(worker.__ray_call__.remote(read), timeout=20)
    return peak


def test_a_prompt_that_fills_the_context_takes_little_memory(server: Server) -> None:
    """All logits of 4,096 positions would be 400 MB in bfloat16."""
    score(server, random_prompt(883, 600))
    before = peak_bytes(server)
    answer = score(server, random_prompt(884, 4096))
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4096
    assert peak_bytes(server) - before < 100e6


def test_scoring_survives_the_death_of_its_worker(server: Server) -> None:
    prompt = random_prompt(885, 3000)
    expected = score(server, prompt, cache_salt="reference")["choices"][0]["logprobs"]
    epoch = server.workers()["prefill"]["epoch"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(score, server, prompt, cache_salt="killed")
        eventually(lambda: server.workers()["prefill"]["num_running"] > 0, "prefill has begun")
        server.kill(server.workers()["prefill"])
        assert answer.result()["choices"][0]["logprobs"] == expected
    eventually(lambda: server.workers()["prefill"]["epoch"] > epoch, "the prefill worker is back")


def test_a_context_too_long_to_score_is_refused(server: Server) -> None:
    body = {"model": MODEL, "prompt": random_prompt(886, 4097), "max_tokens": 0, "echo": True}
    status, _, data = server.request("POST", "/v1/completions", body)
    assert status == 400
    assert json.loads(data)["error"]["code"] == "context_length_exceeded"
