"""Grammars in canonical form, in llguidance's, and the bounds of compiling one.

| | where | input |
|---|---|---|
| `canonical` | where a grammar is checked, in a process that reads requests | any kind, as the client wrote it |
| `native_source` | where a grammar is compiled, in a worker | the canonical kinds, which llguidance itself takes |

So no notation is looked for, and nothing is translated, in a process that computes tokens. Imported in these two places
and nowhere else: other processes do without llguidance.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.core.ingress.parsers.forms import with_white_space
from engine.core.types import Grammar, GrammarKind

MAX_LEXER_STATES = 50_000
"""Of one or two kilobytes each."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or an answer cannot go on in it; the message is for the client."""


def limits() -> LLParserLimits:
    """Return the bounds of compiling a grammar and of computing one mask; all but one are llguidance's own."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def native_source(grammar: Grammar) -> str:
    """Return a grammar of a canonical kind as llguidance takes it, in a few milliseconds for the longest. Raises
    GrammarError for other kinds, and where the JSON is broken; llguidance finds more when it compiles."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.source)
            except ValueError as error:
                raise GrammarError(first_words(str(error))) from None
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)
    raise GrammarError(f"a grammar of the kind '{grammar.kind}' is not in canonical form")


def canonical(grammar: Grammar) -> Grammar:
    """Return a grammar in one of the kinds that llguidance itself takes, which is the same for an equal grammar. May
    take long, in the interpreter too. Raises GrammarError if the notation is wrong; llguidance finds more."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema: object = json.loads(grammar.source)
            bounded = with_white_space(schema) if isinstance(schema, Mapping) else schema
            return replace(grammar, source=json.dumps(bounded))
        case GrammarKind.REGEX | GrammarKind.LARK:
            return grammar
        case GrammarKind.EBNF:
            lark = _of_ebnf(grammar.source)
        case GrammarKind.CHOICE:
            choices: list[str] = json.loads(grammar.source)
            lark = f"start: {_alternatives(map(json.dumps, choices))}"
        case GrammarKind.STRUCTURAL_TAG:
            lark = structural_tag_lark(json.loads(grammar.source))
    return replace(grammar, kind=GrammarKind.LARK, source=lark)


def _of_ebnf(source: str) -> str:
    # The kind of the grammar was decided where the request was parsed: no search for Lark's notation again.
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # of any kind: the converter raises whatever it meets
        raise GrammarError(f"cannot be read as EBNF: {first_words(str(error))}") from None


def structural_tag_lark(tag: Mapping[str, Any]) -> str:
    """Return a structural tag in Lark's notation."""
    node = tag["format"] if "format" in tag else _of_structures(tag)
    lines = [r"TEXT: /(.|\n)*/"]
    start = _triggered(node, lines) if node["type"] == "triggered_tags" else _expression(node, lines)
    return "\n".join([f"start: {start}", *lines])


def _of_structures(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the format of `triggers` and `structures`."""
    tags = [
        {
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": [each["end"]],
        }
        for each in tag["structures"]
    ]
    return {**tag, "type": "triggered_tags", "tags": tags}


def _triggered(node: Mapping[str, Any], lines: list[str]) -> str:
    """Return text up to a trigger, one of the tags that begin with the trigger, and so on; in the end text without a
    trigger. With `at_least_one` the first tag stands at the beginning, without text before; with `stop_after_first`
    nothing follows a tag."""
    triggers: Sequence[str] = sorted(node["triggers"], key=len, reverse=True)
    bodies: dict[str, list[str]] = {}
    for tag in node["tags"]:
        trigger = next(each for each in triggers if tag["begin"].startswith(each))
        bodies.setdefault(trigger, []).append(_tag(tag, tag["begin"][len(trigger) :], lines) or '""')

    lines += ["rest: TEXT", "any: " + _alternatives(f"tag_{i}" for i in range(len(bodies)))]
    for index, (trigger, of_trigger) in enumerate(bodies.items()):
        lines.append(f"trigger_{index}[lazy]: TEXT {json.dumps(trigger)}")
        lines.append(f"tag_{index}: trigger_{index} ({_alternatives(of_trigger)})")
    is_first, is_last = node.get("at_least_one"), node.get("stop_after_first")
    if is_first:
        firsts = (f"{json.dumps(trigger)} ({_alternatives(of_trigger)})" for trigger, of_trigger in bodies.items())
        lines.append(f"first: {_alternatives(firsts)}")
    if is_last:
        return "first" if is_first else "any | rest"
    return "first any* rest" if is_first else "any* rest"


def _expression(node: Mapping[str, Any], lines: list[str]) -> str:
    """Return a part of a structural tag; `lines` are further rules."""
    match node["type"]:
        case "json_schema":
            return f"%json {json.dumps(with_white_space(node['json_schema']))}"
        case "const_string":
            return json.dumps(node["value"])
        case "tag":
            return _tag(node, node["begin"], lines)
        case "tags_with_separator":
            return _separated(node, lines)
    parts = [_expression(each, lines) for each in node["elements"]]
    return f"({_alternatives(parts)})" if node["type"] == "or" else f"({' '.join(parts)})"


def _tag(tag: Mapping[str, Any], begin: str, lines: list[str]) -> str:
    """Return a tag from `begin` on."""
    end = _alternatives(map(json.dumps, tag["end"]))
    parts = [json.dumps(begin)]
    if tag["content"] is None:
        name = f"until_{len(lines)}"
        lines.append(f"{name}[lazy]: TEXT ({end})")
        parts.append(name)
    else:
        parts += [_expression(tag["content"], lines), end if len(tag["end"]) == 1 else f"({end})"]
    return " ".join(part for part in parts if part != '""')


def _separated(node: Mapping[str, Any], lines: list[str]) -> str:
    """Return tags with a text between each two, and nothing else."""
    tags = f"({_alternatives(_expression(tag, lines) for tag in node['tags'])})"
    if not node.get("stop_after_first"):
        name = f"tags_{len(lines)}"  # a rule of its own: said twice, each level would double the grammar
        lines.append(f"{name}: {tags}")
        separator = json.dumps(node["separator"]) if node["separator"] else ""
        tags = f"({name} ({separator} {name})*)"
    return tags if node.get("at_least_one") else f"({tags})?"


def _alternatives(parts: Iterable[str]) -> str:
    return " | ".join(parts)


def first_words(message: str) -> str:
    """Return the line of an error message with the reason, shortened: other lines quote the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= 200 else f"{line[:197]}..."
