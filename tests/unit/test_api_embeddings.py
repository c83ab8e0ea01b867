"""Bodies of `/v1/embeddings`."""

from dataclasses import replace
from typing import Any

import orjson
import pytest

from raydix.engine.api.embeddings import EmbedRequest, as_embed_request, parse_embeddings
from raydix.engine.api.responses import response_id
from raydix.engine.api.spec import EmbeddingUse, GenerationSpec, ServiceSpec, Truncation
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.errors import RequestError


def parsed(**fields: Any) -> GenerationSpec:
    return parse_embeddings(orjson.dumps({"input": "a", **fields}))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["x"] * 2048, ("x",) * 2048),
    ],
    ids=["text", "texts", "ids", "lists", "many"],
)
def test_inputs(given: object, prompts: object) -> None:
    spec = parsed(input=given)
    assert spec.prompts == prompts
    assert (spec.kind, spec.max_tokens, spec.embedding) == ("completion", 0, EmbeddingUse())
    assert spec.prompt_param == "input"


def test_fields() -> None:
    spec = parsed(
        model="m",
        encoding_format="base64",
        dimensions=3,
        use_activation=False,
        truncate_prompt_tokens=5,
        truncation_side="right",
        add_special_tokens=False,
        user="u",
        session_id="s",
        priority=-2,
        cache_salt="c",
        cache_priority=1,
        cache_ttl_s=60,
        request_id="r",
    )
    assert spec.embedding == EmbeddingUse("base64", is_normalized=False, dimensions=3)
    assert spec.truncation == Truncation(5, keeps_end=False)
    assert spec.model == "m"
    assert spec.service == ServiceSpec(user="u", session_id="s", priority=-2, request_id="r")
    assert (spec.retention.salt, spec.retention.priority, spec.retention.ttl_s) == ("c", 1, 60)
    assert not spec.add_special_tokens
    assert response_id(spec, "r") == "embd-r"


@pytest.mark.parametrize(
    "fields",
    [
        {"encoding_format": "float"},
        {"normalize": True},
        {"normalize": True, "use_activation": True},
        {"endianness": "native"},
        {"embed_dtype": "float32"},
        {"dimensions": None},
    ],
    ids=str,
)
def test_values_that_change_nothing(fields: dict[str, Any]) -> None:
    assert parsed(**fields) == parsed()


CHAT = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ChatEnd.CLOSED),
        ({"add_generation_prompt": True}, ChatEnd.ANSWER),
        ({"continue_final_message": True}, ChatEnd.OPEN),
        ({"add_special_tokens": False, "input": None}, ChatEnd.CLOSED),
    ],
    ids=str,
)
def test_a_chat(fields: dict[str, Any], end: ChatEnd) -> None:
    spec = parse_embeddings(orjson.dumps({"messages": CHAT, "encoding_format": "base64", **fields}))
    assert (spec.kind, spec.chat_end, spec.max_tokens) == ("chat", end, 0)
    assert spec.embedding == EmbeddingUse("base64")
    assert [message["role"] for message in spec.messages] == ["system", "user"]
    assert spec.prompt_param == "messages" and response_id(spec, "r") == "embd-r"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a"}, "messages"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a", "token_ids": [1]}]}, "messages[0].token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
    ids=str,
)
def test_chats_that_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_embeddings(orjson.dumps({"messages": CHAT, **fields}))
    assert raised.value.param is not None and raised.value.param.startswith(param)


def test_a_field_without_effect_is_named() -> None:
    assert parsed(metadata={"a": 1}) == replace(parsed(), ignored=("metadata",))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"endianness": "big"}, "endianness"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"normalize": True, "use_activation": False}, "normalize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"temperature": 0}, "temperature"),
        ({"stream": True}, "stream"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parsed(**fields)
    assert raised.value.param == param
    assert param in str(raised.value)


def test_a_body_without_input() -> None:
    with pytest.raises(RequestError, match="Missing required parameter: 'input'"):
        parse_embeddings(b"{}")


def test_dimensions_are_the_hidden_states_or_refused() -> None:
    EmbeddingUse(dimensions=576).check(576)
    EmbeddingUse().check(576)
    with pytest.raises(RequestError, match="'dimensions' must be 576") as raised:
        EmbeddingUse(dimensions=256).check(576)
    assert raised.value.param == "dimensions"


def test_requests_of_the_handle() -> None:
    request = EmbedRequest(input=("a",), tenant="t")
    assert as_embed_request(request) is request
    assert as_embed_request({"input": ["a"], "tenant": "t"}) == request
    assert request.spec().embedding == EmbeddingUse()
    with pytest.raises(RequestError, match="'input'"):
        as_embed_request({"input": 3})
    with pytest.raises(RequestError, match="EmbedRequest"):
        as_embed_request(["a"])  # type: ignore[arg-type]
