"""Structural tags: free text with prescribed parts, or prescribed parts alone.

`triggers` and `structures` are text with, behind a trigger, one of the structures: `begin`, JSON under `schema`, `end`.
A `format` is one of xgrammar's: `triggered_tags`, which is the same with any contents; `tags_with_separator`, `tag`,
`sequence` and `or`; as parts `json_schema`, `const_string`, and `any_text` in a tag; as whole answers `regex` and
`grammar`, too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydix.engine.api.grammars import require, schema_grammar, short, source_of, unicode_of, written_grammar
from raydix.engine.api.validation import describe
from raydix.engine.core.types import Grammar, GrammarKind

MAX_STRUCTURES = 128
MAX_NESTED = 16  # levels of a format
TAG_KEYS = ("type", "triggers", "structures", "at_least_one", "stop_after_first", "format")
_STRUCTURE_KEYS = ("begin", "schema", "end")
_FLAGS = ("at_least_one", "stop_after_first")
Node = dict[str, Any]
"""A format in normal form."""


def tag_grammar(tag: Mapping[str, Any], param: str) -> Grammar:
    """Return the grammar of a structural tag. Raises RequestError naming the place at fault."""
    _require_known(tag, TAG_KEYS, param)
    require(None if tag.get("type") in (None, "structural_tag") else "must be 'structural_tag'", f"{param}.type")
    if tag.get("format") is None:
        return _grammar_of_structures(tag, param)
    both = next((name for name in ("triggers", "structures", *_FLAGS) if tag.get(name)), None)
    require(None if both is None else "is not allowed beside 'format'", f"{param}.{both}")
    return _grammar_of_format(tag["format"], f"{param}.format")


def _grammar_of_structures(tag: Mapping[str, Any], param: str) -> Grammar:
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if not _are(triggers, str) or not all(triggers or ()):
        require("must be a list of strings that are not empty", f"{param}.triggers")
    if not _are(structures, Mapping) or not structures or len(structures) > MAX_STRUCTURES:
        require(f"must be a list of 1 to {MAX_STRUCTURES} objects", f"{param}.structures")

    assert isinstance(structures, Sequence) and isinstance(triggers, Sequence)
    normal = [_structure(each, triggers, f"{param}.structures[{i}]") for i, each in enumerate(structures)]
    source = source_of({"triggers": list(triggers), "structures": normal, **_flags(tag, param)}, param)
    return Grammar(GrammarKind.STRUCTURAL_TAG, source)


def _structure(structure: Mapping[str, Any], triggers: Sequence[str], param: str) -> dict[str, Any]:
    """Check one structure of a structural tag, and return its normal form."""
    begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
    _require_known(structure, _STRUCTURE_KEYS, param)
    # Otherwise nothing could ever lead into the structure: it would be prescribed in vain.
    if not isinstance(begin, str) or not any(begin.startswith(trigger) for trigger in triggers):
        require("must be a string that begins with one of the triggers", f"{param}.begin")
    if not isinstance(end, str):
        require(f"must be a string, got {describe(end)}", f"{param}.end")
    if schema is not None and not isinstance(schema, Mapping):
        require(f"must be an object, got {describe(schema)}", f"{param}.schema")
    grammar = schema_grammar(schema or {}, f"{param}.schema")
    return {"begin": begin, "schema": json.loads(grammar.source), "end": end}


def _grammar_of_format(value: object, param: str) -> Grammar:
    """Return the grammar of a format; the parts that are whole answers have one of their own."""
    if not isinstance(value, Mapping):
        require(f"must be an object, got {describe(value)}", param)
    assert isinstance(value, Mapping)
    match value.get("type"):
        case "json_schema":
            return schema_grammar(_schema_of(value, param), f"{param}.json_schema")
        case "const_string":
            choices = [_constant(value, param, 0)["value"]]
            # A choice of one: the answer is this text.
            return Grammar(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))
        case "regex":
            _require_known(value, ("type", "pattern"), param)
            return Grammar(GrammarKind.REGEX, _text(value, "pattern", param))
        case "grammar":
            _require_known(value, ("type", "grammar"), param)
            return written_grammar(_text(value, "grammar", param), f"{param}.grammar")
        case "triggered_tags":
            node = _triggered(value, param)
        case _:
            node = _node(value, param)
    return Grammar(GrammarKind.STRUCTURAL_TAG, source_of({"format": node}, param))


def _node(value: object, param: str, level: int = 0) -> Node:
    """Return the normal form of a part of a format."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if not isinstance(value, Mapping) or reader is None:
        require(f"is not supported here, got {describe(kind)}", f"{param}.type")
    # Checked before the parts are read, as reading recurses.
    require("is nested too deeply" if level > MAX_NESTED else None, param)
    assert isinstance(value, Mapping) and reader is not None
    return {"type": kind, **reader(value, param, level + 1)}


def _schema(value: Mapping[str, Any], param: str, level: int) -> Node:
    grammar = schema_grammar(_schema_of(value, param), f"{param}.json_schema")
    return {"json_schema": json.loads(grammar.source)}


