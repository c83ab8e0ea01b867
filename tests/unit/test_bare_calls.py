"""Calls without tags, and the values that a schema allows."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.ingress.parsers import HERMES, MISTRAL
from raydix.engine.core.ingress.parsers.bare import BareCalls
from raydix.engine.core.ingress.parsers.events import AnswerEvent
from raydix.engine.core.ingress.parsers.fits import MAX_STEPS, fits
from raydix.engine.core.ingress.parsers.hermes import HermesCalls
from tests.unit.test_tool_parsers import FRAGMENTS, Summary, summary

FUNCTIONS: dict[str, dict[str, Any]] = {
    "clock": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    "weather": {"type": "object", "properties": {"days": {"type": "integer"}}, "additionalProperties": False},
}
CALL = '{"name": "clock", "arguments": {"zone": "UTC"}}'
CLOCK = ("clock", '{"zone": "UTC"}')


def events_of(pieces: Iterable[str], tagged: Any = HermesCalls) -> list[AnswerEvent]:
    parser = BareCalls(tagged(FUNCTIONS), FUNCTIONS)
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, [CLOCK]),
        (f" \n{CALL}\n", [CLOCK]),
        (f"{CALL}\n{CALL}", [CLOCK, CLOCK]),
        (f"{CALL} That was it.", [CLOCK, "That was it."]),
        (f"{CALL}\n<tool_call>\n{CALL}\n</tool_call>", [CLOCK, CLOCK]),
        ('{"type": "function", "name": "weather", "parameters": {}}', [("weather", "{}")]),
        ('{"name": "clock", "arguments": "{\\"zone\\": \\"UTC\\"}"}', [CLOCK]),
        # Data, not calls.
        ("{}", ["{}"]),
        ('{"name": "clock"}', ['{"name": "clock"}']),
        ('{"name": "Ada", "arguments": {"zone": "UTC"}}', ['{"name": "Ada", "arguments": {"zone": "UTC"}}']),
        ('{"name": "clock", "arguments": {}}', ['{"name": "clock", "arguments": {}}']),
        ('{"name": "clock", "arguments": {"zone": 1}}', ['{"name": "clock", "arguments": {"zone": 1}}']),
        ('{"name": "weather", "arguments": {"x": 1}}', ['{"name": "weather", "arguments": {"x": 1}}']),
        ('{"name": "clock", "age": 3, "arguments"', ['{"name": "clock", "age": 3, "arguments"']),
        (CALL[:-1], [CALL[:-1]]),
        (f"Look: {CALL}", [f"Look: {CALL}"]),
        ("  Hello.  ", ["  Hello.  "]),
        (f"{CALL} {{1}} x ", [CLOCK, "{1} x "]),
    ],
)
def test_calls_without_tags(text: str, expected: Summary) -> None:
    assert summary(events_of([text])) == expected
    assert summary(events_of(text)) == expected, "one character at a time"


def test_other_json_is_not_held_back_beyond_its_first_key() -> None:
    parser = BareCalls(HermesCalls(FUNCTIONS), FUNCTIONS)
    assert summary(parser.push('{"city": "Rome", ')) == ['{"city": "Rome",']


@given(st.lists(st.sampled_from([*FRAGMENTS, CALL]), max_size=12), st.sampled_from([HERMES, MISTRAL]))
def test_the_events_do_not_depend_on_the_pieces(fragments: list[str], kind: Any) -> None:
    expected = summary(events_of(["".join(fragments)], kind.parser))
    assert summary(events_of("".join(fragments), kind.parser)) == expected
    assert summary(events_of(fragments, kind.parser)) == expected


POINT = {"$defs": {"point": {"required": ["x"], "properties": {"x": {"type": "number"}}}}, "$ref": "#/$defs/point"}


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("1", {}, True),
        ("1", {"type": "integer"}, True),
        ("1.0", {"type": "integer"}, True),
        ("1.5", {"type": "integer"}, False),
        ("true", {"type": ["number", "null"]}, False),
        ("null", {"type": ["number", "null"]}, True),
        ('"a"', {"enum": ["a", "b"]}, True),
        ("true", {"enum": [1]}, False),
        ("2", {"const": 1}, False),
        ("[1, 2]", {"items": {"type": "integer"}}, True),
        ('[1, "a"]', {"items": {"type": "integer"}}, False),
        ('{"x": 1}', POINT, True),
        ('{"x": "a"}', POINT, False),
        ("{}", POINT, False),
        ("{}", {"$ref": "elsewhere"}, True),
        ('{"a": 1}', {"additionalProperties": False}, False),
        ('{"a": 1}', {"additionalProperties": {"type": "string"}}, False),
        ("1", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, True),
        ("1", {"oneOf": [{"type": "string"}]}, False),
        ("1", {"allOf": [{"type": "integer"}, {"const": 2}]}, False),
        ("1", {"$ref": "#"}, True),
        ("1", {"type": "unheard of", "minimum": 5}, True),
        ("{}", {"required": [[], {}]}, True),
        ("{}", {"required": [[], "x"]}, False),
        ("[[true]]", {"const": [[1]]}, False),
        ('{"x": [1]}', {"enum": [{"x": [2]}, {"x": [1]}]}, True),
        ('{"x": 1}', {"const": {"y": 1}}, False),
        ("[1]", {"const": [1, 2]}, False),
    ],
)
def test_what_a_schema_allows(value: str, schema: dict[str, Any], expected: bool) -> None:
    assert fits(json.loads(value), schema) is expected


class Counted(dict[str, Any]):
    """A schema that counts the looks into it, and breaks the test at far more than the limit allows."""

    num_looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_looks += 1
        assert self.num_looks <= 10 * MAX_STEPS, "the check has no end"
        return super().get(key, default)


TWICE_ITSELF = {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}


@pytest.mark.parametrize(
    "schema",
    [
        TWICE_ITSELF,
        {"anyOf": [{"allOf": [{"$ref": "#"}, {"const": 1}]}] * 2},
        {"allOf": [{"$ref": "#"}] * 2, "additionalProperties": {"$ref": "#"}},
    ],
    ids=["allOf", "anyOf", "values"],
)
def test_a_schema_that_doubles_at_each_level_is_looked_at_in_bounded_steps(schema: dict[str, Any]) -> None:
    assert fits({"a": {"b": {}}}, Counted(schema))


def test_long_lists_in_a_schema_count_with_their_length() -> None:
    names = [f"{i}" for i in range(1000)]
    schema = Counted({**TWICE_ITSELF, "enum": names})
    assert fits("999", schema) and schema.num_looks < 1000
    schema = Counted({**TWICE_ITSELF, "const": names})
    assert fits(names, schema) and schema.num_looks < 1000


def test_an_answer_under_a_schema_with_no_end_is_a_call() -> None:
    functions = {"f": Counted(TWICE_ITSELF)}
    events = BareCalls(HermesCalls(functions), functions).push('{"name":"f","arguments":{}}')
    assert summary(events) == [("f", "{}")]
