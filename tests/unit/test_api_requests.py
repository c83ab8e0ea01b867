"""HTTP bodies: what they become, and the sentence for every kind of bad one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.fields import MAX_CHOICES, MAX_PROMPTS
from engine.api.requests import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from engine.api.spec import GenerationSpec
from engine.core.errors import RequestError

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> GenerationSpec:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> GenerationSpec:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def test_plain_requests() -> None:
    assert completion() == GenerationSpec(kind="completion", model="m", prompts=("hi",))
    assert chat() == GenerationSpec(kind="chat", model="m", messages=(USER,))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "日本"], ("a", "日本")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([0], ((0,),)),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_every_field_arrives() -> None:
    spec = chat(
        n=2,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-5,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={"7": -100, "3": 1.5},
        min_tokens=2,
        stop=["a", "b", "a"],
        include_stop_str_in_output=True,
        stop_token_ids=[5, 6, 5],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        user="u",
        session_id="s",
        cache_salt="salt",
        cache_priority=-3,
        cache_ttl_s=90,
    )
    assert spec == GenerationSpec(
        kind="chat",
        model="m",
        messages=(USER,),
        n=2,
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-5,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias=((3, 1.5), (7, -100.0)),
        min_tokens=2,
        stop=("a", "b"),
        include_stop=True,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        logprobs=4,
        stream=True,
        include_usage=True,
        return_token_ids=True,
        user="u",
        session_id="s",
        cache_salt="salt",
        cache_priority=-3,
        cache_ttl_s=90.0,
    )


def test_null_means_default() -> None:
    for request, parse in ((CompletionRequest, completion), (ChatCompletionRequest, chat)):
        optional = [name for name, field in request.model_fields.items() if not field.is_required()]
        assert parse(**dict.fromkeys(optional)) == parse()


@pytest.mark.parametrize(("top_k", "expected"), [(-1, None), (0, None), (None, None), (1, 1)])
def test_top_k(top_k: int | None, expected: int | None) -> None:
    assert completion(top_k=top_k).top_k == expected


def test_logprobs() -> None:
    assert completion().logprobs is None
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=5).logprobs == 5
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20


def test_stop_may_be_one_string() -> None:
    assert completion(stop="ab").stop == ("ab",)
    assert completion(stop=[]).stop == ()


def test_max_tokens_under_both_names() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3


def test_prompt_cache_key_stands_in_for_the_session() -> None:
    assert chat(prompt_cache_key="k").session_id == "k"
    assert chat(prompt_cache_key="k", session_id="s").session_id == "s"


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"parallel_tool_calls": False},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"safety_identifier": "x"},
        {"skip_special_tokens": True},
        {"add_generation_prompt": True},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)
def test_harmless_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat(stream=fields.get("stream"))


def test_harmless_fields_of_completions() -> None:
    assert completion(n=2, best_of=2, echo=False, suffix="") == completion(n=2)


def test_prompts_are_echoed_and_scored() -> None:
    assert completion(echo=True, logprobs=2) == GenerationSpec(
        kind="completion", model="m", prompts=("hi",), echo=True, logprobs=2
    )
    assert completion(prompt_logprobs=0).prompt_logprobs == 0
    assert chat(prompt_logprobs=20).prompt_logprobs == 20
    assert completion(echo=True, stream=True).stream, "only prompt_logprobs have no place in a stream"
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert chat(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    spec = chat(
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "assistant", "content": "", "annotations": []},
        ]
    )
    assert spec.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    )


BAD = [
    ({"temperature": 2.1}, "temperature", "'temperature' must be at most 2, got 2.1."),
    ({"temperature": -0.1}, "temperature", "must be at least 0"),
    ({"temperature": "1"}, "temperature", 'must be a number, got "1"'),
    ({"temperature": True}, "temperature", "must be a number, got true"),
    ({"temperature": float("nan")}, "temperature", "must be a finite number"),
    ({"temperature": float("inf")}, "temperature", "must be a finite number"),
    ({"temperature": [1]}, "temperature", "must be a number, got a list"),
    ({"top_p": 0}, "top_p", "must be greater than 0"),
    ({"top_p": 1.01}, "top_p", "must be at most 1"),
    ({"top_k": -2}, "top_k", "must be at least -1"),
    ({"top_k": 1.0}, "top_k", "must be an integer"),
    ({"min_p": 1.5}, "min_p", "must be at most 1"),
    ({"seed": 2**63}, "seed", "must be less than 9223372036854775808"),
    ({"seed": 1.5}, "seed", "must be an integer"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
    ({"max_tokens": -1}, "max_tokens", "must be at least 0"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "must be at least 0, got -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "must be at most 20, got 21"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "must be an integer, got true"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "only allowed when 'stream' is false"),
    ({"max_tokens": "many"}, "max_tokens", "must be an integer"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "must be at least 1"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ({"min_tokens": -1}, "min_tokens", "must be at least 0"),
    ({"n": 0}, "n", "must be at least 1"),
    ({"n": 129}, "n", "must be at most 128"),
    ({"n": True}, "n", "must be an integer, got true"),
    ({"stop": ""}, "stop", "must not have an empty string"),
    ({"stop": ["a", ""]}, "stop", "must not have an empty string"),
    ({"stop": ["a"] * 17}, "stop", "must have at most 16 strings, got 17"),
    ({"stop": [1]}, "stop", "must be a string or a list of strings, got 1 in the list"),
    ({"stop": 1}, "stop", "must be a string or a list of strings"),
    ({"stop": "x" * 1025}, "stop", "must have strings of at most 1024 characters"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "must be at least 0"),
    ({"stop_token_ids": 5}, "stop_token_ids", "must be a list"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "must have at most 128 elements, got 129"),
    ({"ignore_eos": 1}, "ignore_eos", "must be true or false, got 1"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when 'stream' is true"),
    ({"stream": True, "stream_options": 1}, "stream_options", "must be an object"),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include", "Unrecognized request argument"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be at most 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "must be at least -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be greater than 0"),
    ({"repetition_penalty": 11}, "repetition_penalty", "must be at most 10"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "must be at most 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "token id as key"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "token id as key"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "must be a number"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "must have at most 1024 elements, got 1025"),
    ({"return_token_ids": "x"}, "return_token_ids", "must be true or false"),
    ({"user": 5}, "user", "must be a string"),
    ({"session_id": ""}, "session_id", "must not be empty"),
    ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    ({"cache_priority": 11}, "cache_priority", "must be at most 10, got 11"),
    ({"cache_priority": -11}, "cache_priority", "must be at least -10, got -11"),
    ({"cache_priority": 0.5}, "cache_priority", "must be an integer"),
    ({"cache_ttl_s": 0}, "cache_ttl_s", "must be greater than 0, got 0"),
    ({"cache_ttl_s": -1}, "cache_ttl_s", "must be greater than 0, got -1"),
    ({"cache_ttl_s": 1e9}, "cache_ttl_s", "must be at most 31622400"),
    ({"cache_ttl_s": "long"}, "cache_ttl_s", "must be a number"),
    ({"model": None}, "model", "must be a string, got null"),
    ({"model": ""}, "model", "must not be empty"),
    ({"model": 1}, "model", "must be a string"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not supported yet"),
    ({"guided_json": {}}, "guided_json", "is not supported yet"),
    ({"temprature": 1}, "temprature", "supplied: temprature. Did you mean 'temperature'?"),
    ({"xyzzy": 1}, "xyzzy", "Unrecognized request argument supplied: xyzzy"),
    ({f"x{i}": i for i in range(200)}, "x0", "Unrecognized request argument supplied: x0"),
]


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=[f"{param}-{words}"[:50] for _, param, words in BAD])
def test_bad_field(parse: Any, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message
    assert words in caught.value.message


BAD_COMPLETION = [
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt", "must not be empty"),
    ({"prompt": None}, "prompt", "must be a string, a list of strings or token ids, got null"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": {"a": 1}}, "prompt", "got an object"),
    ({"prompt": [True]}, "prompt", "must be a string"),
    ({"prompt": [1, True]}, "prompt", "must have integers as token ids, got true"),
    ({"prompt": [1, 2.0]}, "prompt", "must have integers as token ids, got 2.0"),
    ({"prompt": [1, "a"]}, "prompt", "must have integers"),
    ({"prompt": ["a", 1]}, "prompt", "must be a string, a list"),
    ({"prompt": [[1], "a"]}, "prompt", "must be a string, a list"),
    ({"prompt": [-1]}, "prompt", "token ids from 0"),
    ({"prompt": [2**31]}, "prompt", "token ids from 0"),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", f"at most {MAX_PROMPTS} prompts"),
    ({"prompt": ["a"] * 9, "n": 128}, "n", f"must be at most {MAX_CHOICES}, got 128 x 9"),
    ({"logprobs": True}, "logprobs", "must be an integer, got true"),
    ({"logprobs": 21}, "logprobs", "must be at most 20"),
    ({"echo": 1}, "echo", "must be true or false, got 1"),
    ({"suffix": "x"}, "suffix", "is not supported yet"),
    ({"best_of": 2}, "best_of", "is not supported yet"),
    ({"messages": []}, "messages", "Unrecognized"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_COMPLETION, ids=[str(bad[0])[:50] for bad in BAD_COMPLETION])
def test_bad_completion(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


def user(content: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": content}]}


BAD_CHAT = [
    ({"echo": True}, "echo", "Unrecognized request argument"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": None}, "messages", "must be a list, got null"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of 'system', 'developer'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    ({"messages": [USER, {**USER, "contents": "x"}]}, "messages[1].contents", "Unrecognized request argument"),
    ({"messages": [USER, {**USER, "audio": {"id": "x"}}]}, "messages[1].audio", "is not supported yet"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function", ""),
    (user(None), "messages[1].content", "must be a string"),
    (user(5), "messages[1].content", "must be a string or a list of parts, got 5"),
    (user([5]), "messages[1].content", "part 0 is 5"),
    (user([{"text": "x"}]), "messages[1].content", "objects with a 'type'"),
    (user([{"type": "image_url", "image_url": {}}]), "messages[1].content", 'a part of type "image_url" at 0'),
    (user([{"type": "text"}]), "messages[1].content", "part 0 differs"),
    (user([{"type": "text", "text": 1}]), "messages[1].content", "part 0 differs"),
    ({"logprobs": 5}, "logprobs", "must be true or false"),
    ({"top_logprobs": 5}, "top_logprobs", "only allowed when 'logprobs' is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20"),
    ({"tools": [{"type": "function"}]}, "tools", "is not supported yet"),
    ({"tool_choice": "required"}, "tool_choice", "is not supported yet"),
    ({"functions": [{}]}, "functions", "is not supported yet"),
    ({"modalities": ["audio"]}, "modalities", "is not supported yet"),
    ({"audio": {"voice": "x"}}, "audio", "is not supported yet"),
    ({"continue_final_message": True}, "continue_final_message", "is not supported yet"),
    ({"prompt": "x"}, "prompt", "Unrecognized"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_CHAT, ids=[str(bad[0])[:50] for bad in BAD_CHAT])
def test_bad_chat(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "line 1 column 0"),
        (b"{", None, "not valid JSON: EOF while parsing an object at line 1 column 1"),
        (b'{"model": "m",\n "prompt": }', None, "line 2 column 12"),
        (b"\xff\xfe", None, "not valid JSON"),
        (b'{"model": "m", "prompt": "\xff"}', None, "not valid JSON"),
        (b'{"model": "m", "prompt": "\\ud800"}', None, "not valid JSON"),
        (b'{"a":' * 10_000, None, "recursion limit"),
        (b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}", None, "number out of range"),
        (b"[]", None, "must be a JSON object, got a list"),
        (b'"x"', None, "must be a JSON object"),
        (b"null", None, "must be a JSON object, got null"),
        (b"{}", "model", "Missing required parameter: 'model'."),
        (b'{"model": "m"}', "prompt", "Missing required parameter: 'prompt'."),
        (b'{"model": "m", "prompt": "x", "temperature": 1e999}', "temperature", "must be a finite number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_body(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(body)
    assert caught.value.param == param
    assert words in caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from([*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "other"])


@given(st.dictionaries(field_names, json_values, max_size=4), st.sampled_from([completion, chat]))
def test_anything_is_a_request_or_a_request_error(fields: dict[str, Any], parse: Any) -> None:
    try:
        spec = parse(**fields)
    except RequestError as error:
        assert error.status == 400
        assert len(error.message) < 500
    else:
        assert isinstance(spec, GenerationSpec)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_chat(body)
