"""JSON Schemas made by chance, of the kind that clients send: the same number always makes the same schema."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

WORDS = ("id", "name", "city", "unit", "tags", "score", "items", "note", "kind", "owner", "start", "größe")
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^#[0-9a-f]{6}$", "[0-9]")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
MAX_DEPTH = 3


def made_schema(number: int) -> Schema:
    """Make a schema whose root is an object."""
    chance = Random(number)
    schema = _object(chance, 0)
    if number % 5 == 0:
        schema["$defs"] = {"node": _node(chance)}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"] = [*schema.get("required", ()), "tree"]
    return schema


def _any(chance: Random, depth: int) -> Schema:
    leaves: list[Callable[[Random, int], Schema]] = [_string, _integer, _number, _values, _flag]
    branches = [_object, _array, _alternatives, _both]
    return chance.choice(leaves if depth >= MAX_DEPTH else [*leaves, *branches])(chance, depth + 1)


def _object(chance: Random, depth: int) -> Schema:
    names = chance.sample(WORDS, chance.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(chance, depth) for name in names}}
    schema["required"] = [name for name in names if chance.random() < 0.7]
    if chance.random() < 0.8:
        schema["additionalProperties"] = False
    elif chance.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _array(chance: Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(chance, depth), "minItems": least}
    schema["maxItems"] = least + chance.randint(0, 3)
    if chance.random() < 0.2:
        schema["prefixItems"] = [_any(chance, depth)]
    return schema


def _alternatives(chance: Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth), {"type": "null"}, _string(chance, depth)][: chance.randint(2, 3)]}


def _both(chance: Random, depth: int) -> Schema:
    first, second = _object(chance, MAX_DEPTH), _object(chance, MAX_DEPTH)
    for schema in (first, second):
        schema.pop("additionalProperties", None)
    second["properties"] = {f"{name}2": each for name, each in second["properties"].items()}
    second["required"] = [f"{name}2" for name in second["required"]]
    return {"allOf": [first, second]}


def _string(chance: Random, depth: int) -> Schema:
    match chance.randrange(4):
        case 0:
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": chance.choice(FORMATS)}
        case 2:
            least = chance.randint(0, 5)
            return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 20)}
    return {"type": ["string", "null"], "description": "free text"}


def _integer(chance: Random, depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    if chance.random() < 0.6:
        schema["minimum"] = chance.randint(-1000, 1000)
        schema["exclusiveMaximum"] = schema["minimum"] + chance.randint(2, 5000)
    elif chance.random() < 0.5:
        schema["multipleOf"] = chance.choice((2, 5, 10))
    return schema


def _number(chance: Random, depth: int) -> Schema:
    low = chance.choice((-10, 0, 0.5))
    return {"type": "number", "minimum": low, "maximum": low + chance.choice((1, 2.5, 1000))}


def _values(chance: Random, depth: int) -> Schema:
    values: list[Any] = ["red", "green", "blau ü", 'quoted "x"', 1, 2.5, None, True, [1], {"a": "b"}]
    chosen = chance.sample(values, chance.randint(1, 4))
    return {"const": chosen[0]} if len(chosen) == 1 else {"enum": chosen}


def _flag(chance: Random, depth: int) -> Schema:
    return {"type": chance.choice(("boolean", "null", ["boolean", "integer"]))}


def _node(chance: Random) -> Schema:
    """A schema that refers to itself."""
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": chance.randint(0, 2)}
    properties = {"label": _string(chance, MAX_DEPTH), "children": children}
    return {"type": "object", "properties": properties, "required": ["label"], "additionalProperties": False}
