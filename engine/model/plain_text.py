"""Keeps the names of special tokens in a chat's messages plain text.

A chat template writes special tokens around messages, and a tokenizer knows them by their names alone, so a message
with the name of a special token would begin a turn of its own. Before a template is rendered, a mark (a character that
no message has) is put into each such name inside a message; a name without a mark is the template's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Characters without a meaning of their own, which nearly no text has.
PRIVATE_USE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)


@dataclass(frozen=True, slots=True)
class MarkedChat:
    """Messages, and functions that they may call, in which `mark` stands in the names of special tokens; without any
    name there is no mark."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    mark: str | None = None


def names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern for the names of special tokens, longer ones first; names of one character cannot be marked."""
    longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def mark_names(
    messages: Sequence[Mapping[str, Any]], names: re.Pattern[str], tools: Sequence[Mapping[str, Any]] = ()
) -> MarkedChat:
    """Mark the names of special tokens in messages, except in their roles and their own keys, and in functions."""
    if not any(names.search(text) for text in _texts([*messages, *tools])):
        return MarkedChat(messages, tools)
    mark = _unused_character(_texts([*messages, *tools]))
    marked = [
        {key: value if key == "role" else _marked(value, names, mark) for key, value in message.items()}
        for message in messages
    ]
    return MarkedChat(marked, [_marked(tool, names, mark) for tool in tools], mark)


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _unused_character(texts: Iterable[str]) -> str:
    used = set[str]().union(*texts)
    return next(chr(code) for area in PRIVATE_USE for code in area if chr(code) not in used)


def _marked(value: Any, names: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        # A mark that breaks one name may let another appear that overlaps with it, which needs its own.
        while names.search(value):
            value = names.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        return value
    if isinstance(value, Mapping):
        return {_marked(key, names, mark): _marked(item, names, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, names, mark) for item in value]
    return value
