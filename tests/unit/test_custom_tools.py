"""Custom tools: their inputs in calls, their grammars, and both APIs that have them."""

import json
import re
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from raydix.engine.api.custom_tools import regex_of_lark
from raydix.engine.api.openai_responses.requests import parse_responses
from raydix.engine.api.requests import parse_chat
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.tools import with_calls
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers import HERMES
from raydix.engine.core.ingress.parsers.custom import InputText, arguments_of
from raydix.engine.model.grammar_source import canonical, native_source
from raydix.engine.serving.grammar_check import check_grammar
from tests.unit.ingress import MODEL, Replica, Served, call
from tests.unit.served_app import app

PATCH = """\
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " filename LF added+ | "*** Delete File: " filename LF
filename: /(.+)/
added: "+" /(.*)/ LF -> line
%import common.LF
"""
GOOD = '*** Begin Patch\n*** Add File: a "b"\\c.txt\n+é\n+\n*** End Patch\n'
TOOL = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}


def input_of(pieces: Iterable[str]) -> str:
    text = InputText()
    return "".join([*map(text.push, pieces), text.finish()])


@given(st.text(st.sampled_from('ab"\\/\n\té🌊\x00'), max_size=8), st.booleans(), st.data())
def test_an_input_comes_out_however_the_arguments_are_cut(text: str, ascii_only: bool, data: Any) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=6)))
    pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    assert input_of(pieces) == input_of(arguments) == input_of([arguments_of(text)]) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a", "b": "c"}', "a"),
        ('{"b": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "\\ud800x"}', "?x"),
        ('{"input": "cut \\u00', "cut "),
        ("", ""),
    ],
)
def test_arguments_of_another_form(arguments: str, expected: str) -> None:
    assert input_of([arguments]) == input_of(arguments) == expected


def nested(number: int, inner: str, num_brackets: int = 85) -> str:
    return f"r{number}: {'(' * num_brackets}{inner}{')' * num_brackets}"


@pytest.mark.parametrize(
    ("lark", "texts", "others"),
    [
        (PATCH, [GOOD], [GOOD[1:], GOOD.replace("*** End", "** End"), "*** Begin Patch\n*** End Patch"]),
        ('start: A ("," A)*\nA: /[a-z]/ | "Z"i\n', ["a,z,Z", "b"], ["a,", "A", ""]),
        ('start: "a"~2..3 ["b"] ("c".."e")? // a comment\n', ["aa", "aaabd"], ["a", "aab b", "aaf"]),
        (
            "start: x\n  | y\n?x: INT\n!y.2: N\n%import common (INT, WS)\n%import common.CNAME -> N",
            ["12", "a_1"],
            ["1a"],
        ),
        ('start: "a.b" /c\\/d/i', ["a.bC/D"], ["axbc/d"]),
        ('start: X X\n%import common.LF -> X\n%import common.LF -> X', ["\n\n"], ["\n"]),
        (r'start: "\n\t\\\"" "\x41\u00e9\U0001f30a" "\ud83c\udf0a"', ['\n\t\\"Aé🌊🌊'], []),
        (r'start: "\d" "\""i', ['\\d"'], ["5", '\\D"']),
        (r'start: "\u0041".."\\"', ["A", "Z", "\\"], ["a", "u"]),
        ("\n".join([nested(i, f"r{i + 1}", 8) for i in range(10)] + ['r10: "a"', "start: r0"]), ["a"], [""]),
    ],
)  # fmt: skip
def test_grammars_without_recursion_as_regular_expressions(lark: str, texts: list[str], others: list[str]) -> None:
    found = regex_of_lark(lark, "p")
    assert all(re.fullmatch(found, text) for text in texts)
    assert not any(re.fullmatch(found, text) for text in others)


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ('start: "(" start ")" | "a"', "recursion"),
        ('start: x\nx: y\ny: x "a" |', "recursion"),
        ("start: x", "no rule 'x'"),
        ('a: "b"', "no rule 'start'"),
        ('start: "a"\nstart: "b"', "two rules 'start'"),
        ('start: "a"\n%ignore " "', "'%ignore'"),
        ('start: "a" X\n%import python.X', "imports"),
        ('start: "a" )', "at ')'"),
        ('start: ("a"', "the end of a rule"),
        ('start: "a"~3..2', "at"),
        (f'start: "a"~{"9" * 5000}..3', "at"),
        ('start: %json {"type": "string"}', "cannot be read as Lark at '{"),
        ("start: §", "at '§'"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "in each other"),
        ("\n".join([f"r{i}: r{i + 1} r{i + 1}" for i in range(40)] + ['r40: "a"', "start: r0"]), "characters"),
        ("\n".join([f"r{i}: r{i + 1}" for i in range(4000)] + ['r4000: "a"', "start: r0"]), "in each other"),
        ("\n".join([nested(i, f"r{i + 1}") for i in range(10)] + ['r10: "a"', "start: r0"]), "in each other"),
        ('start: "ab".."c"', "the range 'ab' to 'c'"),
        ('start: "a".."bc"', "the range 'a' to 'bc'"),
        ('start: ""..""', "the range '' to ''"),
        ('start: "b".."a"', "the range 'b' to 'a'"),
        ('start: x\nx: "a"\n%import common.LF -> x', "two rules 'x'"),
        ('start: x\n%import common.LF -> x\nx: "a"', "two rules 'x'"),
        ("start: x\n%import common.LF -> x\n%import common.CR -> x", "two rules 'x'"),
        (r'start: "\ud83c"', "at "),
        (r'start: "\U00110000"', "at "),
        (r'start: "\x4"', "at "),
        ("", "no rule"),
    ],
)
def test_grammars_that_are_refused_by_name(lark: str, words: str) -> None:
    tool = TOOL | {"format": {"type": "grammar", "syntax": "lark", "definition": lark}}
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        parse_responses(json.dumps({"input": "x", "tools": [{"type": "custom", "name": "a"}, tool]}).encode())
    assert caught.value.param == "tools[1].format.definition"


