"""Tools of a chat's body: what is taken, and what is refused by which name."""

import json
from typing import Any

import pytest

from raydix.engine.api.generate import GenerateRequest, as_generate_request
from raydix.engine.api.requests import parse_chat
from raydix.engine.api.spec import GenerationSpec, ToolUse
from raydix.engine.api.tools import MAX_TOOLS
from raydix.engine.core.errors import RequestError

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": SCHEMA}}
BARE = {"type": "function", "function": {"name": "now"}}
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> GenerationSpec:
    return parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode())


def test_tools_as_templates_know_them() -> None:
    empty = {"type": "object", "properties": {}}
    spec = chat(tools=[{**CLOCK, "cache_control": {}}, {**BARE, "function": {"name": "now", "strict": False}}])
    assert spec.tools == ToolUse((CLOCK, {"type": "function", "function": {"name": "now", "parameters": empty}}))
    assert spec.tools.schemas == {"clock": SCHEMA, "now": empty}
    of_handle = GenerateRequest.model_validate({"messages": MESSAGES, "tools": [CLOCK, BARE]}).spec()
    assert of_handle.tools == spec.tools


@pytest.mark.parametrize("fields", [{}, {"tools": None}, {"tools": []}, {"tools": [], "tool_choice": "none"}])
def test_no_tools(fields: dict[str, Any]) -> None:
    assert chat(**fields, parallel_tool_calls=False).tools is None


@pytest.mark.parametrize(
    ("fields", "may_call", "is_single"),
    [
        ({}, True, False),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, True, False),
        ({"tool_choice": "none"}, False, False),
        ({"parallel_tool_calls": False}, True, True),
    ],
    ids=str,
)
def test_choices(fields: dict[str, Any], may_call: bool, is_single: bool) -> None:
    for spec in (
        chat(tools=[CLOCK], **fields),
        as_generate_request({"messages": MESSAGES, "tools": [CLOCK], **fields}).spec(),
    ):
        assert spec.tools is not None
        assert (spec.tools.may_call, spec.tools.is_single) == (may_call, is_single)


@pytest.mark.parametrize(
    ("fields", "required", "is_single"),
    [
        ({"tool_choice": "required"}, ("clock", "now"), False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("clock", "now"), True),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ("now",), True),
        ({}, (), False),
    ],
    ids=str,
)
def test_required_calls(fields: dict[str, Any], required: tuple[str, ...], is_single: bool) -> None:
    tools = chat(tools=[CLOCK, BARE], **fields).tools
    assert tools is not None
    assert (tools.required, tools.is_single, tools.strict) == (required, is_single, ())


def test_strict_functions() -> None:
    closed = {**SCHEMA, "additionalProperties": False}
    tools = chat(
        tools=[BARE, {"type": "function", "function": {"name": "f", "parameters": closed, "strict": True}}]
    ).tools
    assert tools is not None and tools.strict == ("f",)


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [BARE, {"type": "function", "function": {"name": "f", **fields}}]}


NAMED = {"type": "function", "function": {"name": "other"}}
BAD = [
    ({"tools": 5}, "tools", "must be a list"),
    ({"tools": [5]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing required parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be one of 'function'"),
    ({"tools": [BARE] * (MAX_TOOLS + 1)}, "tools", f"at most {MAX_TOOLS} elements"),
    ({"tools": [BARE, BARE]}, "tools[1].function.name", "the name of another function"),
    (function(name=""), "tools[1].function.name", ""),
    (function(name="two words"), "tools[1].function.name", ""),
    (function(description=5), "tools[1].function.description", "must be a string"),
    (function(parameters=[]), "tools[1].function.parameters", "must be an object"),
    (function(parameters={"type": "string"}), "tools[1].function.parameters", "must be the schema of an object"),
    (function(strict=1), "tools[1].function.strict", "must be true or false"),
    (function(strict=True, parameters=SCHEMA), "tools[1].function.parameters", "additionalProperties"),
    (
        {"tool_choice": "required", **function(parameters={"type": "object", "x-guidance": {}})},
        "tools[1].function.parameters",
        "x-guidance",
    ),
    ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required', {'type': 'function', 'function': {"),
    ({"tool_choice": "any"}, "tool_choice", "{'type': 'custom', 'custom': {'name': a string}}"),
    ({"tool_choice": ["auto"]}, "tool_choice", "got a list"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice", "the name of a tool in 'custom.name'"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "got an object"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "the name of a function in 'function.name'"),
    ({"tool_choice": NAMED, "tools": [BARE]}, "tool_choice.function.name", "that 'tools' does not have"),
    ({"tool_choice": NAMED}, "tool_choice.function.name", "that 'tools' does not have"),
    ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=[f"{bad[1]}-{bad[2]}"[:60] for bad in BAD])
def test_bad_tools(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_the_handle_takes_tools_in_chats_only() -> None:
    with pytest.raises(RequestError) as caught:
        as_generate_request({"prompt": "x", "tools": [BARE]}).spec()
    assert caught.value.param == "tools"
    with pytest.raises(RequestError, match="must be JSON"):
        as_generate_request({"messages": MESSAGES, **function(parameters={"properties": {1: {2}}})})
