"""What cannot be served gets an error object of OpenAI's that names the field, and leaves nothing held."""

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_MODEL_LEN = 4096
MAX_BODY_BYTES = 1 << 20
MAX_QUEUED = 40

USER: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 2, **fields}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages or [USER]), "max_tokens": 2, **fields}


def error_of(
    answer: tuple[int, dict[str, str], bytes], status: int, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """The error of an answer, of OpenAI's shape."""
    assert answer[0] == status, answer
    assert answer[1]["content-type"] == "application/json"
    body = json.loads(answer[2])
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["code"]
    assert error["message"]
    return error


MALFORMED: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, b'{"model": "m", "prompt"', None, "not valid JSON"),
    (CHAT, b"", None, "not valid JSON"),
    (CHAT, b"\xff\xfe\x00", None, "not valid JSON"),
    (CHAT, [USER], None, "must be a JSON object"),
    (COMPLETIONS, {"model": MODEL}, "prompt", "Missing required parameter: 'prompt'"),
    (CHAT, {"model": MODEL}, "messages", "Missing required parameter: 'messages'"),
]

WRONG_TYPES: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, completion(model=3), "model", "must be a string"),
    (COMPLETIONS, completion(prompt={"text": "hi"}), "prompt", "must be a string"),
    (COMPLETIONS, completion(prompt=[1, "a"]), "prompt", "integers"),
    (COMPLETIONS, completion(prompt=[1.5]), "prompt", "must be a string"),
    (COMPLETIONS, completion(max_tokens="many"), "max_tokens", "must be an integer"),
    (COMPLETIONS, completion(temperature="hot"), "temperature", "must be a number"),
    (COMPLETIONS, completion(stream="yes"), "stream", "must be true or false"),
    (COMPLETIONS, completion(stop=5), "stop", "must be a string"),
    (COMPLETIONS, completion(logit_bias={"rivers": 1, "lakes": 2}), "logit_bias", '"rivers" and "lakes"'),
    (CHAT, chat("hi"), "messages[0]", "must be an object"),
    (CHAT, chat({"role": "user", "content": 7}), "messages[0].content", "must be a string"),
    (CHAT, chat({"content": "hi"}), "messages[0].role", "Missing required parameter"),
    (CHAT, chat(logprobs=2), "logprobs", "must be true or false"),
]

OUT_OF_RANGE: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, completion(temperature=-0.1), "temperature", "must be at least 0"),
    (COMPLETIONS, completion(temperature=2.1), "temperature", "must be at most 2"),
    (COMPLETIONS, completion(top_p=0), "top_p", "must be greater than 0"),
    (COMPLETIONS, completion(top_p=1.5), "top_p", "must be at most 1"),
    (COMPLETIONS, completion(top_k=-2), "top_k", "must be at least -1"),
    (COMPLETIONS, completion(min_p=2), "min_p", "must be at most 1"),
    (COMPLETIONS, completion(n=0), "n", "must be at least 1"),
    (COMPLETIONS, completion(n=1000), "n", "must be at most 128"),
    (COMPLETIONS, completion(max_tokens=0), "max_tokens", "must be at least 1"),
    (COMPLETIONS, completion(min_tokens=3), "min_tokens", "must be at most max_tokens (2)"),
    (COMPLETIONS, completion(logprobs=21), "logprobs", "must be at most 20"),
    (COMPLETIONS, completion(prompt_logprobs=21), "prompt_logprobs", "must be at most 20"),
    (COMPLETIONS, completion(prompt_logprobs=-2), "prompt_logprobs", "must be at least -1"),
    (CHAT, chat(prompt_logprobs=True), "prompt_logprobs", "must be an integer"),
    (CHAT, chat(prompt_logprobs=1, stream=True), "prompt_logprobs", "when 'stream' is false"),
    (COMPLETIONS, completion(echo="yes"), "echo", "must be true or false"),
    (CHAT, chat(echo="yes"), "echo", "must be true or false"),
    (CHAT, chat(max_tokens=0), "max_tokens", "must be at least 1"),
    (COMPLETIONS, completion(presence_penalty=3), "presence_penalty", "must be at most 2"),
    (COMPLETIONS, completion(frequency_penalty=-3), "frequency_penalty", "must be at least -2"),
    (COMPLETIONS, completion(repetition_penalty=0), "repetition_penalty", "must be greater than 0"),
    (COMPLETIONS, completion(logit_bias={"5": 101}), "logit_bias.5", "must be at most 100"),
    (COMPLETIONS, completion(logit_bias={"999999": 1}), "logit_bias", "out of vocabulary: 999999"),
    (COMPLETIONS, completion(stop_token_ids=[999_999]), "stop_token_ids", "out of vocabulary: 999999"),
    (COMPLETIONS, completion(prompt=[1, 999_999]), "prompt", "out of vocabulary: 999999"),
    (COMPLETIONS, completion(prompt=[-1]), "prompt", "token ids from 0"),
    (COMPLETIONS, completion(stop=["a"] * 17), "stop", "at most 16"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "must be at most 20"),
]

