"""A value against a JSON Schema, as far as a call can be told from other JSON by it.

Known are `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `anyOf`, `oneOf`, `allOf`
and references to the schema's own definitions. Any other keyword allows everything: a call that breaks it is a call
with bad arguments, and no text.
"""

from collections.abc import Mapping, Sequence

Schema = Mapping[str, object]

MAX_DEPTH = 64  # levels of values and of references; what lies deeper fits
# Schemas, values and names that one check looks at, in about 10 ms. The depth alone is no limit: a schema that refers
# to itself twice doubles the work at each level.
MAX_STEPS = 10_000


def fits(value: object, schema: Schema) -> bool:
    """True unless `MAX_STEPS` are enough to find that the schema forbids a JSON value."""
    try:
        return _Check(schema).fits(value, schema, MAX_DEPTH)
    except _StepsUsedUpError:
        # A call: the object has the name of an offered function, and nothing was found to forbid its arguments. Clients
        # have to check the arguments of calls anyway, but would show a call that comes as text to their users.
        return True


class _StepsUsedUpError(Exception):
    """A check has taken `MAX_STEPS`."""


class _Check:
    """One check. Its methods raise _StepsUsedUpError."""

    def __init__(self, root: Schema) -> None:
        self._root = root  # the schema in which references begin
        self._num_steps = 0

    def fits(self, value: object, schema: object, depth: int) -> bool:
        self._step()
        if not isinstance(schema, Mapping):
            return schema is not False
        if not depth:
            return True
        # Words beside a reference are passed over: a call that breaks them has bad arguments, and is no text.
        if isinstance(reference := schema.get("$ref"), str):
            return self.fits(value, self._target(reference), depth - 1)

        if not self._has_type(value, schema.get("type")):
            return False
        if "const" in schema and not self._equal(value, schema["const"], depth):
            return False
        allowed = schema.get("enum")
        if isinstance(allowed, list) and not any(self._equal(value, each, depth) for each in allowed):
            return False

        # `oneOf` as `anyOf`: a value that fits two of them is a call with bad arguments, too.
        for word, combined in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            parts = schema.get(word)
            if isinstance(parts, list) and not combined(self.fits(value, part, depth - 1) for part in parts):
                return False
        if isinstance(value, Mapping):
            return self._object_fits(value, schema, depth - 1)
        if isinstance(value, list):
            items = schema.get("items")
            return all(self.fits(each, items, depth - 1) for each in value)
        return True

    def _object_fits(self, value: Mapping[str, object], schema: Schema, depth: int) -> bool:
        required = schema.get("required")
        if isinstance(required, list):
            self._step(len(required))
            # Only a string is the name of a property; a list, say, cannot even be looked up.
            if not all(name in value for name in required if isinstance(name, str)):
                return False
        properties = schema.get("properties")
        known: Schema = properties if isinstance(properties, Mapping) else {}
        others = schema.get("additionalProperties")
        return all(self.fits(each, known.get(name, others), depth) for name, each in value.items())

    def _target(self, reference: str) -> object:
        """Return the definition that a reference such as `#/$defs/point` names; None, which allows everything, for any
        other reference."""
        found: object = self._root
        first, *path = reference.split("/")
        if first != "#":
            return None
        self._step(len(path))
        for name in path:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found

    def _has_type(self, value: object, asked: object) -> bool:
        kinds: Sequence[object] = asked if isinstance(asked, list) else [asked]
        self._step(len(kinds))
        return any(_is_of(value, kind) for kind in kinds)

    def _equal(self, value: object, other: object, depth: int) -> bool:
        """True for equal JSON values; true is no 1."""
        self._step()
        if not depth:
            return True
        if isinstance(value, list) and isinstance(other, list):
            pairs = zip(value, other, strict=False)
            return len(value) == len(other) and all(self._equal(*pair, depth - 1) for pair in pairs)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            self._step(len(value))
            is_alike = value.keys() == other.keys()
            return is_alike and all(self._equal(each, other[name], depth - 1) for name, each in value.items())
        # In Python true equals 1; in JSON it does not.
        return value == other and isinstance(value, bool) == isinstance(other, bool)

    def _step(self, num: int = 1) -> None:
        self._num_steps += num
        if self._num_steps > MAX_STEPS:
            raise _StepsUsedUpError


def _is_of(value: object, kind: object) -> bool:
    if kind in ("integer", "number"):
        # JSON Schema takes 1.0 for an integer.
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (is_whole or (kind == "number" and isinstance(value, float)))
    known = {"object": Mapping, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return not isinstance(kind, str) or kind not in known or isinstance(value, known[kind])
