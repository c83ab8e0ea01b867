"""Grammars of requests, and checks of the values that they come from.

Errors name the place at fault below the request's field `param`.
"""

import json
from collections.abc import Mapping
from typing import Any

from raydix.engine.api.schemas import Schema, closed, shape_finding, strict_finding, subschemas
from raydix.engine.api.validation import describe
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 120_000
OPTIONS_KEY = "x-guidance"  # keyword of a schema for llguidance's options, forbidden to requests
# The first rule, and the line of options, of a grammar in Lark's notation.
LARK_START, LARK_OPTIONS = "start", "%llguidance"


def schema_grammar(
    schema: Schema,
    param: str,
    *,
    strict: bool = False,
    is_closed: bool = False,
    options: Mapping[str, object] | None = None,
) -> Grammar:
    """Return the grammar of a JSON Schema.

    `strict` holds the schema to OpenAI's rules; `is_closed` forbids properties that the schema does not describe;
    `options` are llguidance's. Raises RequestError naming the place below `param`.
    """
    # First: all that follows goes through the schema by recursion, or expects texts as keys.
    require(shape_finding(schema), param)
    for path, each, _ in subschemas(schema):
        if OPTIONS_KEY in each:
            require(f"must not have '{OPTIONS_KEY}'", param + path)
    if strict and (finding := strict_finding(schema)) is not None:
        require(finding[1], param + finding[0])

    whole = closed(schema) if is_closed else schema
    return Grammar(
        GrammarKind.JSON_SCHEMA, source_of({**whole, OPTIONS_KEY: dict(options)} if options else whole, param)
    )


def written_grammar(text: str, param: str) -> Grammar:
    """Return a grammar in EBNF, or else in Lark."""
    return Grammar(GrammarKind.EBNF if is_ebnf(text) else GrammarKind.LARK, unicode_of(text, param))


def is_ebnf(text: str) -> bool:
    """True if a line begins with a name before `::=`, and none is Lark's alone: `start:` or `%llguidance`.

    Takes time in proportion to the text's length, whatever the text is.
    """
    has_rule, at = False, text.find(":")
    while at >= 0:
        is_defined = text.startswith("::=", at)
        name = _name_before(text, at)
        if is_defined:
            has_rule = has_rule or bool(name)
        elif name == LARK_START:
            return False
        at = text.find(":", at + (3 if is_defined else 1))
    return has_rule and not any(line.lstrip().startswith(LARK_OPTIONS) for line in text.split("\n"))


def _name_before(text: str, end: int) -> str:
    """Return the name that stands before `end` as the first word of its line; "" if there is none. White space and line
    breaks may stand behind the name. Reads back to the last other character, so all calls for the colons of a text
    together read the text once."""
    while end > 0 and text[end - 1].isspace():
        end -= 1
    begin = end
    while begin > 0 and (text[begin - 1].isalnum() or text[begin - 1] in "-_"):
        begin -= 1
    line = begin
    while line > 0 and text[line - 1].isspace() and text[line - 1] != "\n":
        line -= 1
    return text[begin:end] if line == 0 or text[line - 1] == "\n" else ""


def object_of(value: str | Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Return a JSON object, parsed if given as text."""
    if isinstance(value, str):
        # Before it is parsed: parsing takes time and memory in proportion.
        short(value, param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            require("is not valid JSON", param)
    if not isinstance(value, Mapping):
        require(f"must be a JSON object, got {describe(value)}", param)
    assert isinstance(value, Mapping)
    return value


def source_of(value: Mapping[str, Any], param: str) -> str:
    """Return a JSON value as text of bounded size."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        require("must be JSON", param)
    return short(unicode_of(text, param), param)


def short(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        require(f"must have at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}", param)
    return text


def unicode_of(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        require("must be valid Unicode", param)
    return text


def require(finding: str | None, param: str) -> None:
    """Raise RequestError if there is a finding about the field `param`."""
    if finding is not None:
        name = param if len(param) <= 200 else f"{param[:197]}..."
        raise RequestError(f"'{name}' {finding}.", param=name)