CONTENT: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, completion(prompt=""), "prompt", "must not be empty"),
    (COMPLETIONS, completion(prompt=[]), "prompt", "must not be empty"),
    (COMPLETIONS, completion(prompt=["hi", ""]), "prompt", "must not be empty"),
    (COMPLETIONS, completion(prompt=[[]]), "prompt", "must not be empty"),
    (CHAT, {"model": MODEL, "messages": []}, "messages", "must not be empty"),
    (CHAT, chat({"role": "user"}), "messages[0].content", "must be a string"),
    (CHAT, chat({"role": "captain", "content": "hi"}), "messages[0].role", "must be one of"),
    (CHAT, chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "messages[0].content", "image"),
    (COMPLETIONS, completion(temprature=1), "temprature", "Did you mean 'temperature'?"),
    (COMPLETIONS, completion(stream_options={"include_usage": True}), "stream_options", "when 'stream' is true"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "when 'logprobs' is true"),
    (CHAT, chat(max_completion_tokens=3), "max_completion_tokens", "differ"),
    (CHAT, chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "Missing"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "must be one of"),
    (CHAT, chat(guided_json={}), "guided_json", "structured_outputs.json"),
    (CHAT, chat(regex="("), "regex", "unclosed group"),
    (
        COMPLETIONS,
        completion(structured_outputs={"json": {"properties": {"x": {"not": {}}}}}),
        "structured_outputs.json.properties.x",
        "not",
    ),
    (COMPLETIONS, completion(suffix="end"), "suffix", "not supported"),
    (COMPLETIONS, completion(best_of=1, n=2), "best_of", "must be at least 'n'"),
    (COMPLETIONS, completion(allowed_token_ids=[999999]), "allowed_token_ids", "out of vocabulary: 999999"),
    (COMPLETIONS, completion(logprobs=-1, max_tokens=22), "max_tokens", "limited to 21 tokens"),
    (COMPLETIONS, completion(truncate_prompt_tokens=4097), "truncate_prompt_tokens", "at most 4096"),
    (CHAT, chat(chat_template="{{ messages }}"), "chat_template", "chat_templates_in_requests"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages", "would replace"),
]


REFUSED = [*MALFORMED, *WRONG_TYPES, *OUT_OF_RANGE, *CONTENT]
IN_A_STREAM = [
    (path, {"stream": True, **body} if isinstance(body, dict) else body, param, words)
    for path, body, param, words in REFUSED
    if not (isinstance(body, dict) and "stream_options" in body)  # allowed in a stream
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"), [*REFUSED, *IN_A_STREAM], ids=lambda value: str(value)[-40:]
)
def test_a_bad_request_is_refused(server: Server, path: str, body: Any, param: str | None, words: str) -> None:
    error = error_of(server.request("POST", path, body), 400)
    assert error["param"] == param
    assert words in error["message"]
    if param is not None:
        assert f"'{param}'" in error["message"] or error["message"].startswith("Unrecognized")


