"""Fields of a request for the form of its answer, and the grammar that a form comes to.

| field | from | form |
|---|---|---|
| `response_format` | OpenAI | `text`, `json_object`, `json_schema`; vLLM's `structural_tag` |
| `structured_outputs` | vLLM | `json`, `json_object`, `regex`, `choice`, `grammar` or `structural_tag` |
| `json_schema`, `regex`, `ebnf`, `structural_tag` | SGLang | one of these, each a string |

A request has one form at most. Sizes and OpenAI's rules for `strict` are checked here; the grammar itself is checked
where its library is (`actors.ingress.grammar_check`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from engine.api.known import GuidedFields
from engine.api.schemas import Schema, closed, shape_finding, strict_finding, subschemas
from engine.api.validation import StrictModel, describe, only
from engine.core.errors import RequestError
from engine.core.types import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 120_000
MAX_CHOICES = 1000
MAX_STRUCTURES = 128
OPTIONS_KEY = "x-guidance"
"""Keyword of a schema for llguidance's options, forbidden to requests."""

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
_PARTS = {
    "json_schema": "json_schema",
    **dict.fromkeys(("structures", "triggers", "at_least_one", "stop_after_first"), "structural_tag"),
}
"""Fields of a `response_format`, each with the type that has the field."""
_TAG_KEYS = ("type", "triggers", "structures", "at_least_one", "stop_after_first")
_STRUCTURE_KEYS = ("begin", "schema", "end")
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class Constraint(NamedTuple):
    """A grammar, and the request's field with its source."""

    grammar: Grammar
    param: str


