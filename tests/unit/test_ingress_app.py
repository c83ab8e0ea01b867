"""The HTTP routes, driven as an ASGI application: what a client gets, and what is accounted for."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray import serve

from raydix.actors.ingress.http import CLIENT_CLOSED_REQUEST
from raydix.engine.api import spec
from raydix.engine.api.responses import error_body
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import ANSWER, MODEL, VOCAB, Replica, Reply, Served, body_of, call, objects_of
from tests.unit.served_app import app

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def post(path: str = COMPLETIONS, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    route = "chat" if path == CHATS else "completion"
    return lambda: call(app, "POST", path, body_of(route, **fields))


def get(path: str, **headers: str) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "GET", path, headers=headers)


def test_starting(served: Served) -> None:
    replica = Replica()
    served(replica, get("/version"))
    assert replica.reader.is_started and replica.dispatcher.is_started


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_whole_answer(served: Served, path: str) -> None:
    replica = Replica()
    reply = served(replica, post(path))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    choice = reply.json["choices"][0]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == ANSWER
    assert reply.json["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert [ended.outcome for ended in replica.ledger.ended] == ["stop"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream(served: Served, path: str) -> None:
    replica = Replica()
    reply = served(replica, post(path, stream=True))
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *chunks, done = objects_of(reply.body)
    assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [ended.outcome for ended in replica.ledger.ended] == ["stop"]


def test_a_prediction_goes_with_each_choice(served: Served) -> None:
    replica = Replica()
    guess = {"type": "content", "content": [{"type": "text", "text": "ab"}]}
    reply = served(replica, post(CHATS, prediction=guess, n=2))
    assert reply.status == 200
    assert [generation.prediction for generation in replica.dispatcher.begun] == [tuple(b"ab")] * 2
    reply = served(replica, post(CHATS, prediction={"type": "content", "content": [{"type": "image_url"}]}))
    assert (reply.status, reply.json["error"]["param"]) == (400, "prediction.content")


def test_a_scored_prompt(served: Served) -> None:
    reply = served(Replica(), post(prompt_logprobs=0, max_tokens=0))
    assert len(reply.json["choices"][0]["prompt_logprobs"]) == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_prompt_scored_with_the_whole_vocabulary(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = served(Replica(), post(path, prompt_logprobs=-1, max_tokens=1))
    assert reply.status == 200
    shown = reply.json["prompt_logprobs"] if path == CHATS else reply.json["choices"][0]["prompt_logprobs"]
    assert shown[0] is None and len(shown) > 1
    assert all(at.keys() == set(map(str, range(VOCAB))) for at in shown[1:])

    monkeypatch.setattr(spec, "MAX_LISTED", VOCAB - 1)
    reply = served(Replica(), post(path, prompt_logprobs=-1, max_tokens=1))
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt_logprobs")
    assert "limited to prompts of 1 tokens" in reply.json["error"]["message"]
    assert served(Replica(), post(path, prompt_logprobs=20, max_tokens=1)).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"temperature": 3}, 400, "temperature", "invalid_request"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"max_tokens": 100}, 400, "max_tokens", "context_length_exceeded"),
        ({"n": 11}, 400, None, "invalid_request"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_says_which_field(
    served: Served, fields: dict[str, Any], status: int, param: str | None, code: str, stream: bool
) -> None:
    replica = Replica()
    reply = served(replica, post(stream=stream, **fields))
    error = reply.json["error"]
    assert (reply.status, error["param"], error["code"]) == (status, param, code)
    assert ("retry-after" in reply.headers) == (status == 429)
    assert replica.ledger.ended == [], "no request began"


def test_a_failure_before_the_first_token_is_an_error_response_and_after_it_an_event(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 0
    reply = served(replica, post(stream=True))
    assert (reply.status, reply.json["error"]["message"]) == (503, "every worker died")
    replica.dispatcher.fails_after = 3
    reply = served(replica, post(stream=True))
    assert reply.status == 200
    *chunks, error = objects_of(reply.body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER[:3]
    assert error["error"]["message"] == "every worker died"
    reply = served(replica, post())
    assert (reply.status, reply.body) == (503, error_body(ServiceError("every worker died")))
    assert [ended.outcome for ended in replica.ledger.ended] == ["failed"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generations(served: Served, stream: bool) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = 2

    async def leave() -> Reply:
        body = body_of("completion", stream=stream, n=2)
        return await call(app, "POST", COMPLETIONS, body, leaves_at=lambda reply: not stream or bool(reply.body))

    reply = served(replica, leave)
    assert reply.status == (200 if stream else CLIENT_CLOSED_REQUEST)
    assert len(replica.dispatcher.ended) == len(replica.dispatcher.begun)
    assert [ended.outcome for ended in replica.ledger.ended] == ["aborted"]


def test_an_unforeseen_error_says_where_it_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    replica.reader.failure = KeyError("secret")

    async def ask() -> Reply:
        # Starlette answers, and then lets the error pass for the server's own log.
        reply = Reply()
        with pytest.raises(KeyError):
            await call(app, "POST", COMPLETIONS, body_of("completion"), reply=reply)
        return reply

    reply = served(replica, ask)
    [record] = [each for each in caplog.records if "unexpected error" in each.message]
    assert reply.status == 500
    assert reply.json["error"]["message"].endswith(f"logged as {record.about['error']}.")  # type: ignore[attr-defined]
    assert record.about["route"] == COMPLETIONS  # type: ignore[attr-defined]
    assert b"secret" not in reply.body


def test_names_and_sessions_come_from_headers(served: Served) -> None:
    replica = Replica()
    headers = {"x-request-id": "trace-1", "x-session-id": "s"}
    reply = served(replica, lambda: call(app, "POST", COMPLETIONS, body_of("completion"), headers=headers))
    assert reply.json["id"] == "cmpl-trace-1"
    assert replica.dispatcher.begun[0].session == "s"


def test_objectives_come_from_headers_behind_those_of_the_body(served: Served) -> None:
    replica = Replica()
    body = body_of("completion", slo_tpot_ms=20)
    headers = {"x-slo-ttft-ms": "250.5", "x-slo-tpot-ms": "50"}
    assert served(replica, lambda: call(app, "POST", COMPLETIONS, body, headers=headers)).status == 200
    assert replica.dispatcher.begun[0].objectives == Objectives(ttft_s=0.2505, tpot_s=0.02)


@pytest.mark.parametrize("value", ["0", "-5", "soon", "inf", "nan", "3600001", "9" * 99])
def test_an_objective_of_a_header_is_a_number_of_milliseconds(served: Served, value: str) -> None:
    replica = Replica()
    headers = {"x-slo-ttft-ms": value}
    refused = served(replica, lambda: call(app, "POST", COMPLETIONS, body_of("completion"), headers=headers))
    assert (refused.status, refused.json["error"]["param"]) == (400, "x-slo-ttft-ms")
    assert "must be a number of milliseconds above 0, at most 3,600,000" in refused.json["error"]["message"]
    assert len(refused.json["error"]["message"]) < 200


def test_a_session_of_a_header_is_bounded_as_one_of_a_body(served: Served) -> None:
    replica = Replica()

    def ask(length: int) -> Any:
        headers = {"x-session-id": "s" * length}
        return served(replica, lambda: call(app, "POST", COMPLETIONS, body_of("completion"), headers=headers))

    assert ask(512).status == ask(0).status == 200
    refused = ask(513)
    assert (refused.status, refused.json["error"]["param"]) == (400, "x-session-id")
    assert "The header 'x-session-id' must have at most 512 characters" in refused.json["error"]["message"]
    assert [generation.session for generation in replica.dispatcher.begun] == ["s" * 512, None]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"origin": "http://elsewhere"}, 403),
        ({"origin": "http://test"}, 200),
    ],
    ids=str,
)
def test_requests_that_a_web_page_may_send(served: Served, headers: dict[str, str], status: int) -> None:
    body = body_of("completion")
    assert served(Replica(), lambda: call(app, "POST", COMPLETIONS, body, headers=headers)).status == status


def test_hosts_that_are_not_allowed(served: Served) -> None:
    def status(host: str) -> int:
        return int(served(Replica(), get("/version", host=host), http={"allowed_hosts": ["good"]}).status)

    assert (status("good"), status("evil")) == (200, 403)


def test_keys(served: Served) -> None:
    def status(path: str, **headers: str) -> int:
        tenants = Tenants([Tenant("a")], {key_hash("k"): "a"})
        return int(served(Replica(tenants=tenants), get(path, **headers)).status)

    assert status("/version") == status("/health") == 200
    assert status("/v1/models") == status("/v1/models", authorization="Bearer x") == 401
    assert status("/v1/models", authorization="Bearer k") == 200
    assert status("/v1/cache/events", authorization="Bearer k") == 403, "for administrators"


def test_models(served: Served) -> None:
    replica = Replica()
    [model] = served(replica, get("/v1/models")).json["data"]
    assert served(replica, get(f"/v1/models/{MODEL}")).json == model
    described = {"owned_by": "raydix", "root": MODEL, "parent": None, "max_model_len": 64}
    of_anthropic = {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:01Z"}
    described |= of_anthropic | {"lifecycle": "active", "max_input_tokens": 64}
    assert model == {"id": MODEL, "object": "model", "created": 1, **described}
    page = served(replica, get("/v1/models")).json
    assert (page["first_id"], page["last_id"], page["has_more"]) == (MODEL, MODEL, False)
    assert served(replica, get("/v1/models/a/b")).json["error"]["code"] == "model_not_found"


def test_health_follows_the_workers(served: Served) -> None:
    replica = Replica()
    assert served(replica, get("/health")).json == {"status": "ok"}
    replica.dispatcher.is_ready = False
    reply = served(replica, get("/health"))
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")


def test_the_cache(served: Served) -> None:
    replica = Replica()
    assert served(replica, get("/v1/requests/chatcmpl-known/explain")).json["choices"] == [{"choice": 0}]
    assert served(replica, get("/v1/requests/x/explain")).status == 404
    assert served(replica, get("/v1/cache")).json["hottest_prefixes"] == [{"preview": "hi"}]
    assert served(replica, get("/v1/cache")).json["price_per_million_tokens"] is None
    priced = served(replica, get("/v1/cache"), observability={"price_per_million_tokens": 0.15})
    assert priced.json["price_per_million_tokens"] == 0.15
    reset = served(replica, lambda: call(app, "POST", "/v1/cache/reset"))
    assert reset.json == {"object": "cache.reset", "blocks": 3}
    assert served(replica, get("/v1/cache/events?since=x")).json["error"]["param"] == "since"


def test_unknown_routes_and_methods(served: Served) -> None:
    reply = served(Replica(), get("/nowhere"))
    assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
    reply = served(Replica(), get(COMPLETIONS))
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


def test_the_python_handle(served: Served) -> None:
    async def ask() -> tuple[str, str]:
        ingress: Any = serve.get_replica_context().servable_object
        whole = await ingress.generate({"prompt": "hi"})
        return whole.text, "".join([chunk.text async for chunk in ingress.stream({"prompt": "hi"})])

    assert served(Replica(), ask) == (ANSWER, ANSWER)


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]], ids=["text", "tools"])
def test_the_python_handle_echoes_the_message_that_it_goes_on_with(served: Served, tools: list[object]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    request = {"messages": messages, "continue_final_message": True, "echo": True, "tools": tools}

    async def ask() -> tuple[str, str]:
        ingress: Any = serve.get_replica_context().servable_object
        whole = await ingress.generate(request)
        return whole.text, "".join([chunk.text async for chunk in ingress.stream(request)])

    assert served(Replica(), ask) == (f"Well, {ANSWER}", f"Well, {ANSWER}")


def test_a_body_that_is_too_large(served: Served) -> None:
    reply = served(Replica(), post(prompt="x" * 2000), ingress={"max_body_bytes": 1024})
    assert reply.status == 413


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "expected"),
    [
        ("POST", COMPLETIONS, b"{", {"authorization": "Bearer k"}, (COMPLETIONS, 400, "invalid_request")),
        ("POST", COMPLETIONS, b"{}", {}, (COMPLETIONS, 401, "invalid_api_key")),
        (
            "GET",
            "/v1/models/secret-of-a-client",
            b"",
            {"authorization": "Bearer k"},
            ("/v1/models/{name:path}", 404, "model_not_found"),
        ),
        ("GET", "/secret-of-a-client", b"", {}, ("other", 404, "not_found")),
        ("POST", COMPLETIONS, b"x" * 1025, {"authorization": "Bearer k"}, (COMPLETIONS, 413, "body_too_large")),
        ("DELETE", COMPLETIONS, b"", {}, (COMPLETIONS, 405, "method_not_allowed")),
    ],
    ids=lambda value: str(value[1:]) if isinstance(value, tuple) else "",
)
def test_refusals_are_counted_by_route_and_code(
    served: Served, method: str, path: str, body: bytes, headers: dict[str, str], expected: tuple[str, int, str]
) -> None:
    replica = Replica(tenants=Tenants([Tenant("a")], {key_hash("k"): "a"}))
    served(replica, lambda: call(app, method, path, body, headers=headers), ingress={"max_body_bytes": 1024})
    assert replica.ledger.refusals == [expected]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_replica_counts_the_requests_that_it_refuses(served: Served, stream: bool) -> None:
    replica = Replica(max_requests=1)
    with replica.room.reserve(1, Tenant("other")):
        assert served(replica, post(stream=stream)).status == 429
    replica.dispatcher.fails_after = 1
    served(replica, post(stream=stream))
    assert replica.ledger.refusals == [(COMPLETIONS, 429, "overloaded"), (COMPLETIONS, 503, "service_unavailable")]


def test_a_probe_before_the_workers_are_ready_is_no_refused_request(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica()
    replica.dispatcher.is_ready = False
    assert [served(replica, get(path)).status for path in ("/health", "/ping")] == [503, 503]
    assert replica.ledger.refusals == []
    assert "requests refused" not in caplog.text


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/v1/models", f"/v1/models/{MODEL}", "/version", "/docs", "/metrics"]
)
def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    replica = Replica()
    whole, head = served(replica, get(path)), served(replica, lambda: call(app, "HEAD", path))
    assert (head.status, head.body) == (200, b"")
    assert head.headers.keys() == whole.headers.keys()
    replica.dispatcher.is_ready = False
    assert served(replica, lambda: call(app, "HEAD", "/health")).status == 503
    assert served(replica, lambda: call(app, "HEAD", COMPLETIONS)).status == 405


def test_head_of_a_stream_ends(served: Served) -> None:
    """A stream of events has no end of its own; the client's receive never says that the client left."""
    is_closed = False

    async def events(since: int | None) -> Any:
        nonlocal is_closed
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            is_closed = True

    replica = Replica()
    replica.frontend.cache.events = events  # type: ignore[method-assign]
    reply = served(replica, lambda: call(app, "HEAD", "/v1/cache/events"))
    assert (reply.status, reply.body, is_closed) == (200, b"", True)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", gzip.compress(body_of("completion"))), ("br", body_of("completion")), ("GZIP, br", b"")],
    ids=["gzip", "br_that_is_none", "two"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/v1/messages"])
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(
    served: Served, path: str, encoding: str, body: bytes
) -> None:
    reply = served(Replica(), lambda: call(app, "POST", path, body, headers={"content-encoding": encoding}))
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "identity")
    assert f"'{encoding.lower()}' is not supported" in reply.json["error"]["message"]


def test_identity_is_no_encoding(served: Served) -> None:
    body = body_of("completion")
    reply = served(Replica(), lambda: call(app, "POST", COMPLETIONS, body, headers={"content-encoding": "identity"}))
    assert reply.status == 200
