"""Bodies of Anthropic's Messages API in normal form, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.anthropic.requests import parse_count, parse_messages
from raydix.engine.api.spec import GenerationSpec, PromptMark, ReasoningUse, ToolUse
from raydix.engine.api.tools import with_calls
from raydix.engine.api.validation import BodyRules
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.errors import (
    AuthenticationError,
    BodyTooLargeError,
    ModelFailedError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RaydixError,
    RequestError,
    ServiceError,
)
from raydix.engine.core.ingress.parsers import HERMES

USER = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {"type": "json_schema", "schema": {}}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "of another server"}
CALL = {"type": "tool_use", "id": "c", "name": "clock", "input": {"zone": "UTC"}}


def spec_of(**fields: Any) -> GenerationSpec:
    return parse_messages(json.dumps({"model": "m", "max_tokens": 5, "messages": [USER], **fields}).encode())


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def test_a_plain_chat() -> None:
    expected = GenerationSpec(kind="chat", api="messages", model="m", messages=(USER,), max_tokens=5, is_capped=True)
    assert spec_of() == expected
    assert spec_of(messages=[{"role": "user", "content": [text("hi", citations=None)]}]) == expected


def test_fields() -> None:
    spec = spec_of(
        stop_sequences=["x", "y", "x"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        metadata={"user_id": "u"},
        cache_salt="s",
        seed=3,
        max_tokens=0,
    )
    assert (spec.stop, spec.form.stream, spec.seed) == (("x", "y"), True, 3)
    assert (spec.service.user, spec.retention.salt) == ("u", "s")
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (0.5, 0.9, 7)
    assert spec.max_tokens == 0


def test_system_and_adjacent_messages_of_one_role() -> None:
    messages = [USER, {"role": "user", "content": [text("a"), text("b")]}, {"role": "assistant", "content": "c"}]
    spec = spec_of(system=[text("one"), text("two")], messages=messages)
    assert [(each["role"], each["content"]) for each in spec.messages] == [
        ("system", "one\ntwo"),
        ("user", "hi\na\nb"),
        ("assistant", "c"),
    ]
    assert spec.chat_end is ChatEnd.OPEN
    assert spec_of(system="one", messages=[*messages, USER]).chat_end is ChatEnd.ANSWER


def test_tools_calls_and_results() -> None:
    tool = {"name": "clock", "description": "tells", "input_schema": {"type": "object"}}
    mark = {"type": "ephemeral"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("12"), text("00")], "cache_control": mark}
    failed = {"type": "tool_result", "tool_use_id": "d", "content": "no", "is_error": True}
    messages = [USER, {"role": "assistant", "content": [text("so"), CALL, {**CALL, "id": "d"}]}]
    messages.append({"role": "user", "content": [result, failed, text("and?")]})
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    spec = spec_of(tools=[{**tool, "cache_control": mark}], messages=messages, system="s", tool_choice=choice)
    function = {"name": "clock", "arguments": '{"zone": "UTC"}'}
    assert spec.messages[1:] == (
        USER,
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": each, "type": "function", "function": function} for each in "cd"],
        },
        {"role": "tool", "content": "12\n00", "tool_call_id": "c"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "d"},
        {"role": "user", "content": "and?"},
    )
    definition = {"name": "clock", "description": "tells", "parameters": {"type": "object"}}
    assert spec.tools == ToolUse(
        ({"type": "function", "function": definition},), is_single=True, schema_field="input_schema"
    )
    assert spec.retention.marks == (PromptMark(1, 0, 300.0), PromptMark(3, 5, 300.0))
    no_call = spec_of(tools=[tool], tool_choice={"type": "none"}).tools
    assert no_call is not None and not no_call.may_call


@pytest.mark.parametrize(
    ("choice", "required", "is_single"),
    [
        ({"type": "any"}, ("f", "g"), False),
        ({"type": "any", "disable_parallel_tool_use": True}, ("f", "g"), True),
        ({"type": "tool", "name": "g"}, ("g",), True),
    ],
)
def test_calls_may_be_required(choice: dict[str, Any], required: tuple[str, ...], is_single: bool) -> None:
    tools = spec_of(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice).tools
    assert tools is not None and (tools.required, tools.is_single, tools.strict) == (required, is_single, ())
    schema = {**TOOL["input_schema"], "required": ["x"], "additionalProperties": False}
    strict = spec_of(tools=[{**TOOL, "input_schema": schema, "strict": True}])
    assert strict.tools is not None and strict.tools.strict == ("f",)
    assert with_calls(strict, HERMES.form, {}).grammar_param == "tools[0].input_schema"


def test_reasoning() -> None:
    messages = [USER, {"role": "assistant", "content": [THOUGHT, text("so")]}, USER]
    answer = {"role": "assistant", "content": "so", "reasoning_content": "Hm."}
    assert spec_of(messages=messages).messages == (USER, answer, USER)
    assert spec_of().reasoning == ReasoningUse()
    for thinking in ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}):
        asked = spec_of(thinking=thinking).reasoning
        assert asked.is_shown and asked.effort is None and asked.limit_param == "thinking.budget_tokens"
        assert asked.max_tokens == thinking.get("budget_tokens")
    off = spec_of(thinking={"type": "disabled"}).reasoning
    assert (off.effort, off.is_shown, off.param) == ("none", False, "thinking")


def test_a_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    spec = spec_of(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert spec.sampling.grammar is not None and json.loads(spec.sampling.grammar.source) == schema
    assert spec.grammar_param == "output_config.format.schema"


def test_an_empty_message() -> None:
    assert spec_of(messages=[{"role": "user", "content": []}]).messages == ({"role": "user", "content": ""},)


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {"tools": [], "tool_choice": {"type": "auto"}, "service_tier": "auto"}
    assert spec_of(**nothing, output_config={}, container=None, metadata={}) == spec_of()


def test_fields_without_effect_are_named() -> None:
    fields = {"speed": "fast", "inference_geo": "eu", "new_in_autumn": 1, "temprature": 1}
    spec = spec_of(**fields, thinking={"type": "adaptive", "display": "omitted", "mood": "good"})
    assert set(spec.ignored) == {*fields, "thinking.display", "thinking.mood"}
    assert replace(spec, ignored=()) == spec_of(thinking={"type": "adaptive"})


def test_an_effort_is_a_hint_for_the_template() -> None:
    asked = spec_of(output_config={"effort": "medium"}).reasoning
    assert (asked.effort, asked.param, asked.is_hint) == ("medium", "output_config.effort", True)
    off = spec_of(output_config={"effort": "medium"}, thinking={"type": "disabled"}).reasoning
    assert (off.effort, off.param, off.is_hint) == ("none", "thinking", False)


def test_tools_that_clients_run_are_functions_and_those_of_servers_are_left_out() -> None:
    kinds = ["bash_20250124", "text_editor_20250728", "memory_20250818", "web_search_20250305"]
    spec = spec_of(tools=[*({"type": kind, "name": kind[:4]} for kind in kinds), TOOL])
    assert spec.tools is not None
    assert list(spec.tools.schemas) == ["bash", "text", "memo", TOOL["name"]]
    assert set(spec.tools.schemas["bash"]["properties"]) == {"command", "restart"}  # type: ignore[call-overload]
    assert spec.ignored == ("tools.web_search_20250305",)
    assert spec_of(tools=[{"type": "web_search_20250305", "name": "web_search"}]).tools is None


def test_lines_that_change_with_each_request_are_left_out() -> None:
    rules = BodyRules(volatile_lines=("x-bill:",))
    mark = {"type": "ephemeral"}

    def system(*texts: dict[str, Any]) -> GenerationSpec:
        body = {"messages": [USER], "max_tokens": 3, "system": list(texts)}
        return parse_messages(json.dumps(body).encode(), rules)

    spec = system(text("x-bill: 1;", cache_control=mark), text("You help.", cache_control=mark))
    assert spec.messages[0] == {"role": "system", "content": "You help."}
    assert [mark.length for mark in spec.retention.marks] == [9]
    assert spec.ignored == ("system.x-bill:",)
    assert system(text("x-bill: 2\nYou help.\nx-bill is no line of its own")).messages[0]["content"] == (
        "You help.\nx-bill is no line of its own"
    )
    assert [message["role"] for message in system(text("x-bill: 3")).messages] == ["user"]


def test_marks() -> None:
    mark = {"type": "ephemeral"}
    messages = [{"role": "user", "content": [text("ab", cache_control=mark), text("c"), text("d", cache_control=mark)]}]
    system = [text("one", cache_control={**mark, "ttl": "1h"})]
    spec = spec_of(system=system, messages=messages, cache_control={**mark, "ttl": "5m"})
    assert spec.retention.marks == (
        PromptMark(0, 3, 3600.0),
        PromptMark(1, 2, 300.0),
        PromptMark(1, 6, 300.0),
        PromptMark(1, 6, 300.0),
    )
    assert not spec_of(cache_control=None).retention.marks
    with pytest.raises(RequestError, match="At most 4 blocks") as caught:
        spec_of(system=[*system, text("two", cache_control=mark)], messages=messages, cache_control=mark)
    assert caught.value.param == "cache_control"


def test_the_body_of_a_count() -> None:
    spec = parse_count(json.dumps({"model": "m", "messages": [USER], "system": "s"}).encode())
    assert (spec.api, spec.max_tokens, len(spec.messages)) == ("messages", 0, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [text("x")] * 8193}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"system": 3}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"user": "x"}, "user"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].input_schema"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}]},
            "tools[0].input_schema",
        ),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [CALL]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content"),
        ({"system": [CALL]}, "system"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [THOUGHT]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "messages[0].content"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "regex": "a"},
            "output_config.format.schema",
        ),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"system": [text("x", cache_control={"type": "x"})]}, "system[0].cache_control.type"),
        ({str(number): 1 for number in range(200)}, "0"),
    ],
    ids=str,
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec_of(**fields)
    assert caught.value.param == param and param in caught.value.message


def test_max_tokens_is_required() -> None:
    with pytest.raises(RequestError, match="Missing required parameter: 'max_tokens'"):
        parse_messages(json.dumps({"messages": [USER]}).encode())


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (AuthenticationError("x"), 401, "authentication_error"),
        (PermissionDeniedError("x"), 403, "permission_error"),
        (NotFoundError("x"), 404, "not_found_error"),
        (BodyTooLargeError("x"), 413, "request_too_large"),
        (OverloadedError("x"), 429, "rate_limit_error"),
        (ModelFailedError("x"), 500, "api_error"),
        (ServiceError("x"), 529, "overloaded_error"),
    ],
    ids=str,
)
def test_errors_in_their_form(error: RaydixError, status: int, kind: str) -> None:
    assert ANTHROPIC.status(error) == status
    expected = {"type": "error", "error": {"type": kind, "message": "x"}}
    assert json.loads(ANTHROPIC.error_body(error)) == expected
    name, data, *_ = ANTHROPIC.error_event(error).decode().split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == expected
