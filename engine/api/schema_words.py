"""JSON schemas in words, for tables of fields."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema, as pydantic writes one for a model or one of its fields."""

# A bound's name in a JSON schema, and how a table says it.
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} elements",
    "maxItems": "at most {} elements",
    "pattern": "matches `{}`",
}


def resolve(root: Schema, field: Schema) -> Schema:
    """The definition that a field refers to, or the field itself."""
    if "$ref" not in field:
        return field
    found: Schema = root
    for step in field["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return found


def type_of(root: Schema, field: Schema) -> str:
    """A field's type in a few words; null is left out, since it always means the default."""
    if "anyOf" in field:
        kinds = [type_of(root, each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    resolved = resolve(root, field)
    if "enum" in resolved or "const" in resolved:
        values = resolved.get("enum", [resolved.get("const")])
        return ", ".join(f"`{value}`" for value in values if value is not None) or "null"
    if "properties" in resolved:
        return "object"
    kind = resolved.get("type")
    if kind == "array" and "items" in resolved:
        return f"list of {type_of(root, resolved['items'])}"
    names = {"array": "list", "object": "mapping", "boolean": "true or false", "number": "number", "integer": "integer"}
    return names.get(str(kind), str(kind or "any"))


def default(field: Schema) -> str:
    """A field's default in code quotes; nothing for null."""
    value = field.get("default")
    if value is None:
        return "" if "default" in field else "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def bounds(root: Schema, field: Schema) -> str:
    """A field's bounds, with the bounds of each kind of its values."""
    found = [
        words.format(f"{value:,}" if isinstance(value, int) else value)
        for each in (field, *(resolve(root, each) for each in field.get("anyOf", ())))
        for name, words in _BOUNDS.items()
        if (value := each.get(name)) is not None and not (name == "minLength" and value == 1)
    ]
    return ", ".join(dict.fromkeys(found))
