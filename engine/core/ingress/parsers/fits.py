"""A value against a JSON Schema, as far as a call can be told from other JSON by it.

Known are `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `anyOf`, `oneOf`, `allOf`
and references to the schema's own definitions. Any other keyword allows everything: a call that breaks it is a call
with bad arguments, and no text.
"""

from collections.abc import Mapping, Sequence

Schema = Mapping[str, object]

MAX_DEPTH = 64
"""Levels of values and of references; what lies deeper fits."""


def fits(value: object, schema: Schema) -> bool:
    """True unless the schema certainly forbids a JSON value."""
    return _fits(value, schema, schema, MAX_DEPTH)


def _fits(value: object, schema: object, root: Schema, depth: int) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    if not depth:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        return _fits(value, _target(reference, root), root, depth - 1)

    if not _has_type(value, schema.get("type")):
        return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    allowed = schema.get("enum")
    if isinstance(allowed, list) and not any(_equal(value, each) for each in allowed):
        return False

    for word, combined in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(word)
        if isinstance(parts, list) and not combined(_fits(value, part, root, depth - 1) for part in parts):
            return False
    if isinstance(value, Mapping):
        return _object_fits(value, schema, root, depth - 1)
    if isinstance(value, list):
        items = schema.get("items")
        return all(_fits(each, items, root, depth - 1) for each in value)
    return True


def _object_fits(value: Mapping[str, object], schema: Schema, root: Schema, depth: int) -> bool:
    required = schema.get("required")
    if isinstance(required, list) and not all(name in value for name in required):
        return False
    properties = schema.get("properties")
    known: Schema = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties")
    return all(_fits(each, known.get(name, others), root, depth) for name, each in value.items())


def _target(reference: str, root: Schema) -> object:
    """Return the definition that a reference such as `#/$defs/point` names; None, which allows everything, for any
    other reference."""
    found: object = root
    first, *path = reference.split("/")
    if first != "#":
        return None
    for name in path:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _has_type(value: object, asked: object) -> bool:
    kinds: Sequence[object] = asked if isinstance(asked, list) else [asked]
    return any(_is_of(value, kind) for kind in kinds)


def _is_of(value: object, kind: object) -> bool:
    if kind in ("integer", "number"):
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (is_whole or (kind == "number" and isinstance(value, float)))
    known = {"object": Mapping, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return not isinstance(kind, str) or kind not in known or isinstance(value, known[kind])


def _equal(value: object, other: object) -> bool:
    """True for equal JSON values; true is no 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
