"""Grammars that cannot be compiled are refused where they enter, and the place at fault is named."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers import HERMES
from raydix.engine.core.types import Grammar, GrammarKind
from raydix.engine.model.grammar_source import GrammarError, canonical, first_words, native_source, structural_tag_lark
from raydix.engine.serving.grammar_check import check_grammar, check_in_small_stack

TAG: dict[str, Any] = {
    "triggers": ["<call", "<call:"],
    "structures": [
        {"begin": "<call f>", "schema": {"type": "object"}, "end": "</call>"},
        {"begin": "<call:g", "schema": {"not": {}}, "end": ""},
    ],
}

VALID: list[tuple[GrammarKind, object]] = [
    (GrammarKind.JSON_SCHEMA, {"type": "object", "properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {}}}),
    (GrammarKind.JSON_SCHEMA, {"oneOf": [{"type": "string"}, {"type": "integer"}]}),
    (GrammarKind.JSON_SCHEMA, {"type": "object", "x-guidance": {"whitespace_flexible": False}}),
    (GrammarKind.REGEX, "[a-z]+/[0-9]"),
    (GrammarKind.LARK, 'start: "a" | "b"'),
    (GrammarKind.EBNF, 'root ::= "a" rest\nrest ::= [0-9]+'),
    (GrammarKind.CHOICE, ["yes", 'no "no"', "é 🌊\n", ""]),
    (GrammarKind.STRUCTURAL_TAG, {**TAG, "structures": TAG["structures"][:1]}),
]


def grammar(kind: GrammarKind, source: object) -> Grammar:
    return Grammar(kind, source if isinstance(source, str) else json.dumps(source))


@pytest.mark.parametrize("special", [{}, {"<tool_call>": 300, "</tool_call>": 301}])
def test_grammars_of_calls(special: dict[str, int]) -> None:
    form, schema = HERMES.form, {"properties": {"x": {"type": "string"}}}
    calls = form.grammar({"f": schema, "g": {}}, special)
    for valid in (calls.required(), calls.among_text(), calls.or_json({"type": "object"})):
        check_grammar(valid, "tools")
    with pytest.raises(RequestError, match="cannot be compiled") as caught:
        check_grammar(form.grammar({"f": {"properties": {"x": {"not": {}}}}}, special).required(), "tools")
    assert caught.value.param == "tools"


@pytest.mark.parametrize(("kind", "source"), VALID, ids=lambda value: str(value)[:50])
def test_valid_grammars(kind: GrammarKind, source: object) -> None:
    check_grammar(grammar(kind, source), "p")


def follows(kind: GrammarKind, source: object, text: str) -> bool:
    """True if the grammar allows a text, byte by byte."""
    tokenizer = LLTokenizer("byte")
    token_ids = tokenizer.tokenize_str(text)
    matcher = LLMatcher(tokenizer, native_source(canonical(grammar(kind, source))))
    return bool(matcher.validate_tokens(token_ids) == len(token_ids))


def is_whole(kind: GrammarKind, source: object, text: str) -> bool:
    """True if the grammar allows an answer to be this text."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, native_source(canonical(grammar(kind, source))))
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def test_white_space_of_json_is_bounded_unless_the_request_says_otherwise() -> None:
    """A small model that prefers line breaks would write nothing else."""
    schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"], "type": "object"}
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}]}
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    for number, is_allowed in ((0, True), (1, True), (64, True), (65, False)):
        text = '{"x":' + "\n" * number + "1}"
        assert follows(GrammarKind.JSON_SCHEMA, schema, text) == is_allowed
        assert follows(GrammarKind.STRUCTURAL_TAG, tag, f"so: <f>{text}</f>") == is_allowed
        assert follows(GrammarKind.JSON_SCHEMA, compact, text) == (number == 0)


