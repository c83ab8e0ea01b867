"""Python's literals as JSON: strings, numbers, True, False, None, and lists and dictionaries of these."""

import json
import re

from raydix.engine.core.ingress.parsers.json_call import is_json, is_unicode

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<word>True|False|None|true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
    |(?P<mark>[\[\]{}:,])""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


def json_of(literal: str) -> str | None:
    """The JSON text of a Python literal, or None if it is none of those that JSON can say."""
    tokens: list[str] = []
    position = 0
    while position < len(literal):
        found = _TOKEN.match(literal, position)
        if found is None:
            return None
        position = found.end()
        token = _json_token(found)
        if token is None:
            return None
        if token in ("]", "}") and tokens[-1:] == [", "] and tokens[-2:-1] not in (["["], ["{"]):
            tokens.pop()  # Python allows a comma behind the last element.
        if token:
            tokens.append(token)

    text = "".join(tokens)
    # Around it, a bare number or word is a value, too.
    return text if is_json(f"[{text}]") and not _is_several(tokens) else None


def _json_token(found: re.Match[str]) -> str | None:
    text = found[0]
    match found.lastgroup:
        case "space":
            return ""
        case "string":
            value = _ESCAPE.sub(_unescaped, text[1:-1])
            return json.dumps(value, ensure_ascii=False) if is_unicode(value) else None
        case "word":
            return _word(text)
        case _:
            return {",": ", ", ":": ": "}.get(text, text)


def _word(word: str) -> str:
    return {"True": "true", "False": "false", "None": "null"}.get(word, word)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else found[0]
    return {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0"}.get(code, found[0])


def _is_several(tokens: list[str]) -> bool:
    """True if commas stand outside all brackets, so that there are several values or none."""
    depth = 0
    for token in tokens:
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if depth == 0 and token == ", ":
            return True
    return not tokens
