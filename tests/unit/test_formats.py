"""The fields that prescribe an answer's form, and the grammars that they come to."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from raydix.engine.api.anthropic.requests import parse_messages
from raydix.engine.api.generate import GenerateRequest, as_generate_request
from raydix.engine.api.grammars import MAX_GRAMMAR_CHARS
from raydix.engine.api.openai_responses.requests import parse_responses
from raydix.engine.api.requests import parse_chat, parse_completion
from raydix.engine.api.schemas import MAX_DEPTH, closed, strict_finding, subschemas
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import Grammar, GrammarKind

USER = {"role": "user", "content": "x"}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<call"],
    "structures": [{"begin": "<call f>", "schema": {"type": "object"}, "end": "</call>"}],
}


def chat(**fields: Any) -> GenerationSpec:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat(json.dumps(body).encode())


def grammar(**fields: Any) -> Grammar | None:
    return chat(**fields).sampling.grammar


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def schema_format(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema, **fields}}


CASES: list[tuple[dict[str, Any], GrammarKind, str, str]] = [
    (
        {"response_format": schema_format(POINT, strict=True)},
        GrammarKind.JSON_SCHEMA,
        compact(POINT),
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format"),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        GrammarKind.STRUCTURAL_TAG,
        compact(TAG),
        "response_format",
    ),
    ({"structured_outputs": {"json": POINT}}, GrammarKind.JSON_SCHEMA, compact(POINT), "structured_outputs.json"),
    (
        {"structured_outputs": {"json": json.dumps(POINT), "regex": None, "json_object": False}},
        GrammarKind.JSON_SCHEMA,
        compact(POINT),
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json_object": True}},
        GrammarKind.JSON_SCHEMA,
        '{"type":"object"}',
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["é", "b"]}}, GrammarKind.CHOICE, '["é", "b"]', "structured_outputs.choice"),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        GrammarKind.LARK,
        'start: "a"',
        "structured_outputs.grammar",
    ),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        GrammarKind.EBNF,
        'root ::= "a"',
        "structured_outputs.grammar",
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        GrammarKind.STRUCTURAL_TAG,
        compact(TAG),
        "structured_outputs.structural_tag",
    ),
    ({"json_schema": json.dumps(POINT)}, GrammarKind.JSON_SCHEMA, compact(POINT), "json_schema"),
    ({"regex": "[ab]"}, GrammarKind.REGEX, "[ab]", "regex"),
    ({"ebnf": '\n  root ::= "a"'}, GrammarKind.EBNF, '\n  root ::= "a"', "ebnf"),
    ({"ebnf": 'start: "::="'}, GrammarKind.LARK, 'start: "::="', "ebnf"),
    ({"structural_tag": json.dumps(TAG)}, GrammarKind.STRUCTURAL_TAG, compact(TAG), "structural_tag"),
]


@pytest.mark.parametrize(("fields", "kind", "source", "param"), CASES, ids=lambda value: str(value)[:60])
def test_each_field_comes_to_a_grammar(fields: dict[str, Any], kind: GrammarKind, source: str, param: str) -> None:
    spec = chat(**fields)
    assert (spec.sampling.grammar, spec.grammar_param) == (Grammar(kind, source), param)

    completion = parse_completion(json.dumps({"prompt": "x", **fields}).encode())
    handle = GenerateRequest(prompt="x", **fields).spec()
    given = as_generate_request({"prompt": "x", **fields}).spec()
    assert all(each.sampling.grammar == spec.sampling.grammar for each in (completion, handle, given))
    assert all(each.grammar_param == param for each in (completion, handle, given))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text", "json_schema": None}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_fallback": True}},
        {"regex": None, "ebnf": None, "json_schema": None, "structural_tag": None},
    ],
    ids=str,
)
def test_free_text(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling.grammar is None and chat(**fields).grammar_param is None


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "a", "ebnf": "b"}, "ebnf", "'regex' and 'ebnf' both"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "both"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "both"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of 'text'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA, "Missing required"),
    ({"response_format": schema_format(3)}, SCHEMA, "must be an object, got 3"),
    ({"response_format": schema_format({}, format="x")}, "response_format.json_schema.format", "Unrecognized"),
    ({"response_format": {"type": "text", **TAG}}, "response_format.structures", "only allowed where 'type' is"),
    ({"response_format": {"type": "text", "format": {}}}, "response_format.format", "only allowed where 'type' is"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format.type", "got null"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.triggers", "strings"),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
        "response_format.structures",
        "1 to 128 objects",
    ),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
    ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice", "at most 1000 elements"),
    ({"structured_outputs": {"choice": ["a" * MAX_GRAMMAR_CHARS]}}, "structured_outputs.choice", "at most 120000"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "must be a JSON object, got a list"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not valid JSON"),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "only allowed with 'json'",
    ),
    ({"json_schema": "[" * 50_000}, "json_schema", "is not valid JSON"),
    ({"json_schema": json.dumps(nested(MAX_DEPTH))}, "json_schema", "nested deeper than 64"),
    ({"json_schema": json.dumps({"items": {"x-guidance": {}}})}, "json_schema.items", "must not have 'x-guidance'"),
    ({"regex": ""}, "regex", "must not be empty"),
    ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex", "at most 120000 characters"),
    ({"structural_tag": json.dumps({**TAG, "triggers": [""]})}, "structural_tag.triggers", "not empty"),
    ({"structural_tag": json.dumps({**TAG, "triggers": ["x"]})}, "structural_tag.structures[0].begin", "begins with"),
    (
        {"structural_tag": json.dumps({"triggers": ["a"], "structures": [{"begin": "a", "end": 3}]})},
        "structural_tag.structures[0].end",
        "must be a string, got 3",
    ),
    (
        {"structural_tag": json.dumps({"triggers": ["a"], "structures": [{"begin": "a", "end": "", "schema": 1}]})},
        "structural_tag.structures[0].schema",
        "must be an object, got 1",
    ),
    ({"structural_tag": json.dumps({**TAG, "excludes": ["x"]})}, "structural_tag.excludes", "not supported yet"),
    ({"structural_tag": json.dumps({**TAG, "at_least_one": 1})}, "structural_tag.at_least_one", "true or false, got 1"),
    (
        {"structural_tag": json.dumps({"triggers": ["a"], "structures": [{"begin": "a", "end": "", "max": 1}]})},
        "structural_tag.structures[0].max",
        "not supported yet",
    ),
    ({"response_format": {"type": "text", "at_least_one": True}}, "response_format.at_least_one", "only allowed where"),
    ({"guided_regex": "a"}, "guided_regex", "is 'structured_outputs.regex' today"),
]


X_TAG: dict[str, Any] = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": POINT}, "end": "</f>"}
TYPED = {"type": "tag", **X_TAG}
FORMATS: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"type": "json_schema", "json_schema": POINT, "style": "json"}, GrammarKind.JSON_SCHEMA, compact(POINT)),
    ({"type": "const_string", "value": "é"}, GrammarKind.CHOICE, '["é"]'),
    ({"type": "regex", "pattern": "a+"}, GrammarKind.REGEX, "a+"),
    ({"type": "grammar", "grammar": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
    (TYPED, GrammarKind.STRUCTURAL_TAG, compact({"format": {**TYPED, "end": ["</f>"]}})),
    (
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [X_TAG], "at_least_one": True, "excludes": []},
        GrammarKind.STRUCTURAL_TAG,
        compact(
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [{**TYPED, "end": ["</f>"]}],
                    "at_least_one": True,
                }
            }
        ),
    ),
]


@pytest.mark.parametrize(("form", "kind", "source"), FORMATS, ids=lambda value: str(value)[:40])
def test_formats_of_structural_tags_come_to_grammars(form: dict[str, Any], kind: GrammarKind, source: str) -> None:
    tag = {"type": "structural_tag", "format": form}
    for fields in (
        {"response_format": tag},
        {"structural_tag": json.dumps(tag)},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        {"structured_outputs": {"structural_tag": tag}},
    ):
        assert grammar(**fields) == Grammar(kind, source)


def deep_sequence(depth: int) -> dict[str, Any]:
    part = deep_sequence(depth - 1) if depth else {"type": "const_string", "value": "a"}
    return {"type": "sequence", "elements": [part]}


BAD_FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "token", "token": 3}, ".type", 'is not supported here, got "token"'),
    ({"type": "any_text"}, ".type", "is not supported here"),
    ({"type": "regex", "pattern": ""}, ".pattern", "not empty"),
    ({"type": "regex", "pattern": "a", "flags": "i"}, ".flags", "not supported yet"),
    ({"type": "const_string", "value": 3}, ".value", "not empty"),
    ({"type": "const_string", "value": "a", "case": "any"}, ".case", "not supported yet"),
    ({"type": "regex", "pattern": "a" * (MAX_GRAMMAR_CHARS + 1)}, ".pattern", "at most 120000 characters"),
    ({"type": "json_schema", "json_schema": True}, ".json_schema", "must be an object"),
    ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, ".style", "not supported yet"),
    ({"type": "json_schema", "json_schema": {}, "any_order": True}, ".any_order", "not supported yet"),
    ({"type": "sequence", "elements": []}, ".elements", "1 to 128 objects"),
    ({"type": "sequence", "elements": [{"type": "regex", "pattern": "a"}]}, ".elements[0].type", "not supported here"),
    ({"type": "or", "elements": [3]}, ".elements[0].type", "not supported here"),
    (deep_sequence(20), ".elements[0]" * 17, "nested too deeply"),
    ({**TYPED, "begin": {"type": "token", "token": 1}}, ".begin", "must be a string"),
    ({**TYPED, "end": []}, ".end", "a string or a list of strings"),
    ({**TYPED, "content": {"type": "any_text"}, "end": ""}, ".end", "not be empty behind any text"),
    ({**TYPED, "content": {"type": "any_text", "max_tokens": 3}}, ".content.max_tokens", "not supported yet"),
    ({"type": "triggered_tags", "triggers": [""], "tags": [X_TAG]}, ".triggers", "not empty"),
    ({"type": "triggered_tags", "triggers": ["x"], "tags": [X_TAG]}, ".tags[0].begin", "one of the triggers"),
    ({"type": "triggered_tags", "triggers": ["<"], "tags": [X_TAG], "excludes": ["a"]}, ".excludes", "not supported"),
    ({"type": "tags_with_separator", "tags": [X_TAG]}, ".separator", "must be a string, got null"),
    (
        {"type": "tags_with_separator", "separator": "", "tags": [{"type": "const_string", "value": "a"}]},
        ".tags[0].type",
        "must be 'tag'",
    ),
]


@pytest.mark.parametrize("form", [3, "x", []], ids=str)
def test_a_format_is_an_object(form: object) -> None:
    with pytest.raises(RequestError, match=r"'response_format\.format' must be an object"):
        chat(response_format={"type": "structural_tag", "format": form})


@pytest.mark.parametrize(("form", "place", "words"), BAD_FORMATS, ids=lambda value: str(value)[:40])
def test_the_place_at_fault_in_a_format_is_named(form: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(response_format={"type": "structural_tag", "format": form})
    assert caught.value.param is not None and words in caught.value.message
    assert caught.value.param.removesuffix("...") in f"response_format.format{place}"


def test_a_format_stands_alone() -> None:
    for field, value in {"at_least_one": True, **TAG}.items():
        with pytest.raises(RequestError, match="is not allowed beside 'format'") as caught:
            chat(response_format={"type": "structural_tag", "format": TYPED, field: value})
        assert caught.value.param == f"response_format.{field}"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"at_least_one": False, "stop_after_first": None}, {}),
        ({"at_least_one": True}, {"at_least_one": True}),
        ({"stop_after_first": True, "at_least_one": False}, {"stop_after_first": True}),
    ],
    ids=str,
)
def test_options_of_structural_tags_arrive(asked: dict[str, Any], kept: dict[str, Any]) -> None:
    tag = {"type": "structural_tag", **TAG, **asked}
    for fields in ({"response_format": tag}, {"structural_tag": json.dumps(tag)}):
        assert grammar(**fields) == Grammar(GrammarKind.STRUCTURAL_TAG, compact({**TAG, **kept}))


@pytest.mark.parametrize(
    "parse",
    [
        lambda body: parse_chat(json.dumps({"messages": [USER], **body}).encode()),
        lambda body: parse_completion(json.dumps({"prompt": "x", **body}).encode()),
        lambda body: parse_responses(json.dumps({"input": "x", **body}).encode()),
        lambda body: parse_messages(json.dumps({"messages": [USER], "max_tokens": 5, **body}).encode()),
        lambda body: as_generate_request({"prompt": "x", **body}).spec(),
    ],
    ids=["chat", "completion", "responses", "messages", "handle"],
)
def test_former_names_lead_to_the_new_ones(parse: Callable[[dict[str, Any]], GenerationSpec]) -> None:
    for name in ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern"):
        with pytest.raises(RequestError, match=f"it is 'structured_outputs.{name}' today") as caught:
            parse({f"guided_{name}": True})
        assert caught.value.param == f"guided_{name}"
    with pytest.raises(RequestError, match="'guided_decoding_backend' is not supported any more; leave it out"):
        parse({"guided_decoding_backend": "outlines"})
    asked_for_nothing = {"guided_json": None, "guided_json_object": False, "guided_decoding_backend": None}
    assert parse(asked_for_nothing).sampling.grammar is None


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_the_place_at_fault_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param and words in caught.value.message


def test_values_of_python_that_are_no_json() -> None:
    schemas: list[dict[str, object]] = [{"const": value} for value in (float("nan"), {1: 2}, object(), "\ud800")]
    for schema in schemas:
        with pytest.raises(RequestError):
            as_generate_request({"prompt": "x", "structured_outputs": {"json": schema}}).spec()
    with pytest.raises(RequestError, match="valid Unicode"):
        as_generate_request({"prompt": "x", "regex": "\ud800"}).spec()


def test_options_of_white_space_go_into_the_schema() -> None:
    asked = grammar(structured_outputs={"json_object": True, "disable_any_whitespace": True})
    assert asked is not None and json.loads(asked.source)["x-guidance"] == {"whitespace_flexible": False}
    asked = grammar(structured_outputs={"json": {}, "whitespace_pattern": " ?"})
    assert asked is not None and json.loads(asked.source) == {"x-guidance": {"whitespace_pattern": " ?"}}


def test_properties_that_are_not_described_can_be_forbidden() -> None:
    schema = {"properties": {"a": {"type": "object"}}, "anyOf": [{"properties": {}}, True], "items": {"type": "string"}}
    shut = closed(schema)
    assert shut["additionalProperties"] is False
    assert shut["properties"]["a"] == {"type": "object", "additionalProperties": False}
    assert shut["anyOf"] == [{"properties": {}, "additionalProperties": False}, True]
    assert shut["items"] == {"type": "string"}
    assert closed({"type": "object", "additionalProperties": True})["additionalProperties"] is True
    asked = grammar(structured_outputs={"json": schema, "disable_additional_properties": True})
    assert asked is not None and json.loads(asked.source) == shut


def strict_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def deep(depth: int) -> dict[str, Any]:
    return strict_object(x=deep(depth - 1)) if depth else {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"type": "array", "items": POINT}, "", "'type': 'object'"),
        ({**POINT, "anyOf": [POINT]}, "", "'anyOf' at its root"),
        ({**POINT, "required": ["x"]}, "", "lacks 'y'"),
        (strict_object(a={"type": "object", "properties": {}}), ".properties.a", "'additionalProperties': false"),
        (strict_object(a={"allOf": []}), ".properties.a", "'allOf'"),
        (strict_object(a={"type": "array", "items": {"not": {}}}), ".properties.a.items", "'not'"),
        (strict_object(a={"anyOf": [{"type": ["object", "null"]}]}), ".properties.a.anyOf[0]", "additionalProperties"),
        (deep(12), ".properties.x" * 11, "nested deeper than 10"),
        (strict_object(a={"enum": [str(i) for i in range(1001)]}), "", "1000 'enum' values"),
        (strict_object(**{f"p{i}": {"type": "string"} for i in range(5001)}), "", "5000 properties"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_rules_of_strict(schema: dict[str, Any], place: str, words: str) -> None:
    finding = strict_finding(schema)
    assert finding is not None and finding[0] == place and words in finding[1]


def test_strict_schemas() -> None:
    assert strict_finding(POINT) is None and strict_finding(deep(10)) is None
    assert strict_finding(strict_object(a={"anyOf": [POINT, {"type": "null"}]}, b={"$ref": "#"})) is None
    with pytest.raises(RequestError) as caught:
        chat(response_format=schema_format(strict_object(a={"type": "object"}), strict=True))
    assert caught.value.param == f"{SCHEMA}.properties.a"
    assert grammar(response_format=schema_format(strict_object(a={"type": "object"}), strict=None)) is not None


def test_subschemas_are_told_from_values_of_their_names() -> None:
    schema = {"properties": {"properties": {"const": {"properties": {"a": {}}}}}, "anyOf": [{}, True]}
    assert [each.path for each in subschemas(schema)] == ["", ".properties.properties", ".anyOf[0]"]


def test_digests_name_grammars() -> None:
    one = Grammar(GrammarKind.REGEX, "a")
    assert one.digest == Grammar(GrammarKind.REGEX, "a").digest and len(one.digest) == 16
    assert len({one.digest, Grammar(GrammarKind.REGEX, "b").digest, Grammar(GrammarKind.LARK, "a").digest}) == 3
