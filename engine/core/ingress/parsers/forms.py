"""The exact form of calls, as grammars that an answer follows where it must call, or its calls must fit their schemas.

An answer that follows such a grammar is parsed as any other. The JSON in it is written as chat templates write it, so
that the call sent back comes to the same tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydix.engine.core.types import Grammar, GrammarKind

Schema = Mapping[str, object]

# Characters of white space between two parts of JSON. Without a bound, small models write it without end.
MAX_WHITE_SPACE = 64
# White space of the JSON in calls: llguidance's options.
JSON_STYLE = (("whitespace_flexible", False), ("item_separator", ", "), ("key_separator", ": "))
_TEXT = r"TEXT: /(.|\n)+/"
_NO_OBJECT = r"TEXT: /[^{](.|\n)*/"


def with_white_space(schema: Schema) -> Schema:
    """A schema with llguidance's option that bounds white space, unless it has options of its own."""
    return {"x-guidance": {"whitespace_pattern": rf"[ \t\n\r]{{0,{MAX_WHITE_SPACE}}}"}, **schema}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around calls: `opening`, the calls with separators between them, `closing`; around each call `begin`,
    the JSON object of name and arguments, `end`."""

    arguments_key: str
    marker: str = ""
    """Beginning of the first call's text; empty where a call's place alone makes it one."""
    opening: str = ""
    begin: str = ""
    end: str = ""
    separator: str = "\n"
    closing: str = ""

    def grammar(
        self, functions: Mapping[str, Schema], special: Mapping[str, int], *, is_single: bool = False
    ) -> "CallGrammar":
        """Return the grammar of calls of functions; arguments as `CallGrammar`."""
        return CallGrammar(self, functions, special, is_single)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The calls that an answer may have.

    `functions` are schemas of arguments by name; `special` the ids by name of tokens that llguidance takes by
    their ids alone: those added to the vocabulary.
    """

    form: CallForm
    functions: Mapping[str, Schema]
    special: Mapping[str, int]
    is_single: bool = False

    def required(self) -> Grammar:
        """The grammar of an answer that is calls alone, at least one."""
        return self._grammar("start: calls", self._calls(self.form.opening))

    def or_json(self, schema: Schema) -> Grammar:
        """The grammar of an answer that is calls alone, or the JSON of another schema."""
        other = json.dumps(with_white_space(schema))
        return self._grammar(f"start: calls | %json {other}", self._calls(self.form.opening))

    def among_text(self) -> Grammar:
        """The grammar of an answer that may have calls, and otherwise any text."""
        form = self.form
        if not form.marker:
            return self._grammar("start: (calls | TEXT)?", self._calls(form.opening), _NO_OBJECT)
        if form.marker in self.special:
            return self._grammar("start: TEXT? (calls TEXT?)*", self._calls(form.opening), _TEXT)
        trigger = f"trigger[lazy]: /(.|\\n)*/ {json.dumps(form.marker)}"
        return self._grammar("start: (trigger calls)* TEXT?", trigger, self._calls(form.opening, form.marker), _TEXT)

    def _calls(self, opening: str, left_out: str = "") -> str:
        """The rules of all calls together, without the text `left_out` at the beginning."""
        form = self.form
        first = self._text((opening + form.begin).removeprefix(left_out))
        others = "" if self.is_single else f"({self._text(form.separator + form.begin)} call)*"
        return f"calls: {first} call {others} {self._text(form.closing)}"

    def _grammar(self, *rules: str) -> Grammar:
        bodies = [self._body(name, schema) for name, schema in self.functions.items()]
        names = " | ".join(f"f{index}" for index in range(len(bodies)))
        lines = [*rules, f"call: ({names}) {self._text(self.form.end)}"]
        lines += [f"f{index}: {body}" for index, body in enumerate(bodies)]
        return Grammar(GrammarKind.LARK, "\n".join(lines))

    def _body(self, name: str, schema: Schema) -> str:
        # In parts as the tokens of JSON, so that another object may be an alternative.
        parts = ("{", '"name"', ": ", json.dumps(name), ", ", json.dumps(self.form.arguments_key), ": ")
        head = " ".join(map(json.dumps, parts))
        return f'{head} %json {json.dumps({"type": "object", **schema, "x-guidance": dict(JSON_STYLE)})} "}}"'

    def _text(self, text: str) -> str:
        """A text in a rule; special tokens in it by their ids."""
        parts: Sequence[str] = [text]
        for name in self.special:
            parts = [piece for part in parts for piece in _split(part, name)]
        shown = (f"<[{self.special[part]}]>" if part in self.special else json.dumps(part) for part in parts if part)
        return " ".join(shown)


def _split(text: str, name: str) -> list[str]:
    """A text's parts before and behind a name, and the name between them."""
    before, *others = text.split(name)
    return [before, *(part for other in others for part in (name, other))]
