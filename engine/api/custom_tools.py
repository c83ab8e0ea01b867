"""Tools whose input is a text, free or in the form of a grammar: `custom` of chats and of `/v1/responses`.

A model knows such a tool as a function with the text as its one argument, `input`, and a grammar comes to a regular
expression of that argument. So the grammars in Lark are those without recursion, such as that of Codex' `apply_patch`.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo
from pydantic_core import PydanticCustomError

from raydix.engine.api.grammars import MAX_GRAMMAR_CHARS, require, short, unicode_of
from raydix.engine.api.validation import LenientModel, StrictModel
from raydix.engine.core.ingress.parsers.custom import INPUT_KEY

CustomName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class WrittenGrammar(StrictModel):
    """Grammar of a tool's input."""

    syntax: Literal["lark", "regex"] = Field(description="Notation.")
    definition: str = Field(description="The grammar.")


def _required_by_type(grammar: WrittenGrammar | None, info: ValidationInfo) -> WrittenGrammar | None:
    if grammar is None and info.data.get("type") == "grammar":
        raise PydanticCustomError("missing", "a grammar is missing")
    return grammar


class InputFormat(StrictModel):
    """Form of a tool's input."""

    type: Literal["text", "grammar"] = Field(description="`text`: any.")
    grammar: Annotated[WrittenGrammar | None, AfterValidator(_required_by_type)] = Field(
        default=None, validate_default=True, description="Of `grammar`."
    )


class CustomDefinition(LenientModel):
    """Tool whose input is a text."""

    name: CustomName = Field(description="Its name.")
    description: str | None = Field(default=None, description="Its purpose, for the model.")
    format: InputFormat | None = Field(default=None, description="Form of the input; by default any text.")

    @property
    def grammar(self) -> WrittenGrammar | None:
        """The grammar of the input; None for any text."""
        return None if self.format is None or self.format.type == "text" else self.format.grammar

    @property
    def strict(self) -> bool:
        """True if the input has a form."""
        return self.grammar is not None

    def for_template(self) -> Mapping[str, object]:
        """Return the tool as chat templates know it."""
        words = "The input, any text."
        if self.grammar is not None:
            kind = "regular expression" if self.grammar.syntax == "regex" else "Lark grammar"
            words = f"The input, in the form of this {kind}:\n{self.grammar.definition}"
        description = {} if self.description is None else {"description": self.description}
        parameters = _parameters({"type": "string", "description": words})
        return {"type": "function", "function": {"name": self.name, **description, "parameters": parameters}}

    def input_schema(self, param: str) -> Mapping[str, object]:
        """Return the schema of the arguments. Raises RequestError naming the field `param` for a grammar that no
        regular expression says."""
        if self.grammar is None:
            return _parameters({"type": "string"})
        pattern = short(unicode_of(self.grammar.definition, param), param)
        if self.grammar.syntax == "lark":
            pattern = regex_of_lark(pattern, param)
        else:  # the whole input is meant anyway
            is_anchored = pattern.endswith("$") and not pattern.endswith("\\$")
            pattern = pattern.removeprefix("^")[: -1 if is_anchored else None]
        return _parameters({"type": "string", "pattern": f"^(?:{pattern})$"})


def _parameters(of_input: Mapping[str, object]) -> Mapping[str, object]:
    return {
        "type": "object",
        "properties": {INPUT_KEY: of_input},
        "required": [INPUT_KEY],
        "additionalProperties": False,
    }


# Lark to regular expressions

MAX_NESTED = 100  # rules and brackets in each other
# Lark's own terminals that a grammar may import.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|//[^\n]*|\#[^\n]*)+)
    | (?P<text>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)+/[ims]*)
    | (?P<directive>%[a-z]+)
    | (?P<name>[?!]?[A-Za-z_][A-Za-z_0-9]*)
    | (?P<number>[0-9]+)
    | (?P<mark>->|\.\.|[:.,|()\[\]?*+~-])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:(?P<code>x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|(?P<other>.))", re.DOTALL)
# Characters by the letters behind a backslash. Before any other letter a backslash is one, as in Lark.
_ESCAPED = dict(zip("abfnrtv\\\"'", "\a\b\f\n\r\t\v\\\"'", strict=True))
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_Token = tuple[str, str]


def regex_of_lark(source: str, param: str) -> str:
    """Return a regular expression of the texts of a grammar in Lark. Raises RequestError naming the field `param` for
    a grammar that is wrong, or that has none."""
    return _Lark(source, param).regex("start")


