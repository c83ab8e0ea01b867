"""Fields of a request for the form of its answer, and the grammar that a form comes to.

| field | from | form |
|---|---|---|
| `response_format` | OpenAI | `text`, `json_object`, `json_schema`; vLLM's `structural_tag` |
| `structured_outputs` | vLLM | `json`, `json_object`, `regex`, `choice`, `grammar` or `structural_tag` |
| `json_schema`, `regex`, `ebnf`, `structural_tag` | SGLang | one of these, each a string |

A request has one form at most. Sizes and OpenAI's rules for `strict` are checked here; the grammar itself is checked
where its library is (`raydix.engine.serving.grammar_check`).
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from raydix.engine.api.grammars import (
    MAX_GRAMMAR_CHARS,
    object_of,
    require,
    schema_grammar,
    short,
    unicode_of,
    written_grammar,
)
from raydix.engine.api.known import GuidedFields
from raydix.engine.api.structural_tags import TAG_KEYS, tag_grammar
from raydix.engine.api.validation import StrictModel
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import Grammar, GrammarKind

MAX_CHOICES = 1000

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
# Fields of a `response_format`, each with the type that has the field.
_PARTS = {
    "json_schema": "json_schema",
    **dict.fromkeys(("structures", "triggers", "at_least_one", "stop_after_first", "format"), "structural_tag"),
}


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
    format: Any = Field(default=None, description="Of `structural_tag`, in place of these: a format of xgrammar's.")

    def constraint(self) -> Constraint | None:
        """Return the grammar of this format; None for free text. Raises RequestError naming the place at fault."""
        for name, kind in _PARTS.items():
            # False says the same as leaving the field out, and some clients send it always.
            if getattr(self, name) not in (None, False) and self.type != kind:
                require(f"is only allowed where 'type' is '{kind}'", f"response_format.{name}")
        if self.type == "json_object":
            return Constraint(schema_grammar({"type": "object"}, "response_format"), "response_format")
        if self.type == "structural_tag":
            tag = {name: getattr(self, name) for name in TAG_KEYS}
            return Constraint(tag_grammar(tag, "response_format"), "response_format")
        if self.type == "text":
            return None

        param = "response_format.json_schema"
        if self.json_schema is None or self.json_schema.schema_ is None:
            # The innermost missing field is named: that is what the client has to add.
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
    structural_tag: GrammarText | dict[str, Any] | None = Field(
        default=None, description="As of `response_format`, as JSON."
    )
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
        # An option that would have no effect is refused: the client believes in a form that it would not get.
        for option in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, option) and given[0] not in ("json", "json_object"):
                name = f"structured_outputs.{option}"
                raise RequestError(f"'{name}' is only allowed with 'json' or 'json_object'.", param=name)
        return Constraint(self._grammar(param), param)

    def _grammar(self, param: str) -> Grammar:
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, unicode_of(self.regex, param))
        if self.choice is not None:
            # As JSON, since a choice may have any character: no separator would be safe.
            source = unicode_of(json.dumps(self.choice, ensure_ascii=False), param)
            return Grammar(GrammarKind.CHOICE, short(source, param))
        if self.grammar is not None:
            return written_grammar(self.grammar, param)
        if self.structural_tag is not None:
            return tag_grammar(object_of(self.structural_tag, param), param)

        schema = {"type": "object"} if self.json_ is None else object_of(self.json_, param)
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
        default=None, description="SGLang's: a structural tag as of `response_format`, as a JSON string."
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
        unicode_of(text, name)
        if name == "json_schema":
            return Constraint(schema_grammar(object_of(text, name), name), name)
        if name == "structural_tag":
            return Constraint(tag_grammar(object_of(text, name), name), name)
        if name == "regex":
            return Constraint(Grammar(GrammarKind.REGEX, text), name)
        return Constraint(written_grammar(text, name), name)


def _too_many(params: Sequence[str]) -> RequestError:
    names = " and ".join(f"'{name}'" for name in params[:2])
    return RequestError(f"{names} both prescribe the answer's form; give one of them.", param=params[1])
