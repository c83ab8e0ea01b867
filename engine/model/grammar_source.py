"""Grammars in llguidance's form, and the bounds of compiling one.

Imported where a grammar is checked or compiled, and nowhere else: other processes do without llguidance.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from engine.core.ingress.parsers.forms import with_white_space
from engine.core.types import Grammar, GrammarKind

MAX_LEXER_STATES = 50_000
"""Of one or two kilobytes each."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or an answer cannot go on in it; the message is for the client."""


def limits() -> LLParserLimits:
    """Return the bounds of compiling a grammar and of computing one mask; all but one are llguidance's own."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def llguidance_source(grammar: Grammar) -> str:
    """Return a grammar as llguidance takes it. Raises GrammarError if the notation is wrong; more is found later."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(grammar.source)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_of_ebnf(grammar.source))
        case GrammarKind.CHOICE:
            choices: list[str] = json.loads(grammar.source)
            return LLMatcher.grammar_from_lark(f"start: {_alternatives(map(json.dumps, choices))}")
        case GrammarKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(structural_tag_lark(json.loads(grammar.source)))


def _of_schema(source: str) -> str:
    schema: object = json.loads(source)
    bounded = with_white_space(schema) if isinstance(schema, Mapping) else schema
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(bounded))
    except ValueError as error:
        raise GrammarError(first_words(str(error))) from None


def _of_ebnf(source: str) -> str:
    try:
        return any_to_lark(source)
    except Exception as error:  # of any kind: the converter raises whatever it meets
        raise GrammarError(f"cannot be read as EBNF: {first_words(str(error))}") from None


def structural_tag_lark(tag: Mapping[str, Any]) -> str:
    """Return a structural tag in Lark's notation: text up to a trigger, one of the structures that begin with the
    trigger, and so on; in the end text without a trigger. With `at_least_one` the first structure stands at the
    beginning, without text before; with `stop_after_first` nothing follows a structure."""
    triggers: Sequence[str] = sorted(tag["triggers"], key=len, reverse=True)
    ends: dict[str, list[str]] = {}
    for structure in tag["structures"]:
        begin: str = structure["begin"]
        trigger = next(each for each in triggers if begin.startswith(each))
        parts = (
            json.dumps(begin[len(trigger) :]),
            f"%json {json.dumps(with_white_space(structure['schema']))}",
            json.dumps(structure["end"]),
        )
        ends.setdefault(trigger, []).append(" ".join(part for part in parts if part != '""'))

    lines = [f"start: {_order_of(tag)}", r"TEXT: /(.|\n)*/", "rest: TEXT"]
    lines.append("any: " + _alternatives(f"tag_{i}" for i in range(len(ends))))
    for index, (trigger, bodies) in enumerate(ends.items()):
        lines.append(f"trigger_{index}[lazy]: TEXT {json.dumps(trigger)}")
        lines.append(f"tag_{index}: trigger_{index} ({_alternatives(bodies)})")
    if tag.get("at_least_one"):
        firsts = (f"{json.dumps(trigger)} ({_alternatives(bodies)})" for trigger, bodies in ends.items())
        lines.append(f"first: {_alternatives(firsts)}")
    return "\n".join(lines)


def _order_of(tag: Mapping[str, Any]) -> str:
    """Return how structures (`any`, and `first` without text before) and text follow each other."""
    if tag.get("stop_after_first"):
        return "first" if tag.get("at_least_one") else "any | rest"
    return "first any* rest" if tag.get("at_least_one") else "any* rest"


def _alternatives(parts: Iterable[str]) -> str:
    return " | ".join(parts)


def first_words(message: str) -> str:
    """Return the line of an error message with the reason, shortened: other lines quote the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= 200 else f"{line[:197]}..."
