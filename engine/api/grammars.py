"""Grammars of requests, and checks of the values that they come from.

Errors name the place at fault below the request's field `param`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.api.schemas import Schema, closed, shape_finding, strict_finding, subschemas
from engine.api.validation import describe
from engine.core.errors import RequestError
from engine.core.types import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 120_000
OPTIONS_KEY = "x-guidance"
"""Keyword of a schema for llguidance's options, forbidden to requests."""
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


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
    return Grammar(GrammarKind.EBNF if _EBNF_RULE.search(text) else GrammarKind.LARK, unicode_of(text, param))


def object_of(value: str | Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Return a JSON object, parsed if given as text."""
    if isinstance(value, str):
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
