"""The Python handle's requests and responses."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from raydix.engine.api.fields import SamplingFields
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse, as_generate_request
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from raydix.engine.api.responses import TokenUsage
from raydix.engine.api.spec import DEFAULT_SAMPLING, FormSpec, GenerationSpec, ServiceSpec
from raydix.engine.core.answers.prompt_form import ChatTemplate
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import FinishReason, TokenLogprobs


def test_prompt_and_messages() -> None:
    request = GenerateRequest(prompt="hi", temperature=0.5, stop="x", logit_bias={5: 1}, request_id="r-1")
    assert request.spec() == GenerationSpec(
        kind="completion",
        prompts=("hi",),
        sampling=replace(DEFAULT_SAMPLING, temperature=0.5, logit_bias=((5, 1.0),)),
        stop=("x",),
        form=FormSpec(include_usage=True),
        service=ServiceSpec(request_id="r-1"),
    )
    assert GenerateRequest(prompt=[1, 2]).spec(stream=True).prompts == ((1, 2),)
    assert GenerateRequest(prompt=(1, 2)).spec(stream=True).form.stream
    message = {"role": "user", "content": "hi"}
    assert GenerateRequest.model_validate({"messages": [message]}).spec().messages == (message,)


def test_a_chat_has_the_wishes_for_its_template() -> None:
    message = {"role": "user", "content": "hi"}
    fields = {"chat_template": "x", "chat_template_kwargs": {"y": 1}}
    assert GenerateRequest.model_validate({"messages": [message], **fields}).spec().template == ChatTemplate(
        "x", {"y": 1}
    )
    for name, value in fields.items():
        with pytest.raises(RequestError, match="with 'messages' only") as caught:
            GenerateRequest.model_validate({"prompt": "x", name: value}).spec()
        assert caught.value.param == name


def test_a_request_travels() -> None:
    for request in (GenerateRequest(prompt=[1, 2], stop=("a",)), GenerateRequest(prompt="x", logit_bias={1: 2})):
        assert pickle.loads(pickle.dumps(request)) == request
        assert GenerateRequest.model_validate_json(request.model_dump_json()) == request
        assert as_generate_request(request) is request
        assert as_generate_request(request.model_dump()) == request


def test_the_prompt_can_be_scored() -> None:
    assert GenerateRequest(prompt="x", prompt_logprobs=3, max_tokens=0).spec().sampling.prompt_logprobs == 3
    assert GenerateRequest(prompt="x", prompt_logprobs=3).spec(stream=True).form.stream
    with pytest.raises(RequestError, match="'max_tokens' must be at least 1"):
        GenerateRequest(prompt="x", max_tokens=0).spec()
    with pytest.raises(RequestError, match="'echo' is allowed with 'messages' only"):
        as_generate_request({"prompt": "x", "echo": True}).spec()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]}
OF_CHATS: dict[str, Any] = {
    "add_generation_prompt": False,
    "chat_template": "x",
    "chat_template_kwargs": {"y": 1},
    "continue_final_message": True,
    "echo": True,
    "include_reasoning": False,
    "input_ids": [1, 2],
    "prediction": {"type": "content", "content": "Well then."},
    "reasoning_effort": "low",
    "store": True,
    "thinking_token_budget": 5,
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
OF_PROMPTS: dict[str, Any] = {"suffix": "x", "add_special_tokens": True}


@pytest.mark.parametrize(("name", "value"), OF_CHATS.items(), ids=str)
def test_a_field_of_chats_has_its_effect_there_and_is_refused_beside_a_prompt(name: str, value: object) -> None:
    own = as_generate_request({**CHAT, name: value}).spec()
    assert own != as_generate_request(CHAT).spec()
    over_http = parse_chat(json.dumps({**CHAT, name: value}).encode())
    assert replace(own, form=replace(own.form, include_usage=False)) == over_http
    with pytest.raises(RequestError, match=f"'{name}' is allowed with 'messages' only") as caught:
        as_generate_request({"prompt": "x", name: value}).spec()
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), OF_PROMPTS.items(), ids=str)
def test_a_field_of_prompts_is_refused_beside_messages(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is allowed with 'prompt' only") as caught:
        as_generate_request({**CHAT, name: value}).spec()
    assert caught.value.param == name


def test_fields_of_prompts_have_their_effect() -> None:
    for fields in ({"suffix": "x"}, {"add_special_tokens": False}):
        own = as_generate_request({"prompt": "hi", **fields}).spec()
        over_http = parse_completion(json.dumps({"prompt": "hi", **fields}).encode())
        own = replace(own, form=replace(own.form, include_usage=False))
        assert own == over_http != parse_completion(b'{"prompt": "hi"}')
    with pytest.raises(RequestError, match="'suffix' is only allowed with a text"):
        GenerateRequest(prompt=[1], suffix="x").spec()


def test_values_without_effect_are_taken_with_either() -> None:
    idle = {
        **dict.fromkeys(("store", "continue_final_message", "echo", "add_special_tokens"), False),
        **dict.fromkeys(("add_generation_prompt", "include_reasoning"), True),
        "chat_template_kwargs": {},
        "thinking_token_budget": -1,
        "suffix": "",
    }
    assert as_generate_request({**CHAT, **idle}).spec() == as_generate_request(CHAT).spec()
    prompt = {**idle, "add_special_tokens": True, "prompt": "x"}
    assert as_generate_request(prompt).spec() == GenerateRequest(prompt="x").spec()


def test_a_chat_with_all_its_fields_travels() -> None:
    for name in OF_CHATS:
        request = as_generate_request({**CHAT, name: OF_CHATS[name]})
        assert pickle.loads(pickle.dumps(request)) == request
        assert GenerateRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": "x", "temperature": 3}, "temperature", "must be at most 2, got 3"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature", "must be a finite number"),
        ({"prompt": "x", "temprature": 3}, "temprature", "Did you mean 'temperature'?"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": "\ud800"}, "prompt", "must be valid Unicode"),
        ({"prompt": "x", "bad_words": ["\ud800"]}, "bad_words", "must be valid Unicode"),
        ({"prompt": "x", "stop": "\ud800"}, "stop", "must be valid Unicode"),
        ({"prompt": "x", "seed": 10**5000}, "seed", "got a huge integer"),
        ({"prompt": "x", "n": 2}, "n", "Unrecognized"),
        ({"prompt": "x", "request_id": "a b"}, "request_id", "is not valid"),
        ({"prompt": "x", "logit_bias": {-1: 1}}, "logit_bias", "must have token ids as keys, got -1"),
        ({"prompt": object()}, "prompt", "got a value of type object"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role", "must be one of"),
        ({}, "prompt", "exactly one of"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt", "exactly one of"),
        ({"prompt": ["x", "y"]}, "prompt", "must have integers as token ids"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    ],
    ids=lambda value: str(type(value) if isinstance(value, dict) else value)[:40],
)
def test_bad_requests(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        as_generate_request(fields).spec()
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_tenant_can_be_named_by_the_handle_alone() -> None:
    assert GenerateRequest(prompt="x", tenant="acme").tenant == "acme"
    for parse, prompt in ((parse_completion, {"prompt": "x"}), (parse_chat, {"messages": [{"role": "user"}]})):
        with pytest.raises(RequestError) as caught:
            parse(json.dumps({"model": "m", "tenant": "acme", **prompt}).encode())
        assert caught.value.param == "tenant"


@pytest.mark.parametrize("value", [None, 5, "x", ["x"]])
def test_a_request_that_is_no_mapping(value: Any) -> None:
    with pytest.raises(RequestError, match="must be a GenerateRequest or a mapping"):
        as_generate_request(value)


def test_a_wrong_field_is_found_where_it_is_written() -> None:
    with pytest.raises(ValidationError, match="top_p"):
        GenerateRequest(prompt="x", top_p=2)


def test_fields_and_bounds_are_those_of_http() -> None:
    shared = SamplingFields.model_json_schema()["properties"]
    for model in (GenerateRequest, CompletionRequest, ChatCompletionRequest):
        properties = model.model_json_schema()["properties"]
        assert {name: properties[name] for name in shared} == shared


def test_responses_travel() -> None:
    response = GenerateResponse(
        request_id="r",
        text="the",
        token_ids=(1,),
        logprobs=(TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0)),),
        finish_reason=FinishReason.STOP,
        usage=TokenUsage(3, 1, 2),
    )
    assert pickle.loads(pickle.dumps(response)) == response
    assert GenerateResponse.model_validate_json(response.model_dump_json()) == response
    assert response.usage.cached_tokens == 2
    chunk = GenerateChunk(request_id="r", text="t", token_ids=(1,))
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    assert (chunk.finish_reason, chunk.usage, chunk.logprobs) == (None, None, None)