def test_an_unknown_model_is_not_found(server: Server) -> None:
    for answer in (
        server.request("POST", COMPLETIONS, completion(model="gpt-9")),
        server.request("POST", CHAT, chat(model="gpt-9", stream=True)),
        server.request("GET", "/v1/models/gpt-9"),
    ):
        error = error_of(answer, 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "'gpt-9'" in error["message"]
        assert MODEL in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, completion(prompt=random_prompt(50, 5000)), "prompt"),
        (COMPLETIONS, completion(prompt=["hi", random_prompt(50, 5000)][1:]), "prompt"),
        (COMPLETIONS, completion(prompt=random_prompt(50, MAX_MODEL_LEN)), "prompt"),
        (CHAT, chat({"role": "user", "content": "river " * 5000}), "messages"),
        (CHAT, chat({"role": "user", "content": "river " * 5000}, stream=True), "messages"),
    ],
    ids=["ids", "list", "exactly full", "chat", "streamed chat"],
)
def test_a_prompt_longer_than_the_context_tells_both_lengths(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(server.request("POST", path, body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    lengths = [int(word) for word in error["message"].replace(",", " ").split() if word.isdigit()]
    assert max(lengths) >= MAX_MODEL_LEN
    if path == COMPLETIONS:
        prompt = body["prompt"][0] if isinstance(body["prompt"][0], list) else body["prompt"]
        assert f"your prompt has {len(prompt)} tokens" in error["message"]


def test_max_tokens_that_cannot_fit_tells_what_would(server: Server) -> None:
    error = error_of(
        server.request("POST", COMPLETIONS, completion(prompt=random_prompt(51, 96), max_tokens=4001)), 400
    )
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    for length in ("4096", "4097", "96", "4001"):
        assert length in error["message"]


def test_a_bad_prompt_among_good_ones_refuses_them_all(server: Server) -> None:
    prompts = [random_prompt(52, 10), random_prompt(53, 5000)]
    assert error_of(server.request("POST", COMPLETIONS, completion(prompt=prompts)), 400)["param"] == "prompt"


# Bodies that are too large


def exchange(server: Server, data: Iterator[bytes], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Send a body part by part until the server has answered, which it may do before the end."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    try:
        connection.putrequest("POST", COMPLETIONS)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for part in data:
                connection.send(part)
        except OSError:  # answered already, and closed
            pass
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def chunked(parts: Iterator[bytes]) -> Iterator[bytes]:
    for part in parts:
        yield b"%x\r\n%s\r\n" % (len(part), part)


def test_a_body_over_the_limit_is_refused(server: Server) -> None:
    body = completion(prompt="x" * MAX_BODY_BYTES)
    error = error_of(server.request("POST", COMPLETIONS, body), 413)
    assert error["code"] == "body_too_large"
    assert str(MAX_BODY_BYTES) in error["message"]


def test_a_body_that_says_it_is_over_the_limit_is_refused_unseen(server: Server) -> None:
    headers = {"content-length": str(1 << 40), "content-type": "application/json"}
    error_of(exchange(server, iter([b"{"]), headers), 413)


def test_a_chunked_body_is_refused_where_it_passes_the_limit(server: Server) -> None:
    headers = {"transfer-encoding": "chunked", "content-type": "application/json"}
    parts = chunked(iter([b"x" * (MAX_BODY_BYTES // 4)] * 5))
    error_of(exchange(server, parts, headers), 413)


def test_a_chunked_body_within_the_limit_is_served(server: Server) -> None:
    headers = {"transfer-encoding": "chunked", "content-type": "application/json"}
    data = json.dumps(completion()).encode()
    parts = [*chunked(iter([data[:9], data[9:]])), b"0\r\n\r\n"]
    assert exchange(server, iter(parts), headers)[0] == 200


def test_a_body_of_exactly_the_limit_is_read(server: Server) -> None:
    data = json.dumps(completion(prompt="")).encode()
    padded = data.ljust(MAX_BODY_BYTES)
    assert error_of(server.request("POST", COMPLETIONS, padded), 400)["param"] == "prompt"


def test_a_client_that_leaves_within_its_body_does_no_harm(server: Server) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert server.request("GET", "/health")[0] == 200


# Too many requests


def test_more_choices_than_fit_into_the_queue_are_refused(server: Server) -> None:
    answer = server.request("POST", COMPLETIONS, completion(prompt=["hi"] * (MAX_QUEUED + 1)))
    error = error_of(answer, 400)
    assert "retry-after" not in answer[1]
    assert str(MAX_QUEUED) in error["message"]


def test_requests_beyond_the_queue_are_refused_until_others_end(server: Server, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        with (
            paced(server, tmp_path / "gate"),
            client.completions.create(
                model=MODEL, prompt="hi", n=MAX_QUEUED, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            ) as stream,
        ):
            next(iter(stream))
            for body in (completion(), completion(stream=True)):
                answer = server.request("POST", COMPLETIONS, body)
                error_of(answer, 429, "rate_limit_error")
                assert int(answer[1]["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError, match="at most 40 are accepted"):
                client.chat.completions.create(model=MODEL, messages=[USER])
            assert server.request("GET", "/health")[0] == 200
        eventually(lambda: server.request("POST", COMPLETIONS, completion())[0] == 200, "there is room again")


def test_a_rush_is_served_up_to_the_limit(server: Server) -> None:
    def one(number: int) -> int:
        body = completion(prompt=f"{number} rivers", max_tokens=30, ignore_eos=True)
        return server.request("POST", COMPLETIONS, body)[0]

    with ThreadPoolExecutor(60) as pool:
        statuses = list(pool.map(one, range(60)))
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= MAX_QUEUED


# Routes


def test_an_unknown_route_is_not_found(server: Server) -> None:
    error = error_of(server.request("POST", "/v1/nothing", completion()), 404)
    assert error["code"] == "not_found"
    assert "/v1/nothing" in error["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", COMPLETIONS), ("DELETE", CHAT), ("POST", "/v1/models")])
def test_a_wrong_method_is_refused(server: Server, method: str, path: str) -> None:
    answer = server.request(method, path)
    error = error_of(answer, 405)
    assert error["code"] == "method_not_allowed"
    assert path in error["message"]
    assert answer[1]["allow"] == ("GET" if path == "/v1/models" else "POST")


def test_the_official_client_raises_its_own_errors(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            client.completions.create(model="gpt-9", prompt="hi")
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=[USER], temperature=3)
    assert not_found.value.code == "model_not_found"
    assert bad.value.param == "temperature"