class _Lark:
    """The rules of one grammar."""

    def __init__(self, source: str, param: str) -> None:
        self._param = param
        self._rules: dict[str, list[_Token]] = {}
        self._known: dict[str, str] = {}  # regular expressions of rules
        self._open: list[str] = []  # rules that are being written, each a part of the one before
        self._depth = 0  # rules and brackets that are open, those of all rules together
        tokens = list(self._tokens(source))
        at = 0
        while at < len(tokens):
            at = self._statement(tokens, at)

    def regex(self, name: str) -> str:
        """Return the regular expression of a rule."""
        # Each rule is written once: a rule that two others use would be written again for each use of theirs.
        if name in self._known:
            return self._known[name]
        if name not in self._rules:
            self.refuse(f"has no rule '{name[:100]}'")
        # A regular expression has no recursion, and the writing of one would not end.
        if name in self._open:
            self.refuse(f"has the rule '{name[:100]}' in itself; only grammars without recursion are supported here")
        self._open.append(name)
        expression = _Expression(self, self._rules[name])
        self._known[name] = found = expression.whole()
        self._open.pop()
        return found

    def require_length(self, num_chars: int) -> None:
        """Refuse a regular expression that is too long: rules that use others twice double the length."""
        if num_chars > MAX_GRAMMAR_CHARS:
            self.refuse(f"comes to a regular expression of more than {MAX_GRAMMAR_CHARS} characters")

    def enter(self) -> None:
        """Begin a rule or a bracket within those that are open; `leave` ends it."""
        self._depth += 1
        if self._depth > MAX_NESTED:
            self.refuse(f"has more than {MAX_NESTED} rules and brackets in each other")

    def leave(self) -> None:
        self._depth -= 1

    def refuse(self, finding: str) -> None:
        require(finding, self._param)

    def refuse_token(self, token: _Token | None) -> None:
        shown = "the end of a rule" if token is None else f"'{token[1][:50]}'"
        self.refuse(f"cannot be read as Lark at {shown}")

    def _tokens(self, source: str) -> Iterator[_Token]:
        at = 0
        while at < len(source):
            match = _TOKEN.match(source, at)
            if match is None:
                self.refuse(f"cannot be read as Lark at '{source[at : at + 20]}'")
            assert match is not None and match.lastgroup is not None
            if match.lastgroup != "space":
                yield match.lastgroup, match[0]
            at = match.end()

    def _statement(self, tokens: list[_Token], at: int) -> int:
        """Take the rule or directive at a place; returns the place behind it."""
        kind, text = tokens[at]
        # Lark has no sign for the end of a rule: it ends where the next rule or directive begins.
        end = next((each for each in range(at + 1, len(tokens)) if self._begins(tokens, each)), len(tokens))
        body = tokens[at + 1 : end]
        if (kind, text) == ("directive", "%import"):
            self._import(body)
        elif kind == "directive":
            self.refuse(f"has '{text[:20]}', which is not supported here")
        elif self._begins(tokens, at):
            # `?` and `!` say how Lark builds its tree, which nobody builds here.
            name = text.lstrip("?!")
            if name in self._rules or name in self._known:
                self.refuse(f"has two rules '{name[:100]}'")
            self._rules[name] = body[body.index(("mark", ":")) + 1 :]
        else:
            self.refuse_token(tokens[at])
        return end

    @staticmethod
    def _begins(tokens: list[_Token], at: int) -> bool:
        """True if a rule or directive begins at a place."""
        if tokens[at][0] == "directive":
            return True
        following = [text for _, text in tokens[at + 1 : at + 4]]
        # `name:` or `name.2:`, a rule with a priority.
        is_defined = following[:1] == [":"] or (following[:1] == ["."] and following[2:] == [":"])
        return tokens[at][0] == "name" and is_defined

    def _import(self, body: list[_Token]) -> None:
        """Take `common.LF`, `common.LF -> LINE` or `common (LF, INT)`."""
        words = [text for _, text in body]
        match words:
            case ["common", ".", name]:
                names = {name: name}
            case ["common", ".", name, "->", other]:
                names = {other: name}
            case ["common", "(", *listed, ")"]:
                names = {name: name for name in listed if name != ","}
            case _:
                names = {" ".join(words): ""}
        for own, name in names.items():
            if name not in _COMMON:
                self.refuse(f"imports '{(name or own)[:100]}', which is not supported here")
            regex = f"(?:{_COMMON[name]})"
            # The same import again changes nothing.
            if own in self._rules or self._known.get(own, regex) != regex:
                self.refuse(f"has two rules '{own[:100]}'")
            self._known[own] = regex