class JsonSchemaFormat(StrictModel):
    """OpenAI's `response_format.json_schema`."""

    name: Annotated[str, Field(max_length=512)] | None = Field(default=None, description="Name of the form.")
    description: str | None = Field(default=None, description="Purpose of the form.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The schema.")
    strict: bool | None = Field(default=None, description="Hold the schema to OpenAI's rules; false.")


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`, and vLLM's structural tag under the same name."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(description="Kind of form.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="Of `json_schema`.")
    structures: list[Any] | None = Field(default=None, description="Of `structural_tag`: `begin`, `schema` and `end`.")
    triggers: list[Any] | None = Field(default=None, description="Of `structural_tag`: texts that begin a structure.")
    at_least_one: bool | None = Field(
        default=None, description="Of `structural_tag`: the answer begins with a structure; false."
    )
    stop_after_first: bool | None = Field(
        default=None, description="Of `structural_tag`: the answer ends with its first structure; false."
    )
    format: Annotated[Any, only()] = None

    def constraint(self) -> Constraint | None:
        """Return the grammar of this format; None for free text. Raises RequestError naming the place at fault."""
        for name, kind in _PARTS.items():
            if getattr(self, name) not in (None, False) and self.type != kind:
                _require(f"is only allowed where 'type' is '{kind}'", f"response_format.{name}")
        if self.type == "json_object":
            return Constraint(schema_grammar({"type": "object"}, "response_format"), "response_format")
        if self.type == "structural_tag":
            tag = {name: getattr(self, name) for name in _TAG_KEYS}
            return Constraint(_tag_grammar(tag, "response_format"), "response_format")
        if self.type == "text":
            return None

        param = "response_format.json_schema"
        if self.json_schema is None or self.json_schema.schema_ is None:
            param = param if self.json_schema is None else f"{param}.schema"
            raise RequestError(f"Missing required parameter: '{param}'.", param=param)
        strict = bool(self.json_schema.strict)
        param += ".schema"
        return Constraint(schema_grammar(self.json_schema.schema_, param, strict=strict), param)


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json", description="A JSON Schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: GrammarText | None = Field(default=None, description="A regular expression for the whole answer.")
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="Texts, of which the answer is one."
    )
    grammar: GrammarText | None = Field(default=None, description="A grammar in Lark or EBNF (GBNF).")
    structural_tag: GrammarText | None = Field(default=None, description="`structures` and `triggers` as JSON.")
    whitespace_pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="White space between JSON's parts, as a regular expression."
    )
    disable_any_whitespace: bool | None = Field(default=None, description="No white space between JSON's parts.")
    disable_additional_properties: bool | None = Field(
        default=None, description="No properties that the schema does not describe."
    )
    disable_fallback: bool | None = Field(default=None, description="Taken: there is no fallback.")

    def constraint(self) -> Constraint | None:
        """Return the grammar asked for; None if there is none. Raises RequestError naming the place at fault."""
        given = [
            name
            for name in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
            if getattr(self, "json_" if name == "json" else name) not in (None, False)
        ]
        if len(given) > 1:
            raise _too_many([f"structured_outputs.{name}" for name in given])
        if not given:
            return None

        param = f"structured_outputs.{given[0]}"
        for option in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, option) and given[0] not in ("json", "json_object"):
                name = f"structured_outputs.{option}"
                raise RequestError(f"'{name}' is only allowed with 'json' or 'json_object'.", param=name)
        return Constraint(self._grammar(param), param)

    def _grammar(self, param: str) -> Grammar:
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, _unicode(self.regex, param))
        if self.choice is not None:
            source = _unicode(json.dumps(self.choice, ensure_ascii=False), param)
            return Grammar(GrammarKind.CHOICE, _short(source, param))
        if self.grammar is not None:
            kind = GrammarKind.EBNF if _EBNF_RULE.search(self.grammar) else GrammarKind.LARK
            return Grammar(kind, _unicode(self.grammar, param))
        if self.structural_tag is not None:
            return _tag_grammar(_object(self.structural_tag, param), param)

        schema = {"type": "object"} if self.json_ is None else _object(self.json_, param)
        options: dict[str, object] = {}
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        return schema_grammar(
            schema, param, is_closed=bool(self.disable_additional_properties), options=options or None
        )


class FormatFields(GuidedFields):
    """Fields for the form of the answer, over HTTP and through the Python handle."""

    response_format: ResponseFormat | None = Field(
        default=None,
        description="Form of the answer: `json_object`, or `json_schema` with a schema, which `strict` holds to "
        "OpenAI's rules.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None,
        description="Form of the answer as at vLLM: one of `json`, `json_object`, `regex`, `choice`, `grammar` (Lark "
        "or EBNF), `structural_tag`.",
    )
    json_schema: GrammarText | None = Field(default=None, description="SGLang's: a JSON Schema as a string.")
    regex: GrammarText | None = Field(default=None, description="SGLang's: a regular expression for the whole answer.")
    ebnf: GrammarText | None = Field(default=None, description="SGLang's: a grammar in EBNF (GBNF) or Lark.")
    structural_tag: GrammarText | None = Field(
        default=None, description="SGLang's: `structures` and `triggers` as a JSON string."
    )

    def constraint(self) -> Constraint | None:
        """Return the grammar that the answer must follow. Raises RequestError naming the place at fault, or both
        fields where there are two."""
        found = [each.constraint() for each in (self.response_format, self.structured_outputs) if each is not None] + [
            self._of_text(name) for name in ("json_schema", "regex", "ebnf", "structural_tag")
        ]
        given = [each for each in found if each is not None]
        if len(given) > 1:
            raise _too_many([each.param for each in given])
        return given[0] if given else None

    def _of_text(self, name: str) -> Constraint | None:
        """Return the grammar of one of SGLang's fields."""
        text: str | None = getattr(self, name)
        if text is None:
            return None
        _unicode(text, name)
        if name == "json_schema":
            return Constraint(schema_grammar(_object(text, name), name), name)
        if name == "structural_tag":
            return Constraint(_tag_grammar(_object(text, name), name), name)
        if name == "regex":
            return Constraint(Grammar(GrammarKind.REGEX, text), name)
        return Constraint(Grammar(GrammarKind.EBNF if _EBNF_RULE.search(text) else GrammarKind.LARK, text), name)


def schema_grammar(
    schema: Schema,
    param: str,
    *,
    strict: bool = False,
    is_closed: bool = False,
    options: Mapping[str, object] | None = None,
) -> Grammar:
    """Return the grammar of a JSON Schema.

    `strict` holds the schema to OpenAI's rules; `is_closed` forbids properties that the schema does not describe;
    `options` are llguidance's. Raises RequestError naming the place below `param`.
    """
    _require(shape_finding(schema), param)
    for path, each, _ in subschemas(schema):
        if OPTIONS_KEY in each:
            _require(f"must not have '{OPTIONS_KEY}'", param + path)
    if strict and (finding := strict_finding(schema)) is not None:
        _require(finding[1], param + finding[0])

    whole = closed(schema) if is_closed else schema
    return Grammar(GrammarKind.JSON_SCHEMA, _source({**whole, OPTIONS_KEY: dict(options)} if options else whole, param))


def _tag_grammar(tag: Mapping[str, Any], param: str) -> Grammar:
    """Return the grammar of a structural tag. Raises RequestError naming the place at fault."""
    triggers, structures = tag.get("triggers"), tag.get("structures")
    _require_known(tag, _TAG_KEYS, param)
    if not _are(triggers, str) or not all(triggers or ()):
        _require("must be a list of strings that are not empty", f"{param}.triggers")
    if not _are(structures, Mapping) or not structures or len(structures) > MAX_STRUCTURES:
        _require(f"must be a list of 1 to {MAX_STRUCTURES} objects", f"{param}.structures")

    assert isinstance(structures, Sequence) and isinstance(triggers, Sequence)
    normal = [_structure(each, triggers, f"{param}.structures[{i}]") for i, each in enumerate(structures)]
    options = {name: True for name in ("at_least_one", "stop_after_first") if _flag(tag, name, param)}
    source = _source({"triggers": list(triggers), "structures": normal, **options}, param)
    return Grammar(GrammarKind.STRUCTURAL_TAG, source)


def _structure(structure: Mapping[str, Any], triggers: Sequence[str], param: str) -> dict[str, Any]:
    """Check one structure of a structural tag, and return its normal form."""
    begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
    _require_known(structure, _STRUCTURE_KEYS, param)
    if not isinstance(begin, str) or not any(begin.startswith(trigger) for trigger in triggers):
        _require("must be a string that begins with one of the triggers", f"{param}.begin")
    if not isinstance(end, str):
        _require(f"must be a string, got {describe(end)}", f"{param}.end")
    if schema is not None and not isinstance(schema, Mapping):
        _require(f"must be an object, got {describe(schema)}", f"{param}.schema")
    grammar = schema_grammar(schema or {}, f"{param}.schema")
    return {"begin": begin, "schema": json.loads(grammar.source), "end": end}


def _require_known(value: Mapping[str, Any], names: Sequence[str], param: str) -> None:
    """Raise RequestError for a key that could change the answer and is not supported."""
    unknown = next((name for name, each in value.items() if name not in names and each is not None), None)
    if unknown is not None:
        _require("is not supported yet", f"{param}.{unknown}")


def _flag(value: Mapping[str, Any], name: str, param: str) -> bool:
    """Return a flag of an object; false where there is none."""
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        _require(f"must be true or false, got {describe(flag)}", f"{param}.{name}")
    return bool(flag)


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)


def _object(value: str | Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Return a JSON object, parsed if given as text."""
    if isinstance(value, str):
        _short(value, param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            _require("is not valid JSON", param)
    if not isinstance(value, Mapping):
        _require(f"must be a JSON object, got {describe(value)}", param)
    assert isinstance(value, Mapping)
    return value


def _source(value: Mapping[str, Any], param: str) -> str:
    """Return a JSON value as text of bounded size."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        _require("must be JSON", param)
    return _short(_unicode(text, param), param)


def _short(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        _require(f"must have at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}", param)
    return text


def _unicode(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        _require("must be valid Unicode", param)
    return text


def _require(finding: str | None, param: str) -> None:
    """Raise RequestError if there is a finding about the field `param`."""
    if finding is not None:
        name = param if len(param) <= 200 else f"{param[:197]}..."
        raise RequestError(f"'{name}' {finding}.", param=name)


def _too_many(params: Sequence[str]) -> RequestError:
    names = " and ".join(f"'{name}'" for name in params[:2])
    return RequestError(f"{names} both prescribe the answer's form; give one of them.", param=params[1])
