"""JSON values made by chance for a schema: many are valid under the schema, and others are valid but for one change.

A validator has the last word: the makers here know the usual keywords and guess at the rest. Objects have their keys in
the schema's order, as grammars want them.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any] | bool

MAX_DEPTH = 6
MAX_PARTS = 60
"""Levels, and parts of a value, after which everything optional is left out."""
MOST_DEPTH = 30
MOST_PARTS = 400
"""Levels, and parts of a value, after which a value is given up: the schema requires too much."""
PART_CHANGES = 0.75
"""Chance that a change of a value with parts is one of a part."""
TRIES = 8
"""Values made for each value wanted."""

FORMATS: dict[str, tuple[str, ...]] = {
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("23:59:59Z", "08:30:00+02:00"),
    "date-time": ("2024-02-29T12:00:00Z", "1999-12-31T23:59:59+01:00"),
    "uuid": ("123e4567-e89b-42d3-a456-426614174000",),
    "ipv4": ("192.168.0.1", "8.8.8.8"),
    "ipv6": ("2001:db8::1",),
    "email": ("ada@example.org", "a.b@mail.example.com"),
    "uri": ("https://example.org/a?b=c",),
    "hostname": ("www.example.org",),
}
"""Strings of each format."""
STRINGS = ("", "a", "abc", "yes", "no", "#00ff7f", "AB-123", "7", "a1b", "1.2.3", "größe ü", 'say "x"', "a\nb", "x y z")
"""Tried for patterns and taken for free text."""


@dataclass(frozen=True, slots=True)
class Instances:
    """JSON texts for one schema."""

    valid: list[str]
    invalid: list[str]


def make_instances(schema: Schema, is_valid: Callable[[object], bool], seed: int, count: int) -> Instances:
    """Make up to `count` different valid and as many invalid texts, as `is_valid` judges the values."""
    chance = Random(seed)
    maker = Maker(schema, chance)
    valid: dict[str, None] = {}
    invalid: dict[str, None] = {}
    for _ in range(TRIES * count):
        if len(valid) >= count and len(invalid) >= count:
            break
        try:
            value = maker.whole()
        except TooLarge:
            continue
        if not is_valid(value):
            continue
        valid.setdefault(text_of(value))
        for other in (changed(value, chance) for _ in range(3)):
            if not is_valid(other):
                invalid.setdefault(text_of(other))
    return Instances(list(valid)[:count], list(invalid)[:count])


def text_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class TooLarge(Exception):
    """A schema requires more of a value than texts are to have."""


class Maker:
    """Makes values for one schema."""

    def __init__(self, root: Schema, chance: Random) -> None:
        self._root = root
        self._chance = chance
        self._num_parts = 0

    def whole(self) -> Any:
        """Make a value that is probably valid. Raises TooLarge."""
        self._num_parts = 0
        return self.make(self._root, 0)

    def make(self, schema: Schema, depth: int) -> Any:
        """Make a value for a part of the schema."""
        self._num_parts += 1
        if self._num_parts > MOST_PARTS or depth > MOST_DEPTH:
            raise TooLarge
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._chance.choice(schema["enum"])
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                chosen = self._chance.choice(schema[keyword])
                rest = {name: value for name, value in schema.items() if name != keyword}
                return self.make(_both(rest, self._resolved(chosen)), depth)

        match self._type(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer":
                return self._integer(schema)
            case "number":
                return round(self._integer(schema) + self._chance.choice((0, 0.5, 0.25)), 3)
            case "boolean":
                return self._chance.random() < 0.5
            case _:
                return None

    def _resolved(self, schema: Schema, depth: int = 0) -> dict[str, Any]:
        """Follow references into the schema itself, and put the parts of `allOf` together."""
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return {}
        found = dict(schema)
        reference = found.pop("$ref", None)
        parts = [self._at(reference)] if isinstance(reference, str) else []
        for part in [*parts, *found.pop("allOf", ())]:
            found = _both(found, self._resolved(part, depth + 1))
        return found

    def _at(self, reference: str) -> Schema:
        place: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            place = place.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(place, dict) else {}
        return place if isinstance(place, dict) else {}

    def _type(self, schema: Mapping[str, Any]) -> str:
        named = schema.get("type")
        if isinstance(named, list):
            named = self._chance.choice(named)
        if named is None:
            keywords = {"properties": "object", "required": "object", "items": "array", "pattern": "string"}
            guesses = [name for keyword, name in keywords.items() if keyword in schema]
            named = guesses[0] if guesses else self._chance.choice(("string", "integer", "boolean", "null"))
        return str(named)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        share = 0.0 if self._is_large(depth) else 0.6
        made = {
            name: self.make(each, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if name in required or self._chance.random() < share
        }
        further = schema.get("additionalProperties", True)
        for name in required:
            if name not in made:
                made[name] = self.make(further, depth + 1)
        if further is not False and self._chance.random() < share / 3:
            made["zz"] = self.make(further, depth + 1)
        return made

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", least + 2)
        length = least if self._is_large(depth) else self._chance.randint(least, max(least, min(most, least + 3)))
        items = schema.get("items", True)
        firsts = items if isinstance(items, list) else schema.get("prefixItems", [])
        further = True if isinstance(items, list) else items
        return [self.make(firsts[at] if at < len(firsts) else further, depth + 1) for at in range(length)]

    def _is_large(self, depth: int) -> bool:
        return depth >= MAX_DEPTH or self._num_parts >= MAX_PARTS

    def _string(self, schema: Mapping[str, Any]) -> str:
        if schema.get("format") in FORMATS:
            return self._chance.choice(FORMATS[schema["format"]])
        if "pattern" in schema:
            return self._chance.choice([text for text in STRINGS if re.search(schema["pattern"], text)] or STRINGS)
        text = self._chance.choice(STRINGS)
        least: int = schema.get("minLength", 0)
        most: int = schema.get("maxLength", least + 30)
        return (text + "lorem ipsum dolor " * (least // 18 + 1))[: self._chance.randint(least, min(most, least + 40))]

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low, high = schema.get("minimum"), schema.get("maximum")
        if (above := _bound(schema, "exclusiveMinimum")) is not None:
            low = above + 1
        if (below := _bound(schema, "exclusiveMaximum")) is not None:
            high = below - 1
        if low is None:
            low = -20 if high is None else high - 40
        least = math.ceil(low)
        made = self._chance.randint(least, max(least, math.floor(low + 2000 if high is None else high)))
        step = schema.get("multipleOf", 1)
        return made // step * step if isinstance(step, int) else made


def changed(value: Any, chance: Random) -> Any:
    """A copy of a value, changed at one place: the value itself, or somewhere in one of its parts."""
    if isinstance(value, dict | list) and value and chance.random() < PART_CHANGES:
        copied: Any = dict(value) if isinstance(value, dict) else list(value)
        place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copied[place] = changed(value[place], chance)
        return copied
    return _other(value, chance)


def _other(old: Any, chance: Random) -> Any:
    """Return another value of the same type, or one of another type."""
    others: list[Any] = [None, True, -7, 1e6 + 0.5, "?", [], {}]
    match old:
        case dict():
            kept = list(old)
            chance.shuffle(kept)
            others += [{**old, "unheard of": 1}, {name: old[name] for name in old if name not in kept[:1]}]
        case list():
            others += [[*old, *old[:1], 0.5], old[:-1], [*old, "?"]]
        case str():
            others += [f"{old}{old}!", old[:-1], f" {old}", old.upper(), "x" * 60]
        case bool() | None:
            others += [0, "null"]
        case int() | float():
            others += [old + 10_000, old - 10_000, old + 0.5, str(old)]
    return chance.choice([other for other in others if text_of(other) != text_of(old)])


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Put two schemas together; where both say something else about a keyword, the second one is kept."""
    joined = {**first, **second}
    if "properties" in first and "properties" in second:
        joined["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        joined["required"] = [*first["required"], *second["required"]]
    return joined


def _bound(schema: Mapping[str, Any], keyword: str) -> float | None:
    """The value of an exclusive bound; in old drafts the keyword was a boolean, and the bound a keyword of its own."""
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
