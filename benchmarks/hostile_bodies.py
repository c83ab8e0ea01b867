"""Bodies with one field at its limit, for every field of every POST route, made from a server's OpenAPI document.

A new field or route needs nothing here: bounds come from its schema. A field without a bound gets a value as long as
the body may be, and one as long as the model's context, which more of the server's code gets to see. Tables below name
the few fields whose text is a language of its own, or whose limit matters only beside another field.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydix.engine.api.spec import MAX_LISTED

Schema = Mapping[str, Any]
Value = tuple[str, Any]
"""A value, behind a label that says what is extreme in it."""

ROOM = 4096  # bytes of a body for everything but the field at its limit
DEPTH = 20_000  # levels of a deep value: above what any recursive reader takes
NESTED = 6  # levels at which fields of objects in objects are still told apart
UNBOUNDED = 1 << 62
SMALL_DEPTH = 24  # levels of a deep value that readers do take
READ_DEPTH = 900  # levels that orjson reads, up to 1,024, and does not write, beyond 254


@dataclass(frozen=True, slots=True)
class HostileBody:
    """One request. `field` is the body's top-level field at its limit, `case` the nested field and what is extreme."""

    path: str
    field: str
    case: str
    described_type: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.path} {self.case}"

    @property
    def content_type(self) -> str:
        is_form = self.described_type.startswith("multipart/")
        return f"{self.described_type}; boundary={BOUNDARY}" if is_form else self.described_type

    def data(self) -> bytes:
        """The bytes to send, made at each call: a body that is passed over costs little."""
        return _encoded(self.body, self.described_type)


@dataclass(frozen=True, slots=True)
class BodySizes:
    """Limits of the server that its document does not have."""

    max_body_bytes: int = 4 << 20
    context: int = 512
    """Tokens."""
    vocabulary: int = 49_152
    """Tokens of the default model."""

    @property
    def value_bytes(self) -> int:
        return self.max_body_bytes - ROOM


def hostile_bodies(document: Schema, sizes: BodySizes) -> Iterator[HostileBody]:
    """Yield the bodies, one at a time as each may be as large as the limit. `document`: as `/openapi.json` has it."""
    maker = _Maker(document["components"]["schemas"], sizes)
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        for content_type, described in content.items():
            for schema in maker.kinds(described["schema"]):
                yield from _bodies(maker, path, content_type, schema)


def fields_of(document: Schema) -> set[tuple[str, str]]:
    """Each POST route's path with each top-level field of its bodies."""
    maker = _Maker(document["components"]["schemas"], BodySizes())
    return {
        (path, field)
        for path, operations in document["paths"].items()
        for described in operations.get("post", {}).get("requestBody", {}).get("content", {}).values()
        for schema in maker.kinds(described["schema"])
        for field in schema["properties"]
    }


def _bodies(maker: "_Maker", path: str, content_type: str, schema: Schema) -> Iterator[HostileBody]:
    for field, field_schema in schema["properties"].items():
        for label, value in maker.values(field_schema, field):
            body = maker.least(schema) | maker.beside(schema, field) | BESIDE.get(path, {}) | {field: value}
            yield HostileBody(path, field, f"{field}{label}", content_type, body)


