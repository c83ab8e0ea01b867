"""Answers whose calls are prescribed: what the grammars take, and what the parsers make of it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import llguidance
import pytest

from raydix.engine.api.spec import GenerationSpec, ToolUse
from raydix.engine.api.tools import with_calls
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers import HERMES, LLAMA3, MISTRAL, PYTHONIC, TOOL_FORMATS, ToolFormat
from raydix.engine.core.ingress.parsers.forms import CallForm
from raydix.engine.core.ingress.parsers.harmony_forms import HarmonyForm
from raydix.engine.core.types import Grammar, GrammarKind
from tests.unit.test_tool_parsers import summary

ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "string"}},
    "required": ["zone"],
    "additionalProperties": False,
}
TEXT_FORMATS = {name: tools for name, tools in TOOL_FORMATS.items() if not tools.has_channels}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"clock": ZONE, "weather": {}}
CLOCK, WEATHER = ("clock", '{"zone": "UTC"}'), ("weather", '{"place": {"x": 1}}')


def written(tools: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as the grammar has them."""
    form = tools.form
    assert isinstance(form, CallForm)
    texts = [
        f'{form.begin}{{"name": "{name}", "{form.arguments_key}": {arguments}}}{form.end}' for name, arguments in calls
    ]
    return form.opening + form.separator.join(texts) + form.closing


def takes(grammar: Grammar, text: str) -> bool:
    """True if the whole text follows the grammar, byte by byte."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar.source))
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def parsed(tools: ToolFormat, text: str) -> list[Any]:
    parser = (tools.form_parser or tools.parser)(list(SCHEMAS))
    return summary([event for character in text for event in parser.push(character)] + list(parser.finish()))


@pytest.mark.parametrize("tools", TEXT_FORMATS.values(), ids=TEXT_FORMATS.keys())
def test_required_calls(tools: ToolFormat) -> None:
    grammar = tools.form.grammar(SCHEMAS, {}).required()
    for calls in ([CLOCK], [WEATHER, CLOCK]):
        assert takes(grammar, written(tools, *calls))
        assert parsed(tools, written(tools, *calls)) == calls
    for text in (
        "",
        "Hello",
        written(tools, ("rm", "{}")),
        written(tools, ("clock", "{}")),
        written(tools, CLOCK) + "!",
    ):
        assert not takes(grammar, text)
    single = tools.form.grammar(SCHEMAS, {}, is_single=True).required()
    assert takes(single, written(tools, CLOCK)) and not takes(single, written(tools, CLOCK, CLOCK))


@pytest.mark.parametrize("tools", TEXT_FORMATS.values(), ids=TEXT_FORMATS.keys())
def test_calls_among_text(tools: ToolFormat) -> None:
    grammar = tools.form.grammar(SCHEMAS, {}).among_text()
    for text in ("", "Hello, {you}.", written(tools, CLOCK), written(tools, CLOCK, WEATHER)):
        assert takes(grammar, text)
    assert not takes(grammar, written(tools, ("clock", '{"zone": 5}')))
    if tools.form.marker:
        assert takes(grammar, f"Well. {written(tools, CLOCK)} So.")
        assert parsed(tools, f"Well. {written(tools, CLOCK)} So.") == ["Well.", CLOCK, "So."]


@pytest.mark.parametrize("tools", TEXT_FORMATS.values(), ids=TEXT_FORMATS.keys())
def test_calls_or_json(tools: ToolFormat) -> None:
    grammar = tools.form.grammar(SCHEMAS, {}).or_json({"type": "object", "required": ["answer"]})
    assert takes(grammar, written(tools, CLOCK)) and takes(grammar, '{"answer": 1}')
    assert not takes(grammar, "Hello") and not takes(grammar, "{}")


def test_special_tokens_stand_by_their_ids() -> None:
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    for grammar in (
        MISTRAL.form.grammar(SCHEMAS, special).required(),
        MISTRAL.form.grammar(SCHEMAS, special).among_text(),
    ):
        assert '<[5]> " [" call' in grammar.source.replace("  ", " ")
        assert "TOOL_CALLS" not in grammar.source
    tags = {"<tool_call>": 7, "</tool_call>": 8}
    source = HERMES.form.grammar(SCHEMAS, tags).required().source
    assert 'calls: <[7]> "\\n" call ("\\n" <[7]> "\\n" call)*' in source
    assert 'call: (f0 | f1) "\\n" <[8]>' in source


TOOLS = ToolUse(tuple({"function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()))
NOTHING = GenerationSpec(kind="chat")
JSON = replace(
    NOTHING,
    sampling=replace(NOTHING.sampling, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    grammar_param="response_format",
)


def use(**fields: Any) -> ToolUse:
    return ToolUse(TOOLS.definitions, **fields)


def called(asked: GenerationSpec, tools: ToolUse, form: CallForm | HarmonyForm) -> tuple[Grammar | None, str | None]:
    """The form of the answer to a request with these tools, and the field that it comes from."""
    spec = with_calls(replace(asked, tools=tools), form, {})
    return spec.sampling.grammar, spec.grammar_param


def test_nothing_is_prescribed_unless_asked_for() -> None:
    assert with_calls(JSON, HERMES.form, {}) is JSON
    assert called(NOTHING, TOOLS, HERMES.form) == (None, None)
    assert called(JSON, use(may_call=False), HERMES.form) == (JSON.sampling.grammar, "response_format")
    assert called(NOTHING, use(may_call=False, strict=("clock",)), HERMES.form) == (None, None)


def test_prescribed_answers() -> None:
    grammar, param = called(NOTHING, use(required=("clock",)), HERMES.form)
    assert grammar is not None and param == "tools[0].function.parameters"
    assert takes(grammar, written(HERMES, CLOCK)) and not takes(grammar, written(HERMES, WEATHER))
    grammar, param = called(NOTHING, use(strict=("clock",)), LLAMA3.form)
    assert grammar is not None and param == "tools[0].function.parameters"
    assert takes(grammar, "Hello") and not takes(grammar, written(LLAMA3, ("clock", "{}")))
    assert takes(grammar, written(LLAMA3, ("weather", '{"any": 1}')))
    grammar, param = called(JSON, TOOLS, PYTHONIC.form)
    assert grammar is not None and param == "response_format"
    assert takes(grammar, '{"a": 1}') and not takes(grammar, "Hello")


def test_the_place_of_several_schemas_is_all_tools() -> None:
    several = ToolUse((*TOOLS.definitions, {"function": {"name": "f", "parameters": ZONE}}), required=("clock", "f"))
    assert called(NOTHING, several, HERMES.form)[1] == "tools"


def test_forms_that_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="'tool_choice' and 'response_format'") as caught:
        called(JSON, use(required=("clock",)), HERMES.form)
    assert caught.value.param == "response_format"
    sampling = replace(NOTHING.sampling, grammar=Grammar(GrammarKind.REGEX, "a+"))
    regex = replace(NOTHING, sampling=sampling, grammar_param="regex")
    with pytest.raises(RequestError, match="other than JSON") as caught:
        called(regex, TOOLS, HERMES.form)
    assert caught.value.param == "regex"


def test_arguments_are_written_as_templates_write_them() -> None:
    grammar = HERMES.form.grammar({"f": {"properties": {"a": {}, "b": {}}}}, {}).required()
    arguments = {"a": [1, {"x": "y"}], "b": None}
    assert takes(grammar, written(HERMES, ("f", json.dumps(arguments))))
    assert not takes(grammar, written(HERMES, ("f", json.dumps(arguments, indent=1))))