@pytest.mark.parametrize(
    "start",
    ["x " * 20_000, "| x" * 20_000, "(x x) " * 5_000, "x~2 " * 10_000],
    ids=["in a row", "alternatives", "brackets", "repeated"],
)
def test_a_grammar_is_refused_before_its_regular_expression_is_whole(start: str) -> None:
    lark = f'start: {start}\nx: "{"a" * 20_000}"'
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="characters"):
            regex_of_lark(lark, "p")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 << 20, "hundreds of megabytes whole"


def responses(**fields: Any) -> GenerationSpec:
    return parse_responses(json.dumps({"input": "x", "tools": [TOOL], **fields}).encode())


def chat(**fields: Any) -> GenerationSpec:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def takes(spec: GenerationSpec, text: str) -> bool:
    assert spec.tools is not None
    called = with_calls(spec, HERMES.form, {})
    grammar, param = called.sampling.grammar, called.grammar_param
    assert grammar is not None and param == f"tools[0].{spec.tools.input_field}"
    matcher = LLMatcher(LLTokenizer("byte"), native_source(canonical(grammar)))
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "apply_patch"}], ids=str)
def test_a_grammar_holds_while_sampling(choice: object) -> None:
    form = '<tool_call>\n{{"name": "apply_patch", "arguments": {}}}\n</tool_call>'
    spec = responses(tool_choice=choice)
    assert takes(spec, form.format(arguments_of(GOOD)))
    assert not takes(spec, form.format(arguments_of("a patch")))
    assert takes(spec, "No patch.") is (choice == "auto")


