"""Tools, calls and their results as plain text, for chat templates that do not render them.

The functions stand in the system message, a call in the assistant's message, a result in a user's:

    <tools>
    {"type": "function", "function": {"name": "clock", "parameters": {...}}}
    </tools>

    <tool_call>
    {"name": "clock", "arguments": {"zone": "UTC"}}
    </tool_call>

    <tool_response>
    12:00
    </tool_response>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

INTRODUCTION = "You can call functions. Between <tools> and </tools> is the JSON signature of each, one a line:"
INSTRUCTION = (
    "To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, like "
    "this:\n<tool_call>\n"
    '{"name": "the function\'s name", "arguments": {"an argument\'s name": "its value"}}\n'
    "</tool_call>\nThe result then follows between <tool_response> and </tool_response>."
)


def as_text(messages: Messages, tools: Messages, *, takes_system: bool = True) -> list[dict[str, Any]]:
    """Write tools, calls and results into the contents of messages. Without `takes_system` the functions stand in the
    first message."""
    written: list[dict[str, Any]] = []
    results: dict[str, int] = {}
    """Places of the last message's calls, by id."""
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if message["role"] == "tool":
            written.append(_result(message))
            if following is None or following["role"] != "tool":
                _join_results(written, results)
        else:
            calls = message.get("tool_calls") or ()
            results = {call["id"]: place for place, call in enumerate(calls)}
            written.append(_with_calls(message, calls) if calls else dict(message))

    return _with_tools(written, tools, takes_system=takes_system) if tools else written


def call_text(name: str, arguments: str) -> str:
    """A call as a message has it."""
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


def _with_calls(message: Mapping[str, Any], calls: Messages) -> dict[str, Any]:
    texts = [call_text(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    content = [message["content"]] if message["content"] else []
    written = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**written, "content": "\n".join([*content, *texts])}


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _join_results(written: list[dict[str, Any]], places: Mapping[str, int]) -> None:
    """Replace the results at the end by one message, in the order of their calls."""
    last: list[dict[str, Any]] = []
    while written and written[-1]["role"] == "tool":
        last.insert(0, written.pop())
    last.sort(key=lambda message: places.get(message.get("tool_call_id", ""), len(places)))
    written.append({"role": "user", "content": "\n".join(message["content"] for message in last)})


def _with_tools(messages: Messages, tools: Messages, *, takes_system: bool) -> list[dict[str, Any]]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"{INTRODUCTION}\n<tools>\n{signatures}\n</tools>\n{INSTRUCTION}"
    first, *others = map(dict, messages)
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}" if first["content"] else text}, *others]
    if takes_system:
        return [{"role": "system", "content": text}, first, *others]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]
