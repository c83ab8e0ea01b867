"""JSON Schemas as values: their subschemas, their bounds, and the rules that OpenAI calls strict."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from raydix.engine.api.validation import describe

MAX_DEPTH = 64  # nesting of a schema's JSON
MAX_STRICT_PROPERTIES = 5000
MAX_STRICT_DEPTH = 10  # objects within objects of a strict schema
MAX_STRICT_ENUM_VALUES = 1000

_IN_MAPPINGS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_DIRECT = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_NOT_STRICT = (
    "allOf",
    "oneOf",
    "not",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "if",
    "then",
    "else",
    "patternProperties",
)

Schema: TypeAlias = Mapping[str, Any]


class Subschema(NamedTuple):
    """A schema inside another one."""

    path: str
    """Place below the outermost schema: "" or ".properties.x.items"."""
    schema: Schema
    depth: int
    """Number of schemas around the subschema that describe an object's properties."""


def children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly inside a schema, each with its place below; true and false are passed over."""
    for keyword in _IN_MAPPINGS:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield from ((f".{keyword}.{name}", each) for name, each in value.items() if isinstance(each, Mapping))
    for keyword in _IN_LISTS:
        value = schema.get(keyword)
        if isinstance(value, list | tuple):
            yield from ((f".{keyword}[{i}]", each) for i, each in enumerate(value) if isinstance(each, Mapping))
    for keyword in _DIRECT:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield f".{keyword}", value


def subschemas(schema: Schema) -> Iterator[Subschema]:
    """Yield a schema and all schemas inside, outer ones first."""
    stack = [Subschema("", schema, 0)]
    while stack:
        each = stack.pop()
        yield each
        inside = [
            Subschema(each.path + path, child, each.depth + path.startswith(".properties."))
            for path, child in children(each.schema)
        ]
        # Reversed, so that the first child is taken off first: places are found in the order of the text.
        stack += reversed(inside)


def shape_finding(value: object) -> str | None:
    """Return the finding about a JSON value with too deep a nesting, or with keys other than strings."""
    # Level by level and not by recursion: the value is a client's, and may be nested deeper than the stack is.
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(each, Mapping) and not all(isinstance(key, str) for key in each) for each in level):
            return "must have strings as keys"
        level = [inside for each in level for inside in _values(each)]
        if not level:
            return None
    return f"must not be nested deeper than {MAX_DEPTH} levels"


def _values(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def closed(schema: Schema) -> dict[str, Any]:
    """Copy a schema so that objects with described properties have no others, unless their schema says otherwise."""
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _IN_MAPPINGS and isinstance(value, Mapping):
            copy[keyword] = {name: _closed_if_schema(each) for name, each in value.items()}
        elif keyword in _IN_LISTS and isinstance(value, list | tuple):
            copy[keyword] = [_closed_if_schema(each) for each in value]
        else:
            copy[keyword] = _closed_if_schema(value) if keyword in _DIRECT else value
    if "properties" in copy or copy.get("type") == "object":
        copy.setdefault("additionalProperties", False)
    return copy


def _closed_if_schema(value: Any) -> Any:
    return closed(value) if isinstance(value, Mapping) else value


def strict_finding(schema: Schema) -> tuple[str, str] | None:
    """Return the first place at which a schema breaks OpenAI's rules for `strict`, and the predicate for it."""
    if schema.get("type") != "object":
        return "", f"must have 'type': 'object' because 'strict' is true, got {describe(schema.get('type'))}"
    num_properties = num_values = 0
    for path, each, depth in subschemas(schema):
        predicate = _strict_predicate(each, depth, is_root=not path)
        if predicate is not None:
            return path, predicate
        num_properties += len(_mapping(each, "properties"))
        values = each.get("enum")
        num_values += len(values) if isinstance(values, list) else 0

    if num_properties > MAX_STRICT_PROPERTIES:
        return "", f"must have at most {MAX_STRICT_PROPERTIES} properties because 'strict' is true"
    if num_values > MAX_STRICT_ENUM_VALUES:
        return "", f"must have at most {MAX_STRICT_ENUM_VALUES} 'enum' values because 'strict' is true"
    return None


def _strict_predicate(schema: Schema, depth: int, *, is_root: bool) -> str | None:
    """Return the rule broken by one subschema by itself."""
    if is_root and "anyOf" in schema:
        return "must not have 'anyOf' at its root because 'strict' is true"
    for keyword in _NOT_STRICT:
        if keyword in schema:
            return f"must not have '{keyword}' because 'strict' is true"
    if depth > MAX_STRICT_DEPTH:
        return f"must not be nested deeper than {MAX_STRICT_DEPTH} levels because 'strict' is true"

    kinds = schema.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in schema
    if not is_object:
        return None
    if schema.get("additionalProperties") is not False:
        return "must have 'additionalProperties': false because 'strict' is true"
    required = schema.get("required")
    missing = set(_mapping(schema, "properties")).difference(required if isinstance(required, list) else ())
    if missing:
        return f"must have all properties in 'required' because 'strict' is true, and lacks '{min(missing)}'"
    return None


def _mapping(schema: Schema, keyword: str) -> Schema:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}
