"""Grammars in canonical form, in llguidance's, and the bounds of compiling one.

| | where | input |
|---|---|---|
| `canonical` | where a grammar is checked, in a process that reads requests | any kind, as the client wrote it |
| `native_source` | where a grammar is compiled, in a worker | the canonical kinds, which llguidance itself takes |

So no notation is looked for, and nothing is translated, in a process that computes tokens. Imported in these two places
and nowhere else: other processes do without llguidance.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from raydix.engine.core.ingress.parsers.forms import with_white_space
from raydix.engine.core.types import Grammar, GrammarKind
from raydix.engine.model.grammar_tokens import (
    Tokens,
    begins_with_token,
    lark_with_tokens,
    literal,
    regex_with_tokens,
    tokens_in,
)

NO_TOKENS: Tokens = {}
EMPTY = '""'  # the empty text in a rule
MAX_LEXER_STATES = 50_000  # most states of a grammar's lexer, of one or two kilobytes each
# Longest text without a choice whose tokens are looked for: at one to four microseconds a byte, 16 to 65 ms in which
# llguidance holds the interpreter's lock.
MAX_FORCED_BYTES = 16 << 10
# A number of repetitions in a JSON Schema, or in a regular expression.
_NUM_REPEATED = re.compile(r'(?:[{~]|"min[A-Z][a-z]+":)\s*([0-9]{1,9})')


class GrammarError(ValueError):
    """A grammar cannot be compiled, or an answer cannot go on in it; the message is for the client."""


def limits() -> LLParserLimits:
    """Return the bounds of compiling a grammar and of computing one mask; all but one are llguidance's own."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def may_force_long_text(grammar: Grammar) -> bool:
    """Return False if no text that a grammar in canonical form forces in one piece can be longer than
    `MAX_FORCED_BYTES`: its source, each part repeated as often as all numbers of repetitions say, is shorter."""
    # Lark names parts, so that a short grammar may have a long text in one piece without any number.
    if grammar.kind is GrammarKind.LARK or len(grammar.source) > MAX_FORCED_BYTES:
        return True
    num_bytes = len(grammar.source.encode())
    for found in _NUM_REPEATED.finditer(grammar.source):
        num_bytes *= max(1, int(found[1]))
        if num_bytes > MAX_FORCED_BYTES:
            return True
    return False


def native_source(grammar: Grammar) -> str:
    """Return a grammar of a canonical kind as llguidance takes it, in a few milliseconds for the longest. Raises
    GrammarError for other kinds, and where the JSON is broken; llguidance finds more when it compiles."""
    if grammar.frame:
        source = native_source(replace(grammar, frame=""))
        is_lark = grammar.kind is GrammarKind.LARK
        [answer] = [{"lark_grammar": source}] if is_lark else json.loads(source)["grammars"]
        frame = {"name": "frame", "lark_grammar": grammar.frame}
        return json.dumps({"grammars": [frame, {**answer, "name": "answer"}]})
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


def canonical(grammar: Grammar, tokens: Tokens = NO_TOKENS) -> Grammar:
    """Return a grammar in one of the kinds that llguidance itself takes, which is the same for an equal grammar, with
    `tokens` by their ids. May take long, in the interpreter too. Raises GrammarError if the notation is wrong;
    llguidance finds more."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema: object = json.loads(grammar.source)
            bounded = with_white_space(schema) if isinstance(schema, Mapping) else schema
            return replace(grammar, source=json.dumps(bounded))
        case GrammarKind.REGEX:
            found = regex_with_tokens(grammar.source, tokens)
            if found is None:
                return grammar
            lark = found
        case GrammarKind.LARK:
            lark = lark_with_tokens(grammar.source, tokens)
        case GrammarKind.EBNF:
            lark = lark_with_tokens(_of_ebnf(grammar.source), tokens)
        case GrammarKind.CHOICE:
            choices: list[str] = json.loads(grammar.source)
            known = tokens_in(grammar.source, tokens)
            lark = f"start: {_alternatives(literal(choice, known) or EMPTY for choice in choices)}"
        case GrammarKind.STRUCTURAL_TAG:
            tag = json.loads(grammar.source)
            lark = structural_tag_lark(tag, tokens_in(json.dumps(tag, ensure_ascii=False), tokens))
    return replace(grammar, kind=GrammarKind.LARK, source=lark)


def _of_ebnf(source: str) -> str:
    # The kind of the grammar was decided where the request was parsed: no search for Lark's notation again.
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # of any kind: the converter raises whatever it meets
        raise GrammarError(f"cannot be read as EBNF: {first_words(str(error))}") from None


def structural_tag_lark(tag: Mapping[str, Any], tokens: Tokens = NO_TOKENS) -> str:
    """Return a structural tag in Lark's notation, with `tokens` by their ids."""
    node = tag["format"] if "format" in tag else _of_structures(tag)
    return _TagRules(tokens).grammar(node)


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