DEEP = {
    "type": "object",
    "properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}}},
}
REFUSED: list[tuple[GrammarKind, object, str, str]] = [
    (GrammarKind.JSON_SCHEMA, {"properties": {"x": {"not": {}}}}, "p.properties.x", "not"),
    (GrammarKind.JSON_SCHEMA, DEEP, "p.properties.a.items.anyOf[1]", "unclosed group"),
    (GrammarKind.JSON_SCHEMA, {"properties": {"x": {"$ref": "#/$defs/y"}}}, "p.properties.x", "does not exist"),
    (
        GrammarKind.JSON_SCHEMA,
        {"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"z": {"type": "text"}}}}},
        "p.$defs.d.properties.z",
        "text",
    ),
    (GrammarKind.JSON_SCHEMA, {"allOf": [{"type": "string"}, {"type": "null"}]}, "p", "incompatible types"),
    (
        GrammarKind.JSON_SCHEMA,
        {"items": {"oneOf": [{"type": "string"}, {"const": "a"}]}},
        "p.items",
        "exclude each other",
    ),
    (GrammarKind.JSON_SCHEMA, {"properties": []}, "p", "must be an object"),
    (GrammarKind.REGEX, "a(?=b)", "p", "look-ahead"),
    (GrammarKind.LARK, "start: x", "p", 'unknown name: "x"'),
    (GrammarKind.EBNF, "root ::= ((", "p", "EBNF"),
    (GrammarKind.STRUCTURAL_TAG, TAG, "p.structures[1].schema", "not"),
]


@pytest.mark.parametrize(("kind", "source", "place", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_the_place_of_a_finding(kind: GrammarKind, source: object, place: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_grammar(grammar(kind, source), "p")
    assert caught.value.param == place and place in caught.value.message and words in caught.value.message


def test_a_long_search_names_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.serving.grammar_check.SEARCH_S", -1.0)
    with pytest.raises(RequestError) as caught:
        check_grammar(grammar(GrammarKind.JSON_SCHEMA, DEEP), "p")
    assert caught.value.param == "p"


def test_a_long_place_is_cut() -> None:
    with pytest.raises(RequestError) as caught:
        check_grammar(grammar(GrammarKind.JSON_SCHEMA, {"properties": {"x" * 500: {"not": {}}}}), "p")
    assert caught.value.param is not None and len(caught.value.param) == 200


def test_what_is_too_large_is_refused_at_once() -> None:
    branches = [
        {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {"const": j}}} for j in range(6)]} for i in range(8)
    ]
    with pytest.raises(RequestError, match="too large"):
        check_grammar(grammar(GrammarKind.JSON_SCHEMA, {"allOf": branches}), "p")


def test_a_structure_belongs_to_its_longest_trigger() -> None:
    lark = structural_tag_lark({**TAG, "structures": [{"begin": "<call:g", "schema": {}, "end": "!"}]})
    assert 'trigger_0[lazy]: TEXT "<call:"' in lark and 'tag_0: trigger_0 ("g" %json {"x-guidance"' in lark


@pytest.mark.parametrize(("kind", "source"), VALID, ids=lambda value: str(value)[:50])
def test_a_valid_grammar_is_brought_into_a_form_that_llguidance_takes(kind: GrammarKind, source: object) -> None:
    written = grammar(kind, source)
    known = check_in_small_stack(written, "p")
    assert known.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK)
    assert not LLMatcher.validate_grammar(native_source(known))
    assert canonical(known) == known == check_grammar(written, "p"), "equal grammars have one form"


def test_other_kinds_do_not_reach_llguidance() -> None:
    for kind in (GrammarKind.EBNF, GrammarKind.CHOICE, GrammarKind.STRUCTURAL_TAG):
        with pytest.raises(GrammarError, match="not in canonical form"):
            native_source(Grammar(kind, "x"))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "x{100000}"),
        (GrammarKind.LARK, f'start: "{"ab " * 6000}"'),
        (GrammarKind.EBNF, f'root ::= ("a" | "b") "{"ab " * 6000}"'),
        (GrammarKind.LARK, 'start: "ab" start'),
        (GrammarKind.JSON_SCHEMA, {"properties": {"x": {"const": "y" * 20_000}}, "required": ["x"], "type": "object"}),
        (GrammarKind.JSON_SCHEMA, {"items": {"enum": [*range(1000), "y" * 20_000]}, "type": "array"}),
        (GrammarKind.CHOICE, [*map(str, range(1000)), "y" * 20_000]),
        (
            GrammarKind.STRUCTURAL_TAG,
            {"triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": {"enum": [0, ["y" * 20_000]]}, "end": ""}]},
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_long_text_without_a_choice_is_refused(kind: GrammarKind, source: object) -> None:
    with pytest.raises(RequestError, match="without a choice") as caught:
        check_grammar(grammar(kind, source), "p")
    assert caught.value.param == "p"


CALLED = "<call f>{}</call>"


