"""HTTP bodies: what they become, and the sentence for every kind of bad one."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.api import routes, validation
from raydix.engine.api.normal_form import MAX_CHOICES
from raydix.engine.api.prompts import MAX_PROMPTS
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from raydix.engine.api.spec import (
    DEFAULT_SAMPLING,
    ContinuedAnswer,
    FormSpec,
    GenerationSpec,
    RetentionSpec,
    ServiceSpec,
)
from raydix.engine.api.validation import BodyRules
from raydix.engine.core.answers.prompt_form import ChatEnd, ChatTemplate
from raydix.engine.core.errors import RequestError
from raydix.engine.core.objectives import Objectives, WhenLate

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
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        request_id="r",
        user="u",
        session_id="s",
        cache_salt="salt",
        priority=-4,
        slo_ttft_ms=1500,
        slo_tpot_ms=0.5,
        slo_when_late="give_way",
        cache_priority=-3,
        cache_ttl_s=90,
    )
    assert spec == GenerationSpec(
        kind="chat",
        model="m",
        messages=(USER,),
        n=2,
        sampling=replace(
            DEFAULT_SAMPLING,
            temperature=0.0,
            top_p=0.5,
            top_k=40,
            min_p=0.1,
            presence_penalty=1.0,
            frequency_penalty=-1.5,
            repetition_penalty=1.2,
            logit_bias=((3, 1.5), (7, -100.0)),
            min_tokens=2,
            stop_token_ids=(5, 6),
            logprobs=4,
        ),
        max_tokens=7,
        seed=-5,
        stop=("a", "b"),
        ignore_eos=True,
        form=FormSpec(
            include_stop=True,
            stream=True,
            include_usage=True,
            continuous_usage=True,
            return_token_ids=True,
            tokens_as_ids=True,
        ),
        service=ServiceSpec(
            request_id="r",
            user="u",
            session_id="s",
            priority=-4,
            objectives=Objectives(ttft_s=1.5, tpot_s=0.0005, when_late=WhenLate.GIVE_WAY),
        ),
        retention=RetentionSpec(salt="salt", priority=-3, ttl_s=90.0),
    )


def test_exclusions_and_lists_of_tokens_arrive() -> None:
    spec = completion(
        allowed_token_ids=[7, 3, 7],
        bad_words=["a", "b c", "a"],
        logprobs=1,
        logprob_token_ids=[9, 4, 9],
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        suffix="end",
    )
    assert (spec.sampling.allowed_token_ids, spec.sampling.logprob_token_ids) == ((3, 7), (9, 4))
    assert (spec.bad_words, spec.suffix) == (("a", "b c"), "end")
    assert not (spec.form.skip_special_tokens or spec.form.spaces_between_special_tokens)
    assert completion(suffix="") == completion(bad_words=[]) == completion()
    every = completion(logprobs=-1)
    assert every.all_logprobs and every.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=-1).all_logprobs and not chat(logprobs=True).all_logprobs


def test_best_of_so_many_samples() -> None:
    spec = completion(n=2, best_of=5, prompt=["a", "b"])
    assert (spec.n, spec.num_samples, spec.num_choices) == (2, 5, 10)
    assert completion(n=3, best_of=3, stream=True).num_choices == 3


def test_reasoning_in_messages_reaches_the_template() -> None:
    def reasoning(**fields: Any) -> object:
        return chat(messages=[{"role": "assistant", "content": "x", **fields}]).messages[0].get("reasoning_content")

    assert reasoning(reasoning_content="a") == reasoning(reasoning="a") == "a"
    assert reasoning(reasoning_content="a", reasoning="b") == "a"
    assert reasoning() is reasoning(reasoning_content=None) is reasoning(reasoning={"summary": []}) is None


def test_wishes_for_the_template_arrive() -> None:
    asked = chat(chat_template="{{ messages }}", chat_template_kwargs={"enable_thinking": False, "x": [1, {"y": None}]})
    assert asked.template == ChatTemplate("{{ messages }}", {"enable_thinking": False, "x": [1, {"y": None}]})
    assert chat(chat_template_kwargs={}) == chat()


def test_null_means_default() -> None:
    for request, parse in ((CompletionRequest, completion), (ChatCompletionRequest, chat)):
        optional = [name for name, field in request.model_fields.items() if not field.is_required()]
        assert parse(**dict.fromkeys(optional)) == replace(parse(), model=None)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, None), (0, None), (None, None), (1, 1)])
def test_top_k(top_k: int | None, expected: int | None) -> None:
    assert completion(top_k=top_k).sampling.top_k == expected


def test_logprobs() -> None:
    assert completion().sampling.logprobs is None
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(logprobs=5).sampling.logprobs == 5
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20


def test_stop_may_be_one_string() -> None:
    assert completion(stop="ab").stop == ("ab",)
    assert completion(stop=[]).stop == ()


def test_max_tokens_under_both_names() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3


def test_prompt_cache_key_stands_in_for_the_session() -> None:
    assert chat(prompt_cache_key="k").service.session_id == "k"
    assert chat(prompt_cache_key="k", session_id="s").service.session_id == "s"


def test_an_integer_may_have_a_point() -> None:
    plain: dict[str, Any] = {"max_tokens": 4, "n": 2, "seed": -5, "top_k": 7, "stop_token_ids": [3]}
    with_points = {name: [3.0] if name == "stop_token_ids" else float(value) for name, value in plain.items()}
    assert chat(**with_points) == chat(**plain)
    assert completion(**with_points, logprobs=1.0) == completion(**plain, logprobs=1)


def test_a_request_may_forgo_drafts() -> None:
    assert chat().sampling.speculation and chat(speculation=True).sampling.speculation
    assert not chat(speculation=False).sampling.speculation
    assert not completion(speculation=False).sampling.speculation


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x = 1\n", "x = 1\n"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ("", ""),
        ([], ""),
    ],
)
def test_a_prediction_is_a_text(content: Any, text: str) -> None:
    assert chat(prediction={"type": "content", "content": content}).prediction == text
    assert chat(prediction=None).prediction is None is chat().prediction
    assert chat(prediction={"type": "content", "content": "x"}, n=3, logprobs=True).prediction == "x"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("x", "prediction"),
        ([], "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": ["x"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
    ],
)
def test_a_prediction_of_another_form_is_refused_by_name(prediction: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(prediction=prediction)
    assert error.value.param == param and param in str(error.value)
    with pytest.raises(RequestError, match="prediction"):
        completion(prediction={"type": "content", "content": "x"})


def test_the_model_may_be_left_out() -> None:
    assert parse_completion(b'{"prompt": "hi"}') == GenerationSpec(kind="completion", prompts=("hi",))
    assert chat(model=None).model is None


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": None},
        {"service_tier": "auto"},
        {"verbosity": "medium"},
        {"continue_from_missing": "error"},
        {"parallel_tool_calls": False},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"skip_special_tokens": True},
        {"add_generation_prompt": True},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)
def test_harmless_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat(stream=fields.get("stream"))


def test_hints_without_effect_are_named() -> None:
    hints = {"metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "x", "verbosity": "low"}
    assert set(chat(**hints).ignored) == hints.keys()
    assert replace(chat(**hints), ignored=()) == chat()


def test_unknown_fields_are_refused_unless_the_server_takes_them() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "knob": 1, "tools": []}).encode()
    with pytest.raises(RequestError, match="Unrecognized request argument supplied: knob"):
        parse_chat(body)
    assert parse_chat(body, BodyRules(takes_unknown=True)).ignored == ("knob",)
    many = json.dumps({"messages": [{"role": "user", "content": "x"}], **dict.fromkeys(map(str, range(500)), 1)})
    with pytest.raises(RequestError, match="Unrecognized request argument supplied: 0"):
        parse_chat(many.encode(), BodyRules(takes_unknown=True))


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("embeddings", {"input": "x"}),
        ("generative_scoring", {"query": "x", "items": ["y"], "label_token_ids": [1, 2]}),
        ("score", {"query": "x", "items": ["y"], "label_token_ids": [1, 2]}),
    ],
)
def test_vectors_and_scores_name_fields_without_effect(route: str, fields: dict[str, Any]) -> None:
    body = json.dumps({**fields, "metadata": {"a": "b"}, "knob": 1}).encode()
    with pytest.raises(RequestError, match="knob"):
        routes.parse(route, body)
    assert routes.parse(route, body, BodyRules(takes_unknown=True)).ignored == ("metadata", "knob")


def test_the_end_of_a_chat_s_prompt() -> None:
    assert chat(continue_final_message=False, add_generation_prompt=True).chat_end is ChatEnd.ANSWER
    assert chat(add_generation_prompt=False).chat_end is ChatEnd.CLOSED
    assert chat(continue_final_message=True).chat_end is ChatEnd.OPEN
    assert chat(continue_final_message=True, add_generation_prompt=False).chat_end is ChatEnd.OPEN


def test_harmless_fields_of_completions() -> None:
    assert completion(n=2, best_of=2, echo=False, suffix="") == completion(n=2)
    assert completion(add_special_tokens=True) == completion()
    assert not completion(add_special_tokens=False).add_special_tokens


def test_prompts_are_echoed_and_scored() -> None:
    assert completion(echo=True, logprobs=2) == GenerationSpec(
        kind="completion",
        model="m",
        prompts=("hi",),
        form=FormSpec(echo=True),
        sampling=replace(DEFAULT_SAMPLING, logprobs=2),
    )
    assert completion(prompt_logprobs=0).sampling.prompt_logprobs == 0
    assert chat(prompt_logprobs=20).sampling.prompt_logprobs == 20
    assert chat(prompt_logprobs=-1).all_prompt_logprobs and not chat(prompt_logprobs=20).all_prompt_logprobs
    assert completion(echo=True, stream=True).form.stream, "only prompt_logprobs have no place in a stream"
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert chat(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_answers_that_are_named_by_their_ids() -> None:
    spec = chat(
        store=True,
        continue_from_missing="text",
        messages=[
            USER,
            {"role": "assistant", "content": "x", "id": "raydix-1"},
            {"role": "assistant", "content": None, "token_ids": []},
            {"role": "assistant", "token_ids": [3, 4]},
            USER,
        ],
    )
    assert spec.retention.store and spec.text_if_missing
    assert spec.continued == (
        ContinuedAnswer(1, "x", reference="raydix-1"),
        ContinuedAnswer(2, None, token_ids=()),
        ContinuedAnswer(3, None, token_ids=(3, 4)),
    )
    assert [each.param for each in spec.continued] == ["messages[1].id", *(f"messages[{i}].token_ids" for i in (2, 3))]
    assert spec.messages[3] == {"role": "assistant", "content": ""}
    assert not (chat().retention.store or chat().text_if_missing or chat().continued)


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


def test_unknown_keys_in_messages_are_ignored() -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c1", "type": "function", "function": function}
    spec = chat(
        messages=[
            {**USER, "id": "msg_1", "cache_control": {"type": "ephemeral"}},
            {
                "role": "assistant",
                "content": None,
                "id": "chatcmpl-1",
                "reasoning_content": "hm",
                "reasoning": "hm",
                "provider_specific_fields": {"refusal": None},
                "audio": None,
                "function_call": None,
                "annotations": [],
                "tool_calls": [{**call, "index": 0, "function": {**function, "extra": 1}}],
            },
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": None},
        ]
    )
    assert spec.messages == (
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
    )
    assert not spec.continued, "only this server's references name answers"


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
    ({"top_k": 1.5}, "top_k", "must be an integer"),
    ({"top_k": 1e300}, "top_k", "must be an integer"),
    ({"min_p": 1.5}, "min_p", "must be at most 1"),
    ({"seed": 2**63}, "seed", "must be less than 9223372036854775808"),
    ({"seed": 1.5}, "seed", "must be an integer"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
    ({"max_tokens": -1}, "max_tokens", "must be at least 0"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "must be at least -1, got -2"),
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
    ({"logit_bias": {"x": 1, "5": 1, "-1": 1}}, "logit_bias", 'must have token ids as keys, got "x" and "-1"'),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias", f'token ids as keys, got "{2**31}"'),
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
    ({"slo_ttft_ms": 0}, "slo_ttft_ms", "must be greater than 0, got 0"),
    ({"slo_tpot_ms": "quick"}, "slo_tpot_ms", "must be a number"),
    ({"slo_tpot_ms": 3_600_001}, "slo_tpot_ms", "must be at most 3600000"),
    ({"slo_when_late": "never"}, "slo_when_late", "'wait'"),
    ({"request_id": "two words"}, "request_id", ""),
    ({"add_special_tokens": 1}, "add_special_tokens", ""),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "must be at least 0"),
    ({"bad_words": "x"}, "bad_words", "must be a list of strings"),
    ({"bad_words": ["a", " "]}, "bad_words", "not all spaces"),
    ({"bad_words": ["x" * 1025]}, "bad_words", "1 to 1024 characters"),
    ({"bad_words": [f"w{i}" for i in range(129)]}, "bad_words", "at most 128 strings, got 129"),
    ({"logprob_token_ids": [0] * 129}, "logprob_token_ids", "at most 128 elements"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "must be true or false"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be at least 1, or -1, got 0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be at least -1"),
    ({"truncation_side": "middle"}, "truncation_side", "must be one of 'left' or 'right'"),
    ({"priority": 2**63}, "priority", "must be less than"),
    ({"priority": "high"}, "priority", "must be an integer"),
    ({"use_beam_search": True}, "use_beam_search", "is not supported yet"),
    ({"lora_path": "x"}, "lora_path", "is not supported yet"),
    ({"model": ""}, "model", "must not be empty"),
    ({"model": 1}, "model", "must be a string"),
    ({"guided_json": {}}, "guided_json", "is 'structured_outputs.json' today"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "leave it out"),
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
    ({"suffix": "x", "echo": True}, "suffix", "only allowed with a text as 'prompt', without 'echo'"),
    ({"suffix": "x", "prompt": [1]}, "suffix", "only allowed with a text"),
    ({"n": 3, "best_of": 2}, "best_of", "must be at least 'n' (3), got 2"),
    ({"best_of": 2, "stream": True}, "best_of", "is not supported in a stream"),
    ({"prompt": ["a"] * 9, "best_of": 128}, "best_of", f"must be at most {MAX_CHOICES}, got 128 x 9"),
    ({"logprobs": -1, "echo": True}, "logprobs", "not supported together with 'echo'"),
    ({"logprobs": -2}, "logprobs", "must be at least -1"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "only allowed with 'logprobs'"),
    ({"logprob_token_ids": [1], "logprobs": 1, "echo": True}, "logprob_token_ids", "not with 'echo'"),
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
    (
        {"messages": [{"role": "assistant", "token_ids": [1]}, USER], "truncate_prompt_tokens": 9},
        "truncate_prompt_tokens",
        "messages have 'id' or 'token_ids'",
    ),
    ({"chat_template": ""}, "chat_template", "must not be empty"),
    ({"chat_template": "x" * 65_537}, "chat_template", "must have at most 65536 characters"),
    ({"chat_template": 5}, "chat_template", "must be a string"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object, got a list"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", 'names of variables as keys, got "a b"'),
    ({"chat_template_kwargs": {f"x{i}": i for i in range(65)}}, "chat_template_kwargs", "at most 64 elements, got 65"),
    ({"chat_template_kwargs": {"x": "y" * 65_536}}, "chat_template_kwargs", "must have at most 65536 characters"),
    ({"echo": True, "max_tokens": 0}, "max_tokens", "must be at least 1, got 0"),
    ({"top_logprobs": -1}, "top_logprobs", "only allowed when 'logprobs' is true"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "only allowed with 'logprobs'"),
    ({"logprob_token_ids": [1], "logprobs": True, "top_logprobs": -1}, "logprob_token_ids", "not with all of them"),
    ({"skip_special_tokens": False, "store": True}, "skip_special_tokens", "must be true with 'store'"),
    ({"best_of": 2}, "best_of", "Unrecognized"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": None}, "messages", "must be a list, got null"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of 'system', 'developer'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    ({"messages": [{**USER, "refusal": "No."}]}, "messages[0].refusal", "is not supported yet"),
    ({"messages": [{**USER, "function_call": {}}]}, "messages[0].function_call", "is not supported yet"),
    ({"messages": [{**USER, "prefix": True}]}, "messages[0].prefix", "is not supported yet"),
    ({"messages": [{**USER, "tools": [{}]}]}, "messages[0].tools", "is not supported yet"),
    ({"messages": [USER, {**USER, "audio": {"id": "x"}}]}, "messages[1].audio", "is not supported yet"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function", ""),
    (user(None), "messages[1].content", "must be a string"),
    ({"store": "yes"}, "store", "must be true or false"),
    ({"continue_from_missing": "ids"}, "continue_from_missing", "must be one of 'error' or 'text'"),
    ({"messages": [{**USER, "id": "raydix-1"}]}, "messages[0].id", "in messages of the assistant only"),
    ({"messages": [{"role": "assistant", "token_ids": 5}]}, "messages[0].token_ids", "must be a list of token ids"),
    ({"messages": [{"role": "assistant", "token_ids": [-1]}]}, "messages[0].token_ids", "got -1"),
    (
        {"messages": [{"role": "assistant", "token_ids": [1], "id": "raydix-"}]},
        "messages[0].token_ids",
        "give one of them",
    ),
    ({"messages": [{"role": "assistant", "id": ""}]}, "messages[0].id", "must not be empty"),
    (user(5), "messages[1].content", "must be a string or a list of parts, got 5"),
    (user([5]), "messages[1].content", "part 0 is 5"),
    (user([{"text": "x"}]), "messages[1].content", "objects with a 'type'"),
    (user([{"type": "image_url", "image_url": {}}]), "messages[1].content", 'a part of type "image_url" at 0'),
    (user([{"type": "text"}]), "messages[1].content", "part 0 differs"),
    (user([{"type": "text", "text": 1}]), "messages[1].content", "part 0 differs"),
    ({"logprobs": 5}, "logprobs", "must be true or false"),
    ({"top_logprobs": 5}, "top_logprobs", "only allowed when 'logprobs' is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20"),
    ({"functions": [{}]}, "functions", "is not supported yet"),
    ({"modalities": ["audio"]}, "modalities", "is not supported yet"),
    ({"audio": {"voice": "x"}}, "audio", "is not supported yet"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "only allowed when"),
    ({"continue_final_message": True, "store": True}, "continue_final_message", "together with 'store'"),
    ({"add_generation_prompt": False, "store": True}, "add_generation_prompt", "together with 'store'"),
    (
        {"continue_final_message": True, "messages": [USER, {"role": "assistant", "token_ids": [1]}]},
        "continue_final_message",
        "the last message has",
    ),
    ({"continue_final_message": 1}, "continue_final_message", "must be true or false"),
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
        (b"{}", "prompt", "Missing required parameter: 'prompt'."),
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


def test_an_error_describes_only_the_values_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may have a million token ids outside the vocabulary."""
    described: list[object] = []

    def describe(value: object) -> str:
        described.append(value)
        return str(value)

    monkeypatch.setattr(validation, "describe", describe)
    most = validation.MAX_NAMED
    assert validation.name_all(range(1000)).endswith(f", {most - 1} and {1000 - most} more")
    assert len(described) == most
    assert validation.name_all([7, 8, 7]) == "7 and 8"
