"""`/openapi.json` describes every route, field, response and error, and responses are as described."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from html.parser import HTMLParser
from importlib.metadata import version
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette

from raydix.actors.ingress.application import application
from raydix.actors.ingress.routes.description import Description
from raydix.engine.api.anthropic.requests import CountRequest, MessagesRequest
from raydix.engine.api.embeddings import EmbeddingsRequest
from raydix.engine.api.openai_responses.requests import ResponsesRequest
from raydix.engine.api.openapi import document
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest
from raydix.engine.api.route import Access, Route
from raydix.engine.api.routes import ROUTES
from raydix.engine.api.tokenization import DetokenizeRequest, TokenizeRequest
from raydix.engine.api.validation import IGNORED, NOT_SUPPORTED
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import Role
from tests.unit.ingress import Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

DOCUMENT: Any = json.loads(json.dumps(document(ROUTES, version=version("raydix"))))
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def validate(value: object, schema: Any) -> None:
    """Raises jsonschema's error unless a value is as described."""
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def validate_reply(method: str, path: str, reply: Reply) -> None:
    """The same for a reply of a route, and its status and content type."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    assert str(reply.status) in responses, f"{method} {path} does not say {reply.status}"
    [(kind, content)] = [
        (kind, each)
        for kind, each in responses[str(reply.status)]["content"].items()
        if kind.partition(";")[0] == reply.headers["content-type"].partition(";")[0]
    ]
    if kind == "application/json":
        validate(reply.json, content["schema"])
    if kind == "text/event-stream":
        assert content["schema"]["required"] == ["data"]
        data = content["schema"]["properties"]["data"]
        lines = reply.body.decode().splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert (events[-1] == "[DONE]") == ({"const": "[DONE]"} in data.get("anyOf", ()))
        payload = data.get("anyOf", (data,))[0]["contentSchema"]
        for event in events:
            if event != "[DONE]":
                validate(json.loads(event), payload)


def test_every_route_can_succeed() -> None:
    methods = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert all("200" in each["responses"] for each in methods)


def test_every_route_is_described_and_served() -> None:
    described = [(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods]
    assert sorted(described) == sorted((route.method.lower(), route.shown_path) for route in ROUTES)
    served = application(Replica()).routes  # type: ignore[arg-type]
    assert [getattr(route, "declared", None) for route in served] == list(ROUTES)
    assert DOCUMENT["paths"].keys() >= {"/v1/chat/completions", "/docs", "/metrics"}


def fields() -> Iterator[tuple[str, Any]]:
    for name, schema in SCHEMAS.items():
        yield name, schema
        for field, value in schema.get("properties", {}).items():
            yield f"{name}.{field}", value


def test_every_object_and_field_has_a_sentence() -> None:
    assert [name for name, schema in fields() if not schema.get("description")] == []
    operations = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert [each["operationId"] for each in operations if not each["summary"]] == []


def test_schemas_are_valid_and_without_dangling_references() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    references = {each.partition('"')[0] for each in json.dumps(DOCUMENT).split("#/components/schemas/")[1:]}
    assert references <= SCHEMAS.keys()


@pytest.mark.parametrize(
    "model",
    [
        ChatCompletionRequest,
        CompletionRequest,
        MessagesRequest,
        CountRequest,
        ResponsesRequest,
        EmbeddingsRequest,
        TokenizeRequest,
        DetokenizeRequest,
    ],
    ids=lambda m: m.__name__,
)
def test_bodies_have_all_fields_that_are_read(model: Any) -> None:
    schema = SCHEMAS[model.__name__]
    assert schema["properties"].keys() == model.model_fields.keys()
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "messages": None}, True),
        ({"prompt": None, "messages": [{"role": "user", "content": "a"}]}, True),
        ({}, False),
        ({"prompt": None}, False),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, False),
    ],
    ids=str,
)
def test_a_text_and_a_chat_exclude_each_other(fields: dict[str, Any], is_valid: bool) -> None:
    schema = {**SCHEMAS["TokenizeRequest"], "components": DOCUMENT["components"]}
    assert Draft202012Validator(schema).is_valid(fields) == is_valid


def test_every_route_with_a_stream_that_can_be_resumed_says_so() -> None:
    resumable = [
        path
        for path, methods in DOCUMENT["paths"].items()
        if "text/event-stream" in methods.get("post", {"responses": {}})["responses"].get("200", {}).get("content", {})
    ]
    assert "/invocations" in resumable and len(resumable) == 5
    for path in resumable:
        operation = DOCUMENT["paths"][path]["post"]
        assert "Last-Event-ID" in [parameter["name"] for parameter in operation["parameters"]], path
        assert "409" in operation["responses"], path


def test_unsupported_and_ignored_fields_say_so() -> None:
    fields = SCHEMAS["ChatCompletionRequest"]["properties"]
    assert (fields["function_call"]["enum"], fields["function_call"]["description"]) == (
        [None, "none", "auto"],
        NOT_SUPPORTED,
    )
    assert fields["metadata"]["description"] == IGNORED
    validate(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, SCHEMAS["ChatCompletionRequest"]
    )


CHAT = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "store": True, "n": 2}
COMPLETION = {"logprobs": 1, "return_token_ids": True, "stop": "two", "n": 2}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {"stream": True}),
        ("/v1/chat/completions", CHAT | USAGE),
        ("/v1/chat/completions", {"prompt_logprobs": 1}),
        ("/v1/completions", {}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | USAGE),
        ("/v1/completions", {"prompt_logprobs": 0, "echo": True, "logprobs": 0, "max_tokens": 0}),
        ("/v1/completions", {"temperature": 9}),
        ("/v1/completions", {"model": "other"}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "id": "raydix-" + "a" * 32}]}),
        ("/v1/messages", {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
        ("/v1/messages", {"stream": True}),
        ("/v1/messages", {"model": "other"}),
        ("/v1/messages/count_tokens", {}),
        ("/v1/responses", {"instructions": "a", "metadata": {"a": "b"}}),
        ("/v1/responses", {"include": ["message.output_text.logprobs"], "stream": True}),
        ("/v1/responses", {"previous_response_id": "resp_x"}),
        ("/v1/responses/input_tokens", {"instructions": "a"}),
        ("/v1/responses", {"enable_response_messages": True, "stream": True}),
    ],
    ids=str,
)
def test_answers_are_as_described(served: Served, path: str, fields: dict[str, Any]) -> None:
    kinds = {"chat": "chat", "messages": "messages", "responses": "responses"}
    route = next((route for word, route in kinds.items() if word in path), "completion")
    reply = served(Replica(), lambda: call(app, "POST", path, body_of(route, **fields)))
    validate_reply("post", path, reply)
    if reply.status == 200:
        body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        validate(json.loads(body_of(route, **fields)), body["schema"])


def ask(method: str, path: str, body: bytes = b"", **headers: str) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, method.upper(), path, body, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "route", "body"),
    [
        ("get", "/v1/models", None, b""),
        ("get", "/v1/models/letters", "/v1/models/{name}", b""),
        ("get", "/v1/models/other", "/v1/models/{name}", b""),
        ("get", "/health", None, b""),
        ("get", "/ping", None, b""),
        ("post", "/ping", None, b""),
        ("get", "/load", None, b""),
        ("get", "/metrics", None, b""),
        ("get", "/server_info", None, b""),
        ("get", "/server_info?config_format=x", "/server_info", b""),
        ("get", "/version", None, b""),
        ("get", "/openapi.json", None, b""),
        ("get", "/docs", None, b""),
        ("get", "/v1/requests/none/explain", "/v1/requests/{request_id}/explain", b""),
        ("get", "/v1/cache/events?since=x", "/v1/cache/events", b""),
        ("get", "/v1/cache/doctor", None, b""),
        ("post", "/v1/embeddings", None, b'{"input":"a"}'),
        ("post", "/v1/embeddings", None, b'{"input":[[1],[2]],"encoding_format":"base64"}'),
        ("post", "/v1/embeddings", None, b'{"input":"a","dimensions":1}'),
        ("post", "/generative_scoring", None, b'{"query":"a","items":["b"],"label_token_ids":[65]}'),
        ("post", "/generative_scoring", None, b'{"query":"a","items":[]}'),
        ("post", "/v1/score", None, b'{"query":[65],"items":[[66],[67]],"label_token_ids":[65,66]}'),
        ("post", "/invocations", None, b'{"prompt":"a"}'),
        ("post", "/invocations", None, b'{"messages":[{"role":"user","content":"a"}],"stream":true}'),
        ("post", "/invocations", None, b'{"input":"a"}'),
        ("post", "/invocations", None, b"{}"),
        ("post", "/v1/chat/completions/batch", None, b'{"messages":[[{"role":"user","content":"a"}]]}'),
        ("post", "/v1/chat/completions/batch", None, b'{"messages":[]}'),
        ("post", "/v1/responses/x/cancel", "/v1/responses/{response_id}/cancel", b""),
        ("get", "/tokenizer_info", None, b""),
        ("post", "/tokenize", None, b'{"prompt":"a"}'),
        ("post", "/tokenize", None, b'{"prompt":"a","return_token_strs":true}'),
        ("post", "/tokenize", None, b"{}"),
        ("post", "/detokenize", None, b'{"tokens":[104]}'),
        ("post", "/detokenize", None, b"["),
    ],
)
def test_other_replies_are_as_described(served: Served, method: str, path: str, route: str | None, body: bytes) -> None:
    validate_reply(method, route or path, served(Replica(), ask(method, path, body)))


def test_a_description_that_could_not_be_made_is_made_for_the_next_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([MemoryError("no room")])

    def made(routes: Sequence[Route], *, version: str) -> dict[str, Any]:
        for failure in failures:
            raise failure
        return dict(document(routes, version=version))

    async def asked() -> None:
        fresh = Starlette()
        with pytest.raises(MemoryError):
            await Description.of(fresh)
        first = await Description.of(fresh)
        assert json.loads(first.document) == DOCUMENT
        assert await Description.of(fresh) is first, "made once"

    monkeypatch.setattr("raydix.actors.ingress.routes.description.document", made)
    asyncio.run(asked())


@pytest.mark.parametrize(("method", "path"), [(route.method.lower(), route.shown_path) for route in ROUTES])
def test_a_route_needs_the_key_that_it_says(served: Served, method: str, path: str) -> None:
    replica = Replica(tenants=Tenants([Tenant("a")], {key_hash("k"): "a"}))
    reply = served(replica, ask(method, path))
    assert (reply.status != 401) == (DOCUMENT["paths"][path][method]["security"] == [])
    validate_reply(method, path, reply)


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.access is Access.ADMINISTRATORS], ids=lambda route: route.name
)
def test_a_route_for_administrators_refuses_other_tenants(served: Served, route: Route) -> None:
    replica = Replica(tenants=Tenants([Tenant("a")], {key_hash("k"): "a"}))
    reply = served(replica, ask(route.method, route.path, authorization="Bearer k"))
    assert (reply.status, reply.json["error"]["code"]) == (403, "permission_denied")


def test_reports_of_the_manager_are_as_described(make_directory: Callable[..., Directory]) -> None:
    directory = make_directory()
    directory.register("w", Role.MIXED, 1, 10, (), 64, "cpu", "f")
    for is_admin in (True, False):
        report = cache_report(directory, "a", is_admin)
        prefixes = report["hottest_prefixes"]
        assert isinstance(prefixes, list)
        for prefix in prefixes:
            prefix["preview"] = str(prefix.pop("token_ids"))
        report["price_per_million_tokens"] = None  # the ingress adds it
        validate(json.loads(json.dumps(report)), SCHEMAS["CacheReport"])


class Links(HTMLParser):
    """Anchors and links of a page, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors.add(given.get("id") or "")
        if tag == "a":
            self.links.add(given.get("href") or "")
        if tag in ("script", "link", "img", "iframe") or "src" in given:
            self.loaded.append(tag)


def test_the_page_needs_nothing_from_the_network_and_its_links_lead_somewhere(served: Served) -> None:
    reply = served(Replica(), ask("get", "/docs"))
    page = reply.body.decode()
    found = Links()
    found.feed(page)
    assert found.loaded == []
    assert {link for link in found.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in found.links if link.startswith("#")} <= found.anchors
    assert {*SCHEMAS} <= found.anchors
    assert all(path in page for path in DOCUMENT["paths"])
    assert "default-src 'none'" in reply.headers["content-security-policy"]
