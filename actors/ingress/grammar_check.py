"""Checks grammars before their requests are let in, and finds the place at fault.

Checks need no model: special tokens unknown to the model are found by the worker alone.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from engine.api.schemas import Schema, children
from engine.core.errors import RequestError
from engine.core.types import Grammar, GrammarKind
from engine.model.grammar_source import GrammarError, first_words, limits, llguidance_source

SEARCH_S = 0.5
"""Longest search for the place of a finding; what is found until then is named."""
_DEFINITIONS = ("$defs", "definitions")


def check_grammar(grammar: Grammar, param: str) -> None:
    """Raise RequestError naming the place below the request's field `param` unless the grammar can be compiled."""
    finding = _finding(grammar)
    if finding is None:
        return
    place = param
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        place += _place(json.loads(grammar.source), finding)
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        place += _structure_place(json.loads(grammar.source))
    place = place if len(place) <= 200 else f"{place[:197]}..."
    raise RequestError(f"'{place}' cannot be compiled: {finding}.", param=place)


def _finding(grammar: Grammar) -> str | None:
    """Return the reason why a grammar cannot be compiled."""
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(llguidance_source(grammar), limits=limits())
    except GrammarError as error:
        return str(error)
    return _in_our_words(first_words(messages[0])) if is_error else None


def _in_our_words(message: str) -> str:
    """Return llguidance's message without its advice to programmers."""
    message = message.partition(" Enable '")[0].rstrip(".")
    if message == "oneOf constraints are not supported":
        return "oneOf is not supported unless the alternatives exclude each other"
    return message.replace("Unimplemented keys:", "these keywords are not supported:")


def _schema_finding(schema: Schema) -> str | None:
    return _finding(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False)))


def _place(root: Schema, finding: str) -> str:
    """Return the place of the innermost subschema with the finding that `root` has."""
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    deadline = time.monotonic() + SEARCH_S
    place, schema = "", root
    while True:
        for step, child in children(schema):
            if time.monotonic() > deadline:
                return place
            if _schema_finding({**definitions, **child}) == finding:
                place, schema = place + step, child
                break
        else:
            return place


def _structure_place(tag: dict[str, Any]) -> str:
    """Return the place of the first schema at fault among a structural tag's; none if it is no schema's fault."""
    for place, schema in _schemas_of(tag):
        finding = _schema_finding(schema)
        if finding is not None:
            return place + _place(schema, finding)
    return ""


def _schemas_of(node: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Schema]]:
    """The schemas of a structural tag or of a part of one, each with its place."""
    for name, value in node.items():
        if name in ("schema", "json_schema"):
            yield f"{place}.{name}", value
        elif isinstance(value, Mapping):
            yield from _schemas_of(value, f"{place}.{name}")
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _schemas_of(each, f"{place}.{name}[{index}]")