class _TagRules:
    """The rules of one structural tag."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._lines = [r"TEXT: /(.|\n)*/"]

    def grammar(self, node: Mapping[str, Any]) -> str:
        start = self._triggered(node) if node["type"] == "triggered_tags" else self._expression(node)
        return "\n".join([f"start: {start}", *self._lines])

    def _triggered(self, node: Mapping[str, Any]) -> str:
        """Return text up to a trigger, one of the tags that begin with the trigger, and so on; in the end text without
        a trigger. With `at_least_one` the first tag stands at the beginning, without text before; with
        `stop_after_first` nothing follows a tag."""
        triggers: Sequence[str] = sorted(node["triggers"], key=len, reverse=True)
        bodies: dict[str, list[str]] = {}
        for tag in node["tags"]:
            trigger = next(each for each in triggers if tag["begin"].startswith(each))
            bodies.setdefault(trigger, []).append(self._tag(tag, tag["begin"][len(trigger) :]) or EMPTY)

        self._lines += ["rest: TEXT", "any: " + _alternatives(f"tag_{i}" for i in range(len(bodies)))]
        for index, (trigger, of_trigger) in enumerate(bodies.items()):
            before = self._text_up_to([trigger], f"trigger_{index}")
            self._lines.append(f"tag_{index}: {before} ({_alternatives(of_trigger)})")
        is_first, is_last = node.get("at_least_one"), node.get("stop_after_first")
        if is_first:
            firsts = (f"{self._literal(trigger)} ({_alternatives(each)})" for trigger, each in bodies.items())
            self._lines.append(f"first: {_alternatives(firsts)}")
        if is_last:
            return "first" if is_first else "any | rest"
        return "first any* rest" if is_first else "any* rest"

    def _expression(self, node: Mapping[str, Any]) -> str:
        """Return a part of a structural tag."""
        match node["type"]:
            case "json_schema":
                return f"%json {json.dumps(with_white_space(node['json_schema']))}"
            case "const_string":
                return self._literal(node["value"])
            case "tag":
                return self._tag(node, node["begin"])
            case "tags_with_separator":
                return self._separated(node)
        parts = [self._expression(each) for each in node["elements"]]
        return f"({_alternatives(parts)})" if node["type"] == "or" else f"({' '.join(parts)})"

    def _tag(self, tag: Mapping[str, Any], begin: str) -> str:
        """Return a tag from `begin` on."""
        parts = [self._literal(begin)]
        if tag["content"] is None:
            parts.append(self._text_up_to(tag["end"], f"until_{len(self._lines)}"))
        else:
            end = _alternatives(map(self._literal, tag["end"]))
            parts += [self._expression(tag["content"]), end if len(tag["end"]) == 1 else f"({end})"]
        return " ".join(part for part in parts if part != EMPTY)

    def _separated(self, node: Mapping[str, Any]) -> str:
        """Return tags with a text between each two, and nothing else."""
        tags = f"({_alternatives(map(self._expression, node['tags']))})"
        if not node.get("stop_after_first"):
            name = f"tags_{len(self._lines)}"  # a rule of its own: said twice, each level would double the grammar
            self._lines.append(f"{name}: {tags}")
            separator = self._literal(node["separator"]) if node["separator"] else ""
            tags = f"({name} ({separator} {name})*)"
        return tags if node.get("at_least_one") else f"({tags})?"

    def _text_up_to(self, ends: Sequence[str], name: str) -> str:
        """Return any text with one of some ends, none of which the text has before; `name` is that of a new rule.

        No text has the id of a token, so that one ends the text by itself. Any other end is a part of the text's own
        regular expression, which ends with the first one.
        """
        found = []
        quoted = [json.dumps(end) for end in ends if not begins_with_token(end, self._tokens)]
        if quoted:
            end = quoted[0] if len(quoted) == 1 else f"({_alternatives(quoted)})"
            self._lines.append(f"{name}[lazy]: TEXT {end}")
            found.append(name)
        for end in ends:
            if begins_with_token(end, self._tokens):
                found.append(f"TEXT {self._literal(end)}")
        return found[0] if len(found) == 1 else f"({_alternatives(found)})"

    def _literal(self, text: str) -> str:
        return literal(text, self._tokens) or EMPTY


def _alternatives(parts: Iterable[str]) -> str:
    return " | ".join(parts)


def first_words(message: str) -> str:
    """Return the line of an error message with the reason, shortened: other lines quote the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return line if len(line) <= 200 else f"{line[:197]}..."