@pytest.mark.parametrize("definition", ["[a-z]+ [0-9]", "^[a-z]+ [0-9]$"])
def test_a_regular_expression_of_a_chat(definition: str) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}
    tools = [{"type": "custom", "custom": {"name": "note", "description": "Notes.", "format": form}}]
    spec = chat(tools=tools, tool_choice={"type": "custom", "custom": {"name": "note"}})
    call = '<tool_call>\n{"name": "note", "arguments": {"input": "%s"}}\n</tool_call>'
    assert takes(spec, call % "ab 1") and not takes(spec, call % "ab")
    assert spec.tools is not None and definition in json.dumps(spec.tools.definitions[0])


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].name"),
        (
            {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}},
            "tools[0].format.definition",
        ),
        ({"type": "custom", "name": "a", "format": {"type": "grammar", "definition": "a"}}, "tools[0].format.syntax"),
        ({"type": "custom", "name": "a", "format": {"type": "json"}}, "tools[0].format.type"),
    ],
)
def test_what_is_missing_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_responses(json.dumps({"input": "x", "tools": [tool]}).encode())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar"}, "grammar"),
        ({"type": "grammar", "grammar": None}, "grammar"),
        ({"type": "grammar", "grammar": {"syntax": "regex"}}, "grammar.definition"),
    ],
    ids=str,
)
def test_what_is_missing_in_a_chat_s_format_is_named(form: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(tools=[{"type": "custom", "custom": {"name": "a", "format": form}}])
    assert caught.value.param == f"tools[0].custom.format.{param}"
    assert caught.value.message == f"Missing required parameter: '{caught.value.param}'."


def test_a_chat_s_format_of_any_text_needs_no_grammar() -> None:
    for form in (None, {"type": "text"}, {"type": "text", "grammar": None}):
        spec = chat(tools=[{"type": "custom", "custom": {"name": "a", "format": form}}])
        assert spec.tools is not None and not spec.tools.strict


def test_a_chat_s_tool_without_its_object_is_refused() -> None:
    for kind in ("function", "custom"):
        with pytest.raises(RequestError) as caught:
            chat(tools=[{"type": kind}])
        assert caught.value.param == f"tools[0].{kind}"


def test_a_call_and_its_result_go_back_as_they_came() -> None:
    items = [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": GOOD},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    spec = responses(input=items)
    function = {"name": "apply_patch", "arguments": arguments_of(GOOD)}
    assert spec.messages[1]["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    assert spec.messages[2] == {"role": "tool", "content": "done", "tool_call_id": "c"}
    assert spec.turn is not None
    assert [json.loads(item)["type"] for item in spec.turn.items] == [item["type"] for item in items]

    called = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": GOOD}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [called]}]
    assert chat(messages=said).messages[1]["tool_calls"] == spec.messages[1]["tool_calls"]


PLAIN = GOOD.replace("é", "e")
ANSWER = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments_of(PLAIN)}}}\n</tool_call>'


def events_in(body: bytes) -> list[dict[str, Any]]:
    lines = body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_an_input_is_streamed(served: Served) -> None:
    here = Replica(max_model_len=40_000)
    here.dispatcher.answer = ANSWER
    body = {"model": MODEL, "input": "x", "tools": [TOOL], "stream": True}
    reply = served(here, lambda: call(app, "POST", "/v1/responses", json.dumps(body).encode()))
    assert reply.status == 200, reply.body
    events = events_in(reply.body)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done["input"] == PLAIN
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PLAIN)
    assert item["id"] == done["item_id"] and not any("function_call" in event["type"] for event in events)
    assert events[-1]["response"]["tools"][0]["format"]["syntax"] == "lark"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_s_input(served: Served, stream: bool) -> None:
    here = Replica(max_model_len=40_000)
    here.dispatcher.answer = ANSWER
    tools = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": stream}
    reply = served(here, lambda: call(app, "POST", "/v1/chat/completions", json.dumps(body).encode()))
    assert reply.status == 200, reply.body
    if not stream:
        [found] = reply.json["choices"][0]["message"]["tool_calls"]
        assert found["type"] == "custom" and found["custom"] == {"name": "apply_patch", "input": PLAIN}
        return
    deltas = [event["choices"][0]["delta"] for event in events_in(reply.body)]
    calls = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert calls[0]["type"] == "custom" and calls[0]["custom"] == {"name": "apply_patch", "input": ""}
    assert "".join(each["custom"]["input"] for each in calls) == PLAIN
    assert not any("function" in each for each in calls)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "grammar", "syntax": "regex", "definition": "(a"},
        {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"},
        {"type": "grammar", "syntax": "lark", "definition": "start: /(?<!a)b/"},
    ],
    ids=["brackets", "look-ahead", "look-behind"],
)
def test_a_grammar_that_cannot_be_compiled_is_named(form: dict[str, Any]) -> None:
    spec = responses(tools=[{"type": "custom", "name": "other"}, TOOL | {"format": form}])
    assert spec.tools is not None
    called = with_calls(spec, HERMES.form, {})
    grammar, param = called.sampling.grammar, called.grammar_param
    assert grammar is not None and param is not None
    with pytest.raises(RequestError) as caught:
        check_grammar(grammar, param)
    assert caught.value.param == "tools[1].format.definition"


@pytest.mark.parametrize("choice", ["any", {"type": "mcp"}, {"type": "custom"}, {"name": "apply_patch"}], ids=str)
def test_the_refusal_of_a_choice_names_both_kinds_of_tools(choice: object) -> None:
    with pytest.raises(RequestError, match="'function' or 'custom'") as caught:
        responses(tool_choice=choice)
    assert caught.value.param == "tool_choice"
