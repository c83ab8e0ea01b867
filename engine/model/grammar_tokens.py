"""Texts of a grammar that are tokens of the vocabulary by themselves, such as Qwen's `<tool_call>`.

llguidance takes a token that was added to the vocabulary by its id alone, never for its text. A model never writes the
letters of such a text one by one, though: a grammar with the quoted text would forbid what the model means, and allow
what it never writes. So the text is replaced by the token's id, `<[151657]>` in Lark.

| of | replaced |
|---|---|
| structural tags | everywhere (`raydix.engine.model.grammar_source`) |
| Lark and EBNF | in the quoted texts of rules; those of terminals are parts of a regular expression |
| regular expressions | outside groups and classes, in an expression without alternatives and flags there |
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

Tokens = Mapping[str, int]
"""Ids of tokens by their texts."""

_PIECE = re.compile(
    r"""
    (?P<comment>//[^\n]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    | (?P<json>%(?:json|lark|regex)\s*\{)
    | (?P<head>^[ \t]*[?!]?(?P<name>[A-Za-z_][A-Za-z_0-9]*)(?P<attributes>\[[^\]\n]*\])?(?:\.-?[0-9]+)?[ \t]*:)
    """,
    re.VERBOSE | re.MULTILINE,
)
_FLAGS = re.compile(r"\(\?[A-Za-z-]+\)")  # flags of the rest of a group, such as `(?i)`
_QUANTIFIERS = frozenset("*+?{")


def tokens_in(source: str, tokens: Tokens) -> Tokens:
    """Return the tokens whose texts a grammar has, the longest first."""
    found = sorted((text for text in tokens if text in source), key=len, reverse=True)
    return {text: tokens[text] for text in found}


def literal(text: str, tokens: Tokens) -> str:
    """Return a text as a part of a rule in Lark."""
    parts: Sequence[str] = [text]
    for name in tokens:
        parts = [piece for part in parts for piece in ([part] if part in tokens else _split(part, name))]
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part)


def begins_with_token(text: str, tokens: Tokens) -> bool:
    """True if one of the tokens is the beginning of a text."""
    return any(text.startswith(name) for name in tokens)


def _split(text: str, name: str) -> list[str]:
    """Return a text's parts before and behind each place of `name`, and `name` between them."""
    before, *others = text.split(name)
    return [before, *(part for other in others for part in (name, other))]


def lark_with_tokens(source: str, tokens: Tokens) -> str:
    """Return a grammar in Lark with the tokens by their ids."""
    tokens = tokens_in(source, tokens)
    return "".join(_pieces(source, tokens)) if tokens else source


def _pieces(source: str, tokens: Tokens) -> Iterator[str]:
    """Return the grammar in pieces, which together have the tokens by their ids."""
    at, is_rule = 0, False
    while (match := _PIECE.search(source, at)) is not None:
        yield source[at : match.start()]
        at, piece = match.end(), match[0]
        if match["head"] is not None:
            # Lark tells rules from terminals by their case alone.
            is_rule = match["name"].islower() and match["attributes"] is None
        elif match["json"] is not None:
            at = _end_of_object(source, match.end())
            piece = source[match.start() : at]
        elif match["text"] is not None and is_rule and not piece.endswith("i"):
            piece = _replaced(piece, tokens)
        yield piece
    yield source[at:]


def _replaced(quoted: str, tokens: Tokens) -> str:
    """Return a quoted text of a rule."""
    try:
        text = json.loads(quoted)
    except ValueError:  # escapes that are Lark's alone
        return quoted
    return f"({literal(text, tokens)})" if any(name in text for name in tokens) else quoted


def _end_of_object(source: str, start: int) -> int:
    """Return the place behind the brace that closes the one before `start`; braces in quoted texts do not count."""
    depth = 1
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[{}]').finditer(source, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.end()
    return len(source)


def regex_with_tokens(source: str, tokens: Tokens) -> str | None:
    """Return a regular expression as a grammar in Lark with the tokens by their ids; None if it has none that can be
    replaced."""
    tokens = tokens_in(source, tokens)
    cuts = _cuts(source, tokens) if tokens else []
    if not cuts:
        return None
    parts, at = [], 0
    for place, name in cuts:
        parts += [source[at:place], name]
        at = place + len(name)
    parts.append(source[at:])
    shown = (f"<[{tokens[part]}]>" if part in tokens else f"/{_slashed(part)}/" for part in parts if part)
    return f"start: {' '.join(shown)}"


def _cuts(source: str, tokens: Tokens) -> list[tuple[int, str]]:
    """Return the places of tokens outside groups and classes; none if alternatives or flags are there, too."""
    cuts: list[tuple[int, str]] = []
    depth, at, in_class = 0, 0, False
    while at < len(source):
        character = source[at]
        name = next((name for name in tokens if source.startswith(name, at)), None)
        # Whatever is escaped stands for itself, here and in a class.
        if character == "\\":
            at += 2
            continue
        if in_class:
            in_class = character != "]"
        elif name is not None and not depth and source[at + len(name) : at + len(name) + 1] not in _QUANTIFIERS:
            cuts.append((at, name))
            at += len(name)
            continue
        elif character == "[":
            in_class = True
            at += source.startswith("[]", at) + 2 * source.startswith("[^]", at)  # a first ] is a member
        elif not depth and _FLAGS.match(source, at):
            return []  # in a part of the expression the flags would be missing
        elif character in "()":
            depth += 1 if character == "(" else -1
        # An alternative would reach across the parts between the tokens.
        elif character == "|" and not depth:
            return []
        at += 1
    return cuts


def _slashed(pattern: str) -> str:
    """Return a regular expression for use between slashes."""
    return re.sub(
        r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.DOTALL
    )
