"""The exact form of answers in harmony, as grammars over special tokens: calls, and a last message of a given form.

The rules prescribe headers as the model writes them, and leave reasoning and preambles free.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.forms import Schema, with_white_space
from raydix.engine.core.ingress.parsers.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    NAMESPACE,
    START,
    opening,
)
from raydix.engine.core.types import Grammar, GrammarKind

ANSWER = "answer"  # name of the grammar of the last message, in a frame
# White space of the JSON in calls, as the model writes it: llguidance's options.
JSON_STYLE = (("whitespace_flexible", False), ("item_separator", ","), ("key_separator", ":"))
_BEGUN = f"{START}assistant"  # the end of a prompt behind which the model begins an answer
_TEXT = r"TEXT: /(.|\n)+/"


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    """The form of calls in harmony."""

    marker: str = CALL
    """The token that every call has."""

    def grammar(
        self, functions: Mapping[str, Schema], special: Mapping[str, int], *, is_single: bool = False
    ) -> "HarmonyGrammar":
        """Return the grammar of calls of functions, by the schemas of their arguments. `special`: ids by name of all
        special tokens of the format. An answer has one call at most, whether or not it is to be a single one."""
        return HarmonyGrammar(functions, _Tokens(special))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Ids by name of special tokens."""

    ids: Mapping[str, int]

    def __getitem__(self, name: str) -> str:
        """A special token in a rule."""
        return f"<[{self.ids[name]}]>"

    def header(self, *channels: str) -> str:
        """The rule of a header of one of these channels."""
        names = " | ".join(map(json.dumps, channels))
        return f"{self[CHANNEL]} ({names}) {self[MESSAGE]}"

    def free(self, name: str, *channels: str) -> list[str]:
        """The rules of any number of messages in these channels, with any content, before another message."""
        message = f"{self.header(*channels)} TEXT? {self[END]} {self.beginning}"
        return [f"{name}: ({message})*", _TEXT]

    @property
    def beginning(self) -> str:
        """The rule of another message's beginning."""
        return f'{self[START]} "assistant"'


@dataclass(frozen=True, slots=True)
class HarmonyGrammar:
    """The calls that an answer in harmony may have."""

    functions: Mapping[str, Schema]
    tokens: _Tokens

    def required(self) -> Grammar:
        """The grammar of an answer that is a call alone, behind reasoning."""
        return self._grammar("start: before call", *self.tokens.free("before", ANALYSIS))

    def or_json(self, schema: Schema) -> Grammar:
        """The grammar of an answer that is a call, or has the JSON of another schema for the user."""
        other = f"{self.tokens.header(FINAL)} %json {json.dumps(with_white_space(schema))}"
        return self._grammar(f"start: before (call | {other})", *self.tokens.free("before", ANALYSIS, COMMENTARY))

    def among_text(self) -> Grammar:
        """The grammar of an answer that may have a call, and otherwise any text."""
        channels = ANALYSIS, COMMENTARY, FINAL
        text = f"{self.tokens.header(*channels)} TEXT?"
        return self._grammar(f"start: before (call | {text})", *self.tokens.free("before", *channels))

    def _grammar(self, *rules: str) -> Grammar:
        tokens = self.tokens
        to = json.dumps(f"{COMMENTARY} to={NAMESPACE}")
        names = " | ".join(f"f{index}" for index in range(len(self.functions)))
        lines = [*rules, f"call: {tokens[CHANNEL]} {to} ({names})"]
        for index, (name, schema) in enumerate(self.functions.items()):
            style = {"type": "object", **schema, "x-guidance": dict(JSON_STYLE)}
            header = f'{json.dumps(f"{name} ")} {tokens[CONSTRAIN]} "json" {tokens[MESSAGE]}'
            lines.append(f"f{index}: {header} %json {json.dumps(style)}")
        return Grammar(GrammarKind.LARK, "\n".join(lines))


def frame(prompt: str, special: Mapping[str, int], param: str) -> str:
    """Return the rules of an answer to a rendered prompt, whose last message has the form of the grammar `ANSWER`;
    none where the answer begins in the content of that message. `special`: as `HarmonyForm.grammar`.

    Raises `RequestError` naming `param` where the prompt ends in reasoning or in a header.
    """
    begun = opening(prompt)
    if MESSAGE in begun and ANALYSIS not in begun:
        return ""
    if begun not in ("", _BEGUN):
        raise RequestError(
            f"'{param}' is not supported where the prompt ends in reasoning or in a message's header.", param=param
        )
    tokens = _Tokens(special)
    # Behind a whole message the answer begins with a header of its own.
    first = "" if begun else f"{tokens.beginning} "
    last = f"{tokens.header(FINAL)} @{ANSWER}"
    return "\n".join([f"start: {first}before {last}", *tokens.free("before", ANALYSIS, COMMENTARY)])


def require_beginning(prompt: str, param: str) -> None:
    """Raise `RequestError` naming `param` unless an answer to the rendered prompt begins where calls can stand."""
    if opening(prompt) != _BEGUN:
        raise RequestError(f"'{param}' is not supported where the prompt has a part of the answer.", param=param)
