"""Calls in answers, in each format: whole, one character at a time, and cut anywhere."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raydix.engine.core.ingress.parsers import HERMES, LLAMA3, MISTRAL, PYTHONIC, TOOL_FORMATS, ToolFormat
from raydix.engine.core.ingress.parsers.events import AnswerEvent, AnswerText, ArgumentsPart, CallBegins, CallEnds
from raydix.engine.core.ingress.parsers.json_call import MAX_NAME, is_json
from raydix.engine.core.ingress.parsers.python_literal import json_of

NAMES = ("clock", "weather")
Summary = list[Any]
"""An answer's texts as strings and its calls as pairs of name and arguments, in order; a call that is broken has its
text as a third element."""


def events_of(tools: ToolFormat, pieces: Iterable[str]) -> list[AnswerEvent]:
    parser = tools.parser(NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


def summary(events: Sequence[AnswerEvent]) -> Summary:
    found: Summary = []
    for event in events:
        match event:
            case AnswerText(text):
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallBegins(index, name):
                assert index == sum(isinstance(each, tuple) for each in found)
                found.append((name, ""))
            case ArgumentsPart(index, text):
                assert text and index == sum(isinstance(each, tuple) for each in found) - 1
                found[-1] = (found[-1][0], found[-1][1] + text)
            case CallEnds(_, broken):
                found[-1] = found[-1] if broken is None else (*found[-1], broken)
    return found


CLOCK = ("clock", '{"zone": "UTC"}')
CASES: list[tuple[ToolFormat, str, Summary]] = [
    # Tags around JSON objects.
    (HERMES, "", []),
    (HERMES, " Hello,\n world. \n", [" Hello,\n world. \n"]),
    (HERMES, '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>', [CLOCK]),
    (HERMES, 'Wait.\n\n<tool_call>{"name":"clock","arguments":{}}</tool_call>\n', ["Wait.", ("clock", "{}")]),
    (
        HERMES,
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"arguments": {"x": [1, {"y": "}"}]}, '
        '"name": "b"}\n</tool_call>\nDone. ',
        [("a", "{}"), ("b", '{"x": [1, {"y": "}"}]}'), "Done. "],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": -1.5e3, "b": null}}', [("f", '{"a": -1.5e3, "b": null}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": null }</tool_call>', [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>x', [("f", "{}"), "x"]),
    (HERMES, '<tool_call>{"name": "f", "n": 1, "parameters": {"\\u00e9": ""}}', [("f", '{"\\u00e9": ""}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call', [("f", "{}"), "</tool_call"]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} and more', [("f", "{}"), "and more"]),
    (HERMES, "a <tool_call>clock()</tool_call> b", ["a <tool_call>clock()</tool_call> b"]),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', ['<tool_call>{"name": "f", "arguments": [1]}']),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    (HERMES, '<tool_call>{"arguments": {}}', ['<tool_call>{"arguments": {}}']),
    (HERMES, '<tool_call>{"name": "f", "name": "g"}', ['<tool_call>{"name": "f", "name": "g"}']),
    (HERMES, '<tool_call>{"name": "f", "x": 1, "name": "f"}', ['<tool_call>{"name": "f", "x": 1, "name": "f"}']),
    (HERMES, f'<tool_call>{{"name": "{"f" * MAX_NAME}"}}</tool_call>', [("f" * MAX_NAME, "{}")]),
    (HERMES, f'<tool_call>{{"name": "{"f" * 257}"}}', [f'<tool_call>{{"name": "{"f" * 257}"}}']),
    (HERMES, '<tool_call>{"name": ""}', ['<tool_call>{"name": ""}']),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}', ['<tool_call>{"name": "\\ud800", "arguments": {}}']),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{"}', ['<tool_call>{"name": "f", "arguments": "{"}']),
    (HERMES, '<tool_call>{"name": "f" "arguments"}', ['<tool_call>{"name": "f" "arguments"}']),
    (HERMES, '<tool_call>{"name": "f", "x": 01}', ['<tool_call>{"name": "f", "x": 01}']),
    (HERMES, '<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
    (HERMES, "less <tool_ca", ["less <tool_ca"]),
    (HERMES, '<tool_call><tool_call>{"name": "f"}', ["<tool_call>", ("f", "{}")]),
    (
        HERMES,
        'Hm. <tool_call>{"name": "f", "arguments": {"a": oops}} end',
        ["Hm.", ("f", '{"a": ', ' <tool_call>{"name": "f", "arguments": {"a": '), "oops}} end"],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        [("f", '{"a": 1', '<tool_call>{"name": "f", "arguments": {"a": 1')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}',
        [("f", "{}", '<tool_call>{"name": "f", "arguments": {}, "arguments": '), "{}}"],
    ),
    # Bare JSON objects.
    (LLAMA3, '{"name": "clock", "parameters": {"zone": "UTC"}}', [CLOCK]),
    (LLAMA3, '<|python_tag|>{"name": "clock", "parameters": {"zone": "UTC"}}', [CLOCK]),
    (LLAMA3, '\n{"name": "clock", "parameters": {}}; {"name": "weather"};', [("clock", "{}"), ("weather", "{}")]),
    (LLAMA3, '{"name": "clock"}\nThat is all.', [("clock", "{}"), "That is all."]),
    (LLAMA3, '{"name": "Ann", "parameters": {}}', ['{"name": "Ann", "parameters": {}}']),
    (LLAMA3, '{"name": "clock"}; and', [("clock", "{}"), "; and"]),
    (LLAMA3, ' {"a": 1} {"name": "clock"}', [' {"a": 1} {"name": "clock"}']),
    (LLAMA3, 'So: {"name": "clock"}', ['So: {"name": "clock"}']),
    (LLAMA3, "<|python_tag|>import os", ["<|python_tag|>import os"]),
    (LLAMA3, "<|python{", ["<|python{"]),
    (LLAMA3, ' {"name": "cl', [' {"name": "cl']),
    (LLAMA3, " <|py", [" <|py"]),
    (LLAMA3, '{"name": "clock", "parameters": {!', [("clock", "{", '{"name": "clock", "parameters": {'), "!"]),
    # A marker before a list, or before name and arguments.
    (MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "UTC"}}]', [CLOCK]),
    (
        MISTRAL,
        'Yes. [TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}, "id": "x"} ] And',
        ["Yes.", ("a", "{}"), ("b", "{}"), "And"],
    ),
    (MISTRAL, '[TOOL_CALLS]clock[ARGS]{"zone": "UTC"}', [CLOCK]),
    (MISTRAL, '[TOOL_CALLS]clock{"zone": "UTC"}[TOOL_CALLS] weather [CALL_ID]9[ARGS] {}', [CLOCK, ("weather", "{}")]),
    (MISTRAL, '[TOOL_CALLS]{"name": "clock", "arguments": {"zone": "UTC"}}', [CLOCK]),
    (MISTRAL, "Use [TOOL_CALLS] so", ["Use [TOOL_CALLS] so"]),
    (MISTRAL, "[TOOL_CALLS]two words{}", ["[TOOL_CALLS]two words{}"]),
    (MISTRAL, "[TOOL_CALLS]clock\n{}", ["[TOOL_CALLS]clock\n{}"]),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 600, ["[TOOL_CALLS]" + "x" * 600]),
    (MISTRAL, "[TOOL_CALLS][1]", ["[TOOL_CALLS][1]"]),
    (MISTRAL, '[TOOL_CALLS][{"name": "a"},]', [("a", "{}"), ",]"]),
    (MISTRAL, "[TOOL_CALLS][TOOL_CALLS]clock{}", ["[TOOL_CALLS][TOOL_CALLS]clock{}"]),
    (MISTRAL, '[TOOL_CALLS]clock{"a"!', [("clock", '{"a"', '[TOOL_CALLS]clock{"a"'), "!"]),
    (MISTRAL, '[TOOL_CALLS]clock{"a"', [("clock", '{"a"', '[TOOL_CALLS]clock{"a"')]),
    (MISTRAL, "[TOOL_CALLS][", ["[TOOL_CALLS]["]),
    # Python.
    (PYTHONIC, '[clock(zone="UTC")]', [CLOCK]),
    (PYTHONIC, "<|python_start|>[clock(zone='UTC')]<|python_end|>", [CLOCK]),
    (PYTHONIC, '\n[clock( ), weather(place="a\\"),]", days = -3, "x"=1)] ', [
        ("clock", "{}"),
        ("weather", '{"place": "a\\"),]", "days": -3', ', weather(place="a\\"),]", days = -3, "x"'),
        "=1)] ",
    ]),
    (PYTHONIC, "[weather(a=[1, {'b': (None)}])]", [("weather", "{", "[weather(a=[1, {'b': (None)}]"), ")]"]),
    (PYTHONIC, "[weather(a=[1, {'b': None,}], c=True,)]", [("weather", '{"a": [1, {"b": null}], "c": true}')]),
    (PYTHONIC, "[clock()] so", [("clock", "{}"), "so"]),
    (PYTHONIC, "[clock(), clock()", [("clock", "{}"), ("clock", "{}")]),
    (PYTHONIC, "[clock(); clock()]", [("clock", "{}"), "; clock()]"]),
    (PYTHONIC, "[clock(zone=", [("clock", "{", "[clock(zone=")]),
    (PYTHONIC, "[clock(])", [("clock", "{", "[clock(])")]),
    (PYTHONIC, "[clock(a=])", [("clock", "{", "[clock(a="), "])"]),
    (PYTHONIC, "[rm()]", ["[rm()]"]),
    (PYTHONIC, "[1, 2]", ["[1, 2]"]),
    (PYTHONIC, "clock()", ["clock()"]),
    (PYTHONIC, " <|python", [" <|python"]),
    (PYTHONIC, "<|python_end|>[clock()]", ["<|python_end|>[clock()]"]),
    (PYTHONIC, "[clock()]<|py", [("clock", "{}"), "<|py"]),
    (PYTHONIC, " \n", [" \n"]),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "expected"), CASES, ids=[f"{case[0].name}-{case[1]}"[:60] for case in CASES])
def test_calls_whole_and_with_every_cut(tools: ToolFormat, text: str, expected: Summary) -> None:
    assert summary(events_of(tools, [text])) == expected
    assert summary(events_of(tools, text)) == expected, "one character at a time"
    for cut in range(len(text)):
        assert summary(events_of(tools, [text[:cut], "", text[cut:]])) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[clock(", "clock", "weather", "(",
    ")", "[", "]", "{", "}", '{"name": "clock", "arguments": {', '"name"', '"arguments"', ":", ",", ";", '"', "'", "\\",
    " ", "\n", "zone=", "1", "-", "true", "é", '{"zone": "UTC"}', '[clock(zone="UTC")]', "<|python_start|>", "u00e9",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=16)


@given(texts, st.sampled_from([each for each in TOOL_FORMATS.values() if not each.has_channels]), st.data())
@example(['{"name": "clock", "arguments": {', '"', "\\", "u00e9", '"'], HERMES, None)
def test_the_events_do_not_depend_on_the_pieces(fragments: list[str], tools: ToolFormat, data: Any) -> None:
    text = "".join(fragments)
    expected = summary(events_of(tools, [text]))
    assert summary(events_of(tools, text)) == expected
    assert summary(events_of(tools, fragments)) == expected
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert summary(events_of(tools, pieces)) == expected


@given(texts, st.sampled_from([each for each in TOOL_FORMATS.values() if not each.has_channels]))
def test_nothing_is_lost_and_whole_calls_have_json(fragments: list[str], tools: ToolFormat) -> None:
    text = "".join(fragments)
    found = summary(events_of(tools, [text]))
    for call in found:
        if isinstance(call, tuple) and len(call) == 2:
            assert isinstance(json.loads(call[1]), dict)
    if all(isinstance(each, str) or len(each) == 3 for each in found):
        assert "".join(each if isinstance(each, str) else each[2] for each in found) == text, "there is no whole call"


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
))  # fmt: skip
def test_literals_of_python_as_json(value: Any) -> None:
    text = json_of(repr(value))
    assert text is not None and json.loads(text) == value


@pytest.mark.parametrize("literal", ["", "1, 2", "x", "(1, 2)", "b'a'", "{1, 2}", "{1: 2}", "'\\ud800'", "1+2j", "[,]"])
def test_what_json_cannot_say(literal: str) -> None:
    assert json_of(literal) is None


@pytest.mark.parametrize(
    ("literal", "expected"), [("'\\x41\\U0001f30a\\q'", "A🌊\\q"), ("'\\U11111111'", "\\U11111111")]
)
def test_escapes_of_python(literal: str, expected: str) -> None:
    text = json_of(literal)
    assert text is not None and json.loads(text) == expected


@given(st.text(st.sampled_from('{}[]",:\\ 1-.e+0truefalsn\nu'), max_size=12))
def test_the_end_of_a_json_value(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        assert not is_json(text)
    else:
        assert is_json(text) == isinstance(value, str | dict | list)


def test_values_have_a_largest_depth_and_numbers_a_longest() -> None:
    assert is_json("[" * 200 + "]" * 200) and not is_json("[" * 201 + "]" * 201)
    assert not is_json("[" + "1" * 401 + "]")


@pytest.mark.parametrize("text", ['"\\u00g0"', '"\\x"', '"\n"', '{"a" 1}', "[1 2]"])
def test_texts_that_are_no_json(text: str) -> None:
    assert not is_json(text)