class _Expression:
    """The right side of a rule."""

    def __init__(self, lark: _Lark, tokens: list[_Token]) -> None:
        self._lark = lark
        self._tokens = tokens
        self._at = 0

    def whole(self) -> str:
        found = self._alternatives()
        if self._at < len(self._tokens):
            self._lark.refuse_token(self._tokens[self._at])
        return found

    def _alternatives(self) -> str:
        self._lark.enter()
        found = [self._sequence()]
        num_chars = len("(?:)") + len(found[0])
        while self._take("|"):
            found.append(self._sequence())
            num_chars += len("|") + len(found[-1])
            self._lark.require_length(num_chars)
        self._lark.require_length(num_chars)
        self._lark.leave()
        return f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        parts: list[str] = []
        num_chars = 0
        while self._at < len(self._tokens) and self._tokens[self._at][1] not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._atom()))
            # Before they are joined: thousands of references to one long rule would come to gigabytes.
            num_chars += len(parts[-1])
            self._lark.require_length(num_chars)
        # An alias names a node of the tree: it is read and left out.
        if self._take("->"):
            self._next("name")
        return "".join(parts)

    def _atom(self) -> str:
        kind, text = self._next()
        if kind == "text":
            if self._take(".."):
                return self._range(self._text(text), self._text(self._next("text")[1]))
            # The characters of a text stand for themselves, also those that mean something in an expression.
            literal = _META.sub(r"\\\g<0>", self._text(text.removesuffix("i")))
            return f"(?i:{literal})" if text.endswith("i") else f"(?:{literal})"
        if kind == "regex":
            pattern, _, flags = text[1:].rpartition("/")
            return f"(?{flags}:{pattern})".replace(r"\/", "/")
        if kind == "name":
            return self._lark.regex(text)
        if text in ("(", "["):
            inner = self._alternatives()
            if not self._take(")" if text == "(" else "]"):
                self._refuse_here()
            # Square brackets are Lark's other way to write `?`.
            return inner if text == "(" else f"{inner}?"
        self._at -= 1
        self._refuse_here()
        raise AssertionError("unreachable")

    def _range(self, first: str, last: str) -> str:
        """Return the class of the characters between two."""
        if len(first) != 1 or len(last) != 1 or first > last:
            self._lark.refuse(
                f"has the range '{first[:50]}' to '{last[:50]}'; a range is from one character to another"
            )
        return f"[{_class_letter(first)}-{_class_letter(last)}]"

    def _repeated(self, atom: str) -> str:
        """Return an atom as often as its sign says."""
        for sign in "?*+":
            if self._take(sign):
                return f"{atom}{sign}"
        if not self._take("~"):
            return atom
        least = most = self._next("number")[1]
        if self._take(".."):
            most = self._next("number")[1]
        # The lengths first: Python refuses to read a number of thousands of digits.
        if max(len(least), len(most)) > 4 or int(least) > int(most):
            self._refuse_here()
        return f"{atom}{{{int(least)},{int(most)}}}"

    def _text(self, quoted: str) -> str:
        try:
            return _unescaped(quoted)
        except ValueError:
            self._lark.refuse_token(("text", quoted))
            raise

    def _next(self, kind: str | None = None) -> _Token:
        if self._at >= len(self._tokens) or kind not in (None, self._tokens[self._at][0]):
            self._refuse_here()
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, mark: str) -> bool:
        # Only a mark: a quoted text of the same characters is no sign of the grammar.
        is_next = self._at < len(self._tokens) and self._tokens[self._at] == ("mark", mark)
        self._at += is_next
        return is_next

    def _refuse_here(self) -> None:
        self._lark.refuse_token(self._tokens[self._at] if self._at < len(self._tokens) else None)


def _unescaped(quoted: str) -> str:
    """Return the text between quotes. Raises ValueError for an escape that is no character, and behind a flag."""
    if not quoted.endswith('"'):
        raise ValueError("a flag behind the text")
    text = _ESCAPE.sub(_character, quoted[1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # two halves, as JSON has them, are one character


def _character(escape: re.Match[str]) -> str:
    code, other = escape["code"], escape["other"]
    if code is not None and (number := int(code[1:], 16)) <= sys.maxunicode:
        return chr(number)
    if code is not None or other in "xuU":
        raise ValueError("an escape of no character")
    return _ESCAPED.get(other, escape[0])


def _class_letter(text: str) -> str:
    """Return a character as a class of a regular expression has it."""
    return re.sub(r"[\\\]\[^&~-]", r"\\\g<0>", text)