def _constant(value: Mapping[str, Any], param: str, level: int) -> Node:
    _require_known(value, ("type", "value"), param)
    return {"value": _text(value, "value", param)}


def _elements(value: Mapping[str, Any], param: str, level: int) -> Node:
    _require_known(value, ("type", "elements"), param)
    return {"elements": _nodes(value, "elements", param, level)}


def _tag(value: Mapping[str, Any], param: str, level: int) -> Node:
    """Return `begin`, the content (None for any text) and all possible ends."""
    _require_known(value, ("type", "begin", "content", "end"), param)
    end = value.get("end")
    ends = [end] if isinstance(end, str) else end
    if not _are(ends, str) or not ends:
        require("must be a string or a list of strings", f"{param}.end")
    assert isinstance(ends, list)
    content = value.get("content")
    if isinstance(content, Mapping) and content.get("type") == "any_text":
        _require_known(content, ("type",), f"{param}.content")
        # Any text ends where its end begins, and an empty end would begin at once.
        require(None if all(ends) else "must not be empty behind any text", f"{param}.end")
        return {"begin": _text(value, "begin", param), "content": None, "end": ends}
    return {"begin": _text(value, "begin", param), "content": _node(content, f"{param}.content", level), "end": ends}


def _separated(value: Mapping[str, Any], param: str, level: int) -> Node:
    _require_known(value, ("type", "tags", "separator", *_FLAGS), param)
    separator = value.get("separator")
    require(
        None if isinstance(separator, str) else f"must be a string, got {describe(separator)}", f"{param}.separator"
    )
    return {"tags": _tags(value, param, level), "separator": separator, **_flags(value, param)}


def _triggered(value: Mapping[str, Any], param: str) -> Node:
    """Return the normal form of tags that triggers begin, which is always a whole format."""
    _require_known(value, ("type", "triggers", "tags", *_FLAGS), param)
    triggers = value.get("triggers")
    if not _are(triggers, str) or not all(triggers or ()):
        require("must be a list of strings that are not empty", f"{param}.triggers")
    assert isinstance(triggers, list)
    tags = _tags(value, param, level=0)
    for index, tag in enumerate(tags):
        if not any(tag["begin"].startswith(trigger) for trigger in triggers):
            require("must begin with one of the triggers", f"{param}.tags[{index}].begin")
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **_flags(value, param)}


def _tags(value: Mapping[str, Any], param: str, level: int) -> list[Node]:
    """Return the tags of a format, whose type may be left out."""
    tags = value.get("tags")
    if _are(tags, Mapping):
        value = {"tags": [{"type": "tag", **tag} for tag in tags or ()]}
    nodes = _nodes(value, "tags", param, level)
    other = next((index for index, node in enumerate(nodes) if node["type"] != "tag"), None)
    require(None if other is None else "must be 'tag'", f"{param}.tags[{other}].type")
    return nodes


def _nodes(value: Mapping[str, Any], name: str, param: str, level: int) -> list[Node]:
    parts = value.get(name)
    if not isinstance(parts, list) or not 0 < len(parts) <= MAX_STRUCTURES:
        require(f"must be a list of 1 to {MAX_STRUCTURES} objects", f"{param}.{name}")
    assert isinstance(parts, list)
    return [_node(part, f"{param}.{name}[{index}]", level) for index, part in enumerate(parts)]


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, int], Node]] = {
    "json_schema": _schema,
    "const_string": _constant,
    "sequence": _elements,
    "or": _elements,
    "tag": _tag,
    "tags_with_separator": _separated,
}


def _schema_of(value: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Return the schema of a part of JSON."""
    if value.get("style") == "json":
        value = {name: each for name, each in value.items() if name != "style"}
    _require_known(value, ("type", "json_schema"), param)
    schema = value.get("json_schema")
    if not isinstance(schema, Mapping):
        require(f"must be an object, got {describe(schema)}", f"{param}.json_schema")
    assert isinstance(schema, Mapping)
    return schema


def _text(value: Mapping[str, Any], name: str, param: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        require("must be a string that is not empty", f"{param}.{name}")
    return short(unicode_of(str(text), f"{param}.{name}"), f"{param}.{name}")


def _flags(value: Mapping[str, Any], param: str) -> dict[str, bool]:
    return {name: True for name in _FLAGS if _flag(value, name, param)}


def _require_known(value: Mapping[str, Any], names: Sequence[str], param: str) -> None:
    """Raise RequestError for a key that could change the answer and is not supported."""
    # Keys with an empty value say nothing; clients send them for all fields that their library knows.
    unknown = next((name for name, each in value.items() if name not in names and each not in (None, False, [])), None)
    if unknown is not None:
        require("is not supported yet", f"{param}.{unknown}")


def _flag(value: Mapping[str, Any], name: str, param: str) -> bool:
    """Return a flag of an object; false where there is none."""
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        require(f"must be true or false, got {describe(flag)}", f"{param}.{name}")
    return bool(flag)


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)
