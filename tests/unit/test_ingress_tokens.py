"""`/tokenize` and `/detokenize` over HTTP: vLLM's shapes, and the limits of other bodies."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.api.requests import parse_chat
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatTemplate
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.model.tokenizer import RenderedChat
from raydix.engine.serving.reader_work import ReadingFacts, TokenRequest
from raydix.engine.serving.reading import Reader
from raydix.engine.serving.served_model import ServedModel
from tests.unit.ingress import CONTEXT, MODEL, VOCAB, LetterTokenizer, Replica, Reply, Served, call
from tests.unit.served_app import app

TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, "}]


def ask(path: str, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "POST", path, json.dumps(fields).encode())


def letters(text: str) -> list[int]:
    return [*text.encode()]


def test_the_tokens_of_a_text(served: Served) -> None:
    reply = served(Replica(), ask("/tokenize", model=MODEL, prompt="hi"))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == {"count": 2, "max_model_len": CONTEXT, "tokens": [104, 105], "token_strs": None}
    assert served(Replica(), ask("/tokenize", prompt="")).json["tokens"] == []
    assert served(Replica(), ask("/tokenize", prompt="hi", return_token_strs=True)).json["token_strs"] == ["h", "i"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "user: hi\nassistant: yes, \nassistant: "),
        ({"add_generation_prompt": False}, "user: hi\nassistant: yes, \n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "user: hi\nassistant: yes, "),
        ({"continue_final_message": True}, "user: hi\nassistant: yes, "),
    ],
    ids=str,
)
def test_the_tokens_of_a_chat(served: Served, fields: dict[str, Any], text: str) -> None:
    reply = served(Replica(), ask("/tokenize", messages=CHAT, **fields))
    assert reply.json["tokens"] == letters(text)
    assert reply.json["count"] == len(text)


def test_the_tokenizer_is_described_unless_turned_off(served: Served) -> None:
    described = served(Replica(description={"tokenizer_class": "Letters"}), lambda: call(app, "GET", "/tokenizer_info"))
    assert (described.status, described.json) == (200, {"tokenizer_class": "Letters"})
    off = served(Replica(), lambda: call(app, "GET", "/tokenizer_info"))
    assert off.status == 404 and "http.tokenizer_info" in off.json["error"]["message"]


def test_the_text_of_tokens_names_special_tokens(served: Served) -> None:
    reply = served(Replica(), ask("/detokenize", model=MODEL, tokens=[104, 0, 105]))
    assert (reply.status, reply.json) == (200, {"prompt": "h</s>i"})
    assert served(Replica(), ask("/detokenize", tokens=[])).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "prompts": 1}, 400, "prompts"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ("/tokenize", {"messages": CHAT, "tools": [TOOL, TOOL]}, 400, "tools[1].function.name"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ messages }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        (
            "/tokenize",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "token_ids": [1]}]},
            400,
            "messages[0].token_ids",
        ),
        ("/tokenize", {"prompt": "a" * 200_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [128]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused(served: Served, path: str, fields: dict[str, Any], status: int, param: str) -> None:
    reply = served(Replica(), ask(path, **fields))
    assert (reply.status, reply.json["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    "fields", [{"add_generation_prompt": True}, {"continue_final_message": False}, {"tools": None}], ids=str
)
def test_defaults_are_taken_where_they_ask_for_nothing(served: Served, fields: dict[str, Any]) -> None:
    assert served(Replica(), ask("/tokenize", prompt="a", **fields)).status == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_limits_of_other_bodies_hold(served: Served, path: str) -> None:
    tenants = Tenants([Tenant("a")], {key_hash("k"): "a"})
    assert served(Replica(tenants=tenants), ask(path)).status == 401
    assert served(Replica(), ask(path, prompt="x" * 2000), ingress={"max_body_bytes": 1024}).status == 413
    plain = {"content-type": "text/plain"}
    assert served(Replica(), lambda: call(app, "POST", path, b"{}", headers=plain)).status == 415

    busy = Replica(max_requests=1, tenants=tenants)
    with busy.room.reserve(1, Tenant("a")):
        reply = served(busy, lambda: call(app, "POST", path, b"{}", headers={"authorization": "Bearer k"}))
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert busy.room.num_held == 0


class TemplateTokenizer(LetterTokenizer):
    """Renders what it is given beside the messages."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: ChatTemplate = MODEL_TEMPLATE,
        begins_answer: bool = True,
        special_tokens: bool = False,
    ) -> RenderedChat:
        chat = super().render_chat(messages, begins_answer=begins_answer)
        return RenderedChat(f"{template.source} {json.dumps(template.arguments)}\n{chat.text}", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template": "{{ messages }}", "chat_template_kwargs": {"a": [1]}},
        {"chat_template": "{{ messages }}", "tools": [TOOL]},
    ],
)
def test_a_chat_has_the_tokens_that_an_answer_would_follow(fields: dict[str, Any]) -> None:
    model = ServedModel(MODEL, 4096, VOCAB)
    facts = ReadingFacts(model, Path(), special_tokens_in_messages=False, chat_templates_in_requests=True)
    reader = Reader(facts, TemplateTokenizer())
    body = json.dumps({"messages": CHAT[:1], **fields}).encode()
    chat = reader.read(parse_chat(body)).chat
    assert chat is not None and json.loads(reader.tokenize(body, (MODEL,)))["tokens"] == list(chat.token_ids)
    plain = json.loads(reader.tokenize(json.dumps({"messages": CHAT[:1]}).encode(), (MODEL,)))["tokens"]
    assert len(chat.token_ids) > len(plain)


def test_a_template_of_a_client_is_a_program_here_too() -> None:
    model = ServedModel(MODEL, 4096, VOCAB)
    facts = ReadingFacts(model, Path(), special_tokens_in_messages=False)
    body = json.dumps({"messages": CHAT, "chat_template": "x"}).replace("_temp", "\\u005ftemp").encode()
    for is_allowed in (False, True):
        reader = Reader(replace(facts, chat_templates_in_requests=is_allowed), LetterTokenizer())
        assert reader.runs_program(TokenRequest("tokenize", body, (MODEL,))) is is_allowed
        assert not reader.runs_program(TokenRequest("tokenize", b'{"prompt": "a"}', (MODEL,)))
        assert not reader.runs_program(TokenRequest("detokenize", b'{"tokens": [1]}', (MODEL,)))