@pytest.mark.parametrize(
    ("options", "allowed", "forbidden"),
    [
        ({}, ("", "x", CALLED, f"x{CALLED}y", CALLED * 2), ("x<call f>",)),
        ({"at_least_one": True}, (CALLED, f"{CALLED}y", CALLED * 2), ("", "x", f"x{CALLED}")),
        ({"stop_after_first": True}, ("", "x", CALLED, f"x{CALLED}"), (f"{CALLED}y", CALLED * 2)),
        ({"at_least_one": True, "stop_after_first": True}, (CALLED,), ("", "x", f"x{CALLED}", f"{CALLED}y")),
    ],
    ids=str,
)
def test_options_of_a_structural_tag(
    options: dict[str, bool], allowed: tuple[str, ...], forbidden: tuple[str, ...]
) -> None:
    tag = {**TAG, "structures": TAG["structures"][:1], **options}
    assert [text for text in allowed if not is_whole(GrammarKind.STRUCTURAL_TAG, tag, text)] == []
    assert [text for text in forbidden if is_whole(GrammarKind.STRUCTURAL_TAG, tag, text)] == []


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
NUMBER = {"type": "tag", "begin": "<n>", "content": INTEGER, "end": ["</n>"]}
THOUGHT = {"type": "tag", "begin": "<t>", "content": None, "end": ["</t>", "</u>"]}
WORD = {"type": "const_string", "value": "yes"}
FORMATS: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    (NUMBER, ("<n>12</n>",), ("", "<n></n>", "<n>1</n>x", "x<n>1</n>")),
    (THOUGHT, ("<t></t>", "<t>a\n<</u>"), ("<t>a", "<t>a</t>b", "a</t>")),
    ({"type": "sequence", "elements": [THOUGHT, NUMBER]}, ("<t>x</t><n>1</n>",), ("<t>x</t>", "<n>1</n>")),
    ({"type": "or", "elements": [WORD, NUMBER]}, ("yes", "<n>1</n>"), ("", "yes<n>1</n>", "no")),
    ({**NUMBER, "content": {"type": "or", "elements": [WORD, INTEGER]}}, ("<n>yes</n>", "<n>3</n>"), ("<n>no</n>",)),
    (
        {"type": "tags_with_separator", "tags": [NUMBER, THOUGHT], "separator": ","},
        ("", "<n>1</n>", "<n>1</n>,<t>,</t>,<n>2</n>"),
        ("x", "<n>1</n>,", "<n>1</n><n>1</n>"),
    ),
    (
        {"type": "tags_with_separator", "tags": [NUMBER], "separator": "", "at_least_one": True},
        ("<n>1</n>", "<n>1</n><n>2</n>"),
        ("", "<n>1</n>,<n>2</n>"),
    ),
    (
        {"type": "tags_with_separator", "tags": [NUMBER], "separator": ",", "stop_after_first": True},
        ("", "<n>1</n>"),
        ("<n>1</n>,<n>2</n>",),
    ),
    (
        {"type": "triggered_tags", "triggers": ["<n", "<t"], "tags": [NUMBER, THOUGHT]},
        ("", "a", "a<n>1</n>b<t>c<n></u>d", "<t></t>"),
        ("a<n>", "<n>a</n>", "<t>"),
    ),
]


@pytest.mark.parametrize(("node", "allowed", "forbidden"), FORMATS, ids=lambda value: str(value)[:40])
def test_formats_of_structural_tags(node: dict[str, Any], allowed: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    tag = {"format": node}
    check_grammar(grammar(GrammarKind.STRUCTURAL_TAG, tag), "p")
    assert [text for text in allowed if not is_whole(GrammarKind.STRUCTURAL_TAG, tag, text)] == []
    assert [text for text in forbidden if is_whole(GrammarKind.STRUCTURAL_TAG, tag, text)] == []


def test_the_schema_at_fault_in_a_format_is_named() -> None:
    broken = {"type": "json_schema", "json_schema": {"properties": {"x": {"not": {}}}}}
    sequence = {"type": "sequence", "elements": [THOUGHT, {**NUMBER, "content": broken}]}
    with pytest.raises(RequestError, match="cannot be compiled") as caught:
        check_grammar(grammar(GrammarKind.STRUCTURAL_TAG, {"format": sequence}), "p")
    assert caught.value.param == "p.format.elements[1].content.json_schema.properties.x"


def test_the_words_of_a_message() -> None:
    assert first_words("at 1\n  | (\nerror: unclosed group\n") == "unclosed group"
    assert first_words("one\ntwo") == "one" and first_words("") == "unknown error"
    assert len(first_words("x" * 999)) == 200


def test_nested_tags_do_not_double_the_grammar() -> None:
    node: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "object"}}
    sizes = []
    for _ in range(10):
        tag = {"type": "tag", "begin": "<", "content": node, "end": [">"]}
        node = {"type": "tags_with_separator", "separator": ",", "tags": [tag]}
        sizes.append(len(structural_tag_lark({"format": node})))
    assert sizes[-1] < 20 * sizes[0]