class _Maker:
    """Makes values of schemas: the least that is valid, and the most."""

    def __init__(self, schemas: Schema, sizes: BodySizes) -> None:
        self._schemas = schemas
        self._sizes = sizes

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def kinds(self, schema: Schema) -> list[Schema]:
        """The schemas of which a value satisfies one, without null."""
        schema = self.resolved(schema)
        if "properties" in schema or not (choices := schema.get("anyOf") or schema.get("oneOf")):
            return [schema]
        found = [kind for choice in choices for kind in self.kinds(choice)]
        return [kind for kind in found if kind.get("type") != "null"]

    def least(self, schema: Schema) -> Any:
        """A small valid value."""
        schema = self.kinds(schema)[0]
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return next((each for each in schema["enum"] if each is not None), None)
        match schema.get("type"):
            case "object":
                # a schema may ask for one of several fields: the first will do
                ways: Sequence[Schema] = schema.get("oneOf") or schema.get("anyOf") or ({},)
                required = [*schema.get("required", ()), *ways[0].get("required", ())]
                least = {name: self.least(schema["properties"][name]) for name in required}
                # a message needs its text, which its schema leaves out as calls may stand in its place
                if {"role", "content"} <= schema.get("properties", {}).keys():
                    least |= {"role": "user", "content": "a"}
                return least
            case "array":
                return [self.least(schema.get("items", {}))] * max(1, schema.get("minItems", 0))
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
            case "boolean":
                return True
        return "a"

    def beside(self, schema: Schema, field: str) -> dict[str, Any]:
        """Further fields of a body under which the field at its limit has work to do."""
        properties = schema["properties"]
        wanted: dict[str, Any] = {"max_tokens": 16}
        if field in ANSWER_SIZES:
            # as many tokens as may have all their log-probabilities
            wanted = {"max_tokens": MAX_LISTED // self._sizes.vocabulary, "ignore_eos": True}
            if field != "logprobs" and any(
                kind.get("type") == "boolean" for kind in self._kinds_of(schema, "logprobs")
            ):
                wanted["logprobs"] = True
        if field == "tool_choice" and "tools" in properties:
            wanted["tools"] = self.least(properties["tools"])
        return {name: value for name, value in wanted.items() if name in properties}

    def _kinds_of(self, schema: Schema, name: str) -> list[Schema]:
        return self.kinds(schema["properties"][name]) if name in schema["properties"] else []

    def values(self, schema: Schema, name: str, level: int = 0) -> Iterator[Value]:
        """Yield the extreme values of a field with this name."""
        for kind in self.kinds(schema):
            if "const" in kind:
                yield "", kind["const"]
            elif "enum" in kind:
                yield f"={json.dumps(kind['enum'][-1])}", kind["enum"][-1]
                yield ": outside its list", self._repeated(0)
            elif kind.get("type") == "boolean":
                yield from ((f"={value}", value) for value in (True, False))
            elif kind.get("type") in ("integer", "number"):
                yield from _numbers(kind)
            elif kind.get("type") == "string":
                yield from self._strings(kind, name)
            elif kind.get("type") == "array":
                yield from self._arrays(kind, name, level)
            elif kind.get("type") == "object":
                yield from self._objects(kind, name, level)
            else:
                yield from self._any_json()

    def _strings(self, schema: Schema, name: str) -> Iterator[Value]:
        if (counted := re.search(r"\{\d+,(\d+)\}\$$", schema.get("pattern", ""))) is not None:
            yield ": longest", "a" * int(counted[1])
            return
        longest = min(schema.get("maxLength", UNBOUNDED), self._sizes.value_bytes)
        for label, make in (*TEXTS.get(name, {}).items(), *ANY_TEXT.items()):
            text = make(longest)
            yield f": {label}", text[: _fitting(text, self._sizes.value_bytes)]
        if "maxLength" not in schema:
            yield ": of the context's length", (" a" * self._sizes.context)[: self._sizes.value_bytes]

    def _arrays(self, schema: Schema, name: str, level: int) -> Iterator[Value]:
        items, most = schema.get("items", {}), schema.get("maxItems", UNBOUNDED)
        for kind in self.kinds(items):
            yield ": most items", self._repeated(self.least(kind), most)
            if most > self._sizes.context:
                yield ": as many as the context", self._repeated(self.least(kind), self._sizes.context - 32)
            if kind.get("type") == "integer" and "maximum" in kind:
                yield ": most items, all the greatest", self._repeated(kind["maximum"], most)
                # different small ids are valid tokens, and none is found twice
                length = min(most, self._sizes.vocabulary, self._sizes.value_bytes // 6)
                yield ": most different items", list(range(length))
                end = kind["maximum"] + 1
                length = min(most, self._sizes.value_bytes // (len(str(end)) + 1))
                yield ": most different items, the greatest", list(range(end - length, end))
        if level < NESTED:
            yield from ((f"[0]{label}", [value]) for label, value in self.values(items, name, level + 1))

    def _objects(self, schema: Schema, name: str, level: int) -> Iterator[Value]:
        properties = schema.get("properties", {})
        if level < NESTED:
            for field, field_schema in properties.items():
                for label, value in self.values(field_schema, field, level + 1):
                    least = self.least(schema)
                    if field in KIND and KIND[field] in properties.get("type", {}).get("enum", ()):
                        least["type"] = KIND[field]
                    yield f".{field}{label}", least | {field: value}
        if properties and not schema.get("additionalProperties"):
            return
        for label, make in OBJECTS.get(name, {}).items():
            yield f": {label}", make(self._sizes.value_bytes)
        rest = schema.get("additionalProperties")
        value = self.least(rest) if isinstance(rest, dict) and "type" in rest else 0
        most = min(schema.get("maxProperties", UNBOUNDED), self._sizes.value_bytes // (13 + len(json.dumps(value))))
        least = self.least(schema) if properties else {}
        # keys as numbers are ids of tokens in `logit_bias`, and names elsewhere
        yield ": most keys", least | {str(number): value for number in range(most)}
        if schema.get("maxProperties", UNBOUNDED) > self._sizes.context:
            yield ": 1024 keys", least | {str(number): value for number in range(min(most, 1024))}
        if not (isinstance(rest, dict) and "type" in rest):
            yield from ((f": {label}", least | {"a": _deep(levels)}) for label, levels in self._depths())

    def _any_json(self) -> Iterator[Value]:
        yield ": longest list", self._repeated(0)
        yield ": empty lists", self._repeated([])
        yield ": most keys", {str(number): 0 for number in range(self._sizes.value_bytes // 13)}
        yield ": longest text", "a" * self._sizes.value_bytes
        yield from ((f": {label}", _deep(levels)) for label, levels in self._depths())

    def _depths(self) -> tuple[tuple[str, int], ...]:
        # json.dumps recurses, too: what it does not write is made as text by `_encoded`
        deepest = min(DEPTH, self._sizes.value_bytes // 2)
        return ("deep", SMALL_DEPTH), ("too deep to be written", READ_DEPTH), ("deepest", deepest)

    def _repeated(self, value: Any, most: int = UNBOUNDED) -> list[Any]:
        return [value] * min(most, self._sizes.value_bytes // (len(json.dumps(value, separators=(",", ":"))) + 1))


@dataclass(frozen=True, slots=True)
class _Deep:
    levels: int


def _deep(levels: int) -> _Deep:
    """Lists in lists."""
    return _Deep(levels)


def _encoded(body: dict[str, Any], content_type: str) -> bytes:
    deep: list[int] = []

    def marked(value: object) -> str:
        assert isinstance(value, _Deep)
        deep.append(value.levels)
        return "\ue000"

    def written(value: Any) -> str:
        text = json.dumps(value, separators=(",", ":"), default=marked)
        return text.replace('"\\ue000"', "[" * deep[0] + "]" * deep[0]) if deep else text

    if not content_type.startswith("multipart/"):
        return written(body).encode()
    parts = []
    for name, value in body.items():
        filename = '; filename="lines.jsonl"' if name == "file" else ""
        text = value if isinstance(value, str) else written(value)
        parts.append(f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{filename}\r\n\r\n{text}\r\n')
    return ("".join(parts) + f"--{BOUNDARY}--\r\n").encode()


BOUNDARY = "hostile-boundary"


def _numbers(schema: Schema) -> Iterator[Value]:
    """Both ends of a range; where one is open, a number above all that a machine counts with."""
    step = 1 if schema["type"] == "integer" else 1e-9
    least = schema.get("minimum", schema.get("exclusiveMinimum", -UNBOUNDED) + step)
    most = schema.get("maximum", schema.get("exclusiveMaximum", UNBOUNDED) - step)
    yield from ((f"={value}", value) for value in (least, most))


def _fitting(text: str, num_bytes: int) -> int:
    """Characters of `text`, which is one pattern over and over, that take so many bytes in JSON."""
    return min(len(text), num_bytes * len(text) // max(1, len(json.dumps(text)) - 2))


def _again(pattern: str) -> Callable[[int], str]:
    return lambda length: (pattern * (length // len(pattern) + 1))[:length]


def _enclosed(before: str, pattern: str, after: str) -> Callable[[int], str]:
    return lambda length: before + _again(pattern)(max(0, length - len(before) - len(after))) + after


def _wide_schema(num_bytes: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(min(num_bytes // 32, 20_000))}}


def _deep_schema(_: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _level in range(200):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _alternatives(num_bytes: int) -> dict[str, Any]:
    return {"anyOf": [{"const": f"alternative {n}"} for n in range(min(num_bytes // 40, 20_000))]}


def _long_pattern(num_bytes: int) -> dict[str, Any]:
    return {"type": "string", "pattern": "(a|b)*" * min(num_bytes // 8, 10_000)}


# Fields that multiply an answer: their work depends on its length.
ANSWER_SIZES = {"n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "max_tokens"}
# Fields that a route takes and its schema leaves out, under which its answers end soon.
BESIDE = {"/v1/chat/completions/batch": {"max_tokens": 16}}
# The `type` of the object in which a field is read.
KIND = {
    "json_schema": "json_schema",
    "schema": "json_schema",
    "structures": "structural_tag",
    "triggers": "structural_tag",
    "format": "structural_tag",
    "thinking": "thinking",
    "input": "tool_use",
    "tool_use_id": "tool_result",
    "content": "tool_result",
    "arguments": "function_call",
    "output": "function_call_output",
}
ANY_TEXT: dict[str, Callable[[int], str]] = {
    "letters": _again("a"),
    "lines": _again("\n"),
    "brackets": _again("["),
    "many tokens": _again("7 x"),
}
GRAMMARS: dict[str, Callable[[int], str]] = {
    "lines before the root": _enclosed("", "\n", 'root ::= "a"'),
    "spaces before the root": _enclosed("", " ", 'root ::= "a"'),
    "one long literal": _enclosed('root ::= "', "a", '"'),
    "nested groups": lambda length: "root ::= " + "(" * ((length - 13) // 2) + '"a"' + ")" * ((length - 13) // 2),
    "alternatives": _enclosed("root ::= ", '"a" | ', '"b"'),
    "comments": _enclosed("", "# a\n", 'root ::= "a"'),
}
REGEXES: dict[str, Callable[[int], str]] = {
    "groups in groups": lambda length: "(" * (length // 2) + ")" * (length // 2),
    "stars": _again("(a|b)*"),
    "counted": _again("(a{1,9}){1,9}"),
    "alternatives": _enclosed("a", "|ab", "c"),
}
SCHEMA_TEXTS: dict[str, Callable[[int], str]] = {
    "wide schema": lambda length: json.dumps(_wide_schema(length - 64)),
    "deep schema": lambda length: json.dumps(_deep_schema(length)),
    "alternatives": lambda length: json.dumps(_alternatives(length - 64)),
}
# Texts by the name of a field that has a language of its own.
TEXTS: dict[str, dict[str, Callable[[int], str]]] = {
    "grammar": GRAMMARS,
    "ebnf": GRAMMARS,
    "regex": REGEXES,
    "whitespace_pattern": REGEXES,
    "json": SCHEMA_TEXTS,
    "json_schema": SCHEMA_TEXTS,
    "structural_tag": SCHEMA_TEXTS,
    "chat_template": {
        "loops": _enclosed("{% for a in range(99999) %}{% for b in range(99999) %}", "a", "{% endfor %}{% endfor %}"),
        "deep lists": lambda _: (
            "{% set x = namespace(a=[1], b=[1]) %}{% for n in range(28) %}"
            "{% set x.a = [x.a, x.a] %}{% set x.b = [x.b, x.b] %}{% endfor %}{{ x.a == x.b }}"
        ),
    },
    "arguments": {"deep JSON": lambda length: "[" * (length // 2) + "]" * (length // 2)},
}
OBJECT_SCHEMAS: dict[str, Callable[[int], Any]] = {
    "wide schema": _wide_schema,
    "deep schema": _deep_schema,
    "alternatives": _alternatives,
    "long pattern": _long_pattern,
}
# Objects by the name of a field that is a schema.
OBJECTS = dict.fromkeys(("json", "schema", "parameters", "input_schema", "structural_tag"), OBJECT_SCHEMAS)
