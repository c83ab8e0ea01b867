"""The Python handle, from this program, from a Ray task and from another Ray program."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from pydantic import ValidationError
from ray import serve

from raydix.cli.cluster import APP_NAME
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from raydix.engine.core.errors import ContextLengthError, ModelNotFoundError, RequestError
from raydix.engine.core.types import FinishReason
from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt
from tests.integration.test_logs import records

PROGRAM = """
import asyncio
import sys
import raydix

server = raydix.connect(sys.argv[1])
request = raydix.GenerateRequest(prompt=[int(token) for token in sys.argv[2].split()], max_tokens=6, temperature=0,
                                 ignore_eos=True)

async def generate():
    answer = await server.generate_async(request)
    return answer.token_ids, [token async for chunk in server.stream_async(request) for token in chunk.token_ids]

print(*server.generate(request).token_ids)
print(*(token for chunk in server.stream(request) for token in chunk.token_ids))
for token_ids in asyncio.run(generate()):
    print(*token_ids)
try:
    server.generate(raydix.GenerateRequest(prompt="hi", model="other"))
except raydix.ModelNotFoundError as error:
    print("refused")
"""


@pytest.fixture
def handle(server: Server) -> Any:
    return serve.get_app_handle(APP_NAME)


def test_generate_answers_as_http_does(server: Server, handle: Any) -> None:
    prompt = random_prompt(60, 30)
    over_http = server.complete(prompt, max_tokens=8)
    request = GenerateRequest(prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    answer = handle.generate.remote(request).result(timeout_s=WAIT_S)
    assert isinstance(answer, GenerateResponse)
    assert answer.text == over_http["choices"][0]["text"]
    assert list(answer.token_ids) == over_http["choices"][0]["token_ids"]
    assert answer.prompt_token_ids == tuple(prompt)
    assert answer.finish_reason is FinishReason.LENGTH
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30, 8)
    assert answer.logprobs is None


def test_a_tenant_that_is_not_configured_is_refused(handle: Any) -> None:
    request = GenerateRequest(prompt="hi", max_tokens=1, tenant="acme")
    with pytest.raises(RequestError, match="no tenant 'acme'"):
        handle.generate.remote(request).result(timeout_s=WAIT_S)


def test_stream_gives_the_same_piece_by_piece(handle: Any) -> None:
    request = GenerateRequest(
        prompt="Rivers and emoji 🌊🏞️", max_tokens=24, seed=7, ignore_eos=True, logprobs=1, return_token_ids=True
    )
    whole = handle.generate.remote(request).result(timeout_s=WAIT_S)
    chunks = list(handle.options(stream=True).stream.remote(request))
    assert all(isinstance(chunk, GenerateChunk) for chunk in chunks)
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert tuple(at for chunk in chunks for at in chunk.logprobs or ()) == whole.logprobs
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is whole.finish_reason
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert all(chunk.prompt_token_ids is None for chunk in chunks[1:])


def test_a_chat_stops_at_a_string(server: Server, handle: Any) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Count: 1, 2, 3"}], "temperature": 0}
    free = handle.generate.remote(GenerateRequest(**fields, max_tokens=20)).result(timeout_s=WAIT_S)
    stop = free.text[4:7]
    stopped = handle.generate.remote(GenerateRequest(**fields, max_tokens=20, stop=stop)).result(timeout_s=WAIT_S)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_mapping_does_as_well(handle: Any) -> None:
    request = {"prompt": "hi", "max_tokens": 2, "model": MODEL, "ignore_eos": True}
    assert len(handle.generate.remote(request).result(timeout_s=WAIT_S).token_ids) == 2


def test_one_name_for_two_requests_at_once_mixes_nothing(handle: Any) -> None:
    requests = [
        GenerateRequest(
            prompt=random_prompt(seed, 20), max_tokens=20, temperature=0, ignore_eos=True, request_id="same"
        )
        for seed in (61, 62)
    ]
    alone = [handle.generate.remote(request).result(timeout_s=WAIT_S).token_ids for request in requests]
    together = [handle.generate.remote(request) for request in requests]
    answers = [response.result(timeout_s=WAIT_S) for response in together]
    assert [answer.token_ids for answer in answers] == alone
    assert {answer.request_id for answer in answers} == {"same"}


def test_streams_run_side_by_side(handle: Any) -> None:
    requests = [
        GenerateRequest(prompt=random_prompt(seed, 40), max_tokens=16, temperature=0, ignore_eos=True)
        for seed in range(70, 78)
    ]
    alone = [handle.generate.remote(request).result(timeout_s=WAIT_S).text for request in requests]
    streams = [handle.options(stream=True).stream.remote(request) for request in requests]
    assert ["".join(chunk.text for chunk in stream) for stream in streams] == alone


def test_a_caller_that_cancels_frees_everything(server: Server, handle: Any, tmp_path: Path) -> None:
    """The answers do not end by themselves meanwhile, nor because nobody asks for their tokens any more."""
    since = time.time()
    request = GenerateRequest(prompt="hi", max_tokens=3000, ignore_eos=True)
    with paced(server, tmp_path / "gate"):
        stream = handle.options(stream=True).stream.remote(request)
        next(iter(stream))
        stream.cancel()
        handle.generate.remote(request).cancel()
        eventually(server.is_idle, "everything is freed")
    assert not {"ingress_lost", "orphan_aborted"} & {record.get("event") for record in records(since)}


@pytest.mark.parametrize(
    ("fields", "kind", "param", "words"),
    [
        ({"prompt": random_prompt(63, 5000)}, ContextLengthError, "prompt", "your prompt has 5000 tokens"),
        ({"prompt": "hi", "max_tokens": 4096}, ContextLengthError, "max_tokens", "4096"),
        ({"prompt": "hi", "model": "gpt-9"}, ModelNotFoundError, "model", "'gpt-9'"),
        ({"prompt": "hi", "stop_token_ids": [999_999]}, RequestError, "stop_token_ids", "999999"),
        ({}, RequestError, "prompt", "exactly one of"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_what_cannot_be_served_raises_a_request_error(
    handle: Any, method: str, fields: dict[str, Any], kind: type[RequestError], param: str, words: str
) -> None:
    with pytest.raises(kind) as caught:
        ask(handle, method, GenerateRequest(**fields))
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.status == kind.status
    assert caught.value.code == kind.code


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_mapping_with_a_bad_field_raises_a_request_error(handle: Any, method: str) -> None:
    with pytest.raises(RequestError, match="'temperature' must be at most 2, got 3") as caught:
        ask(handle, method, {"prompt": "hi", "temperature": 3})
    assert caught.value.param == "temperature"


def test_a_bad_field_is_found_where_the_request_is_made() -> None:
    with pytest.raises(ValidationError, match="top_p"):
        GenerateRequest(prompt="hi", top_p=2)


def ask(handle: Any, method: str, request: Any) -> None:
    if method == "generate":
        handle.generate.remote(request).result(timeout_s=WAIT_S)
    else:
        list(handle.options(stream=True).stream.remote(request))


def test_a_ray_task_uses_the_handle(server: Server) -> None:
    prompt = random_prompt(64, 20)
    expected = server.complete(prompt, max_tokens=6)["choices"][0]["token_ids"]

    @ray.remote(num_cpus=0)
    def task() -> tuple[list[int], list[int], str]:
        handle: Any = serve.get_app_handle("raydix")
        request = GenerateRequest(prompt=prompt, max_tokens=6, temperature=0, ignore_eos=True)
        whole = handle.generate.remote(request).result(timeout_s=WAIT_S)
        chunks = list(handle.options(stream=True).stream.remote(request))
        try:
            handle.generate.remote({"prompt": ""}).result(timeout_s=WAIT_S)
        except RequestError as error:
            refusal = error.message
        return list(whole.token_ids), [token for chunk in chunks for token in chunk.token_ids], refusal

    whole, streamed, refusal = ray.get(task.remote(), timeout=WAIT_S)
    assert whole == streamed == expected
    assert refusal == "'prompt' must not be empty."


def test_another_ray_program_uses_the_handle(server: Server) -> None:
    prompt = random_prompt(65, 20)
    expected = [str(token) for token in server.complete(prompt, max_tokens=6)["choices"][0]["token_ids"]]
    address = ray.get_runtime_context().gcs_address
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, address, " ".join(map(str, prompt))],
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert program.returncode == 0, program.stderr
    *answers, last = program.stdout.splitlines()
    assert [answer.split() for answer in answers] == [expected] * 4
    assert last == "refused"
    assert not re.search(r"Started <ray\.serve|Connect(ing|ed) to", program.stderr), program.stderr
