"""Checks that pydantic lacks, and pydantic's findings as one sentence that names the field."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from raydix.engine.core.errors import RequestError

ModelT = TypeVar("ModelT", bound=BaseModel)

# Description of a field that takes any value and has no effect.
IGNORED = "A hint without effect here: any value is taken. The header `x-raydix-ignored` of the response names it."
# Description of a field that takes null and values that ask for nothing.
NOT_SUPPORTED = "Not supported: any other value is refused."
MAX_EXACT = 2**53  # bound of the integers that floats hold exactly
MAX_NAMED = 16  # values at fault that one error names
MAX_UNKNOWN = 64  # unknown fields that one object of a body may have where unknown fields are taken
MAX_IGNORED = 32  # fields without effect that are named for one request


@dataclass(frozen=True, slots=True)
class Hint:
    """Annotation of a field that can be left without effect: the answer is a good answer in either case."""

    neutral: tuple[object, ...] = ()
    """Values, besides null, that ask for nothing."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of any value."""
        return {**handler(core_schema), "description": IGNORED}


def hint(*neutral: object) -> Hint:
    """Annotation of a hint; `neutral` are the values, besides null, that ask for nothing."""
    return Hint(neutral)


TAKES_UNKNOWN: Mapping[str, object] = {}  # context of a validation in which unknown fields are taken


class StrictModel(BaseModel):
    """No unknown fields (unless `parse_body` takes them), no conversion between types, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_findings(cls, value: object, info: ValidationInfo) -> object:
        """Stop at one unknown field where there are many: pydantic would write a report on each of a million."""
        num_unknown = MAX_UNKNOWN if info.context is TAKES_UNKNOWN else 0
        # More names than fields: one at least is unknown, whichever it is.
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + num_unknown:
            unknown = next(name for name in value if name not in cls.model_fields)
            raise PydanticCustomError("unrecognized", "unrecognized field", {"name": unknown})
        return value


class LenientModel(BaseModel):
    """A model that ignores unknown fields, for objects that other servers may have made."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def problem(predicate: str) -> PydanticCustomError:
    """A finding of a validator, to be read behind the field's name: "must not be empty"."""
    return PydanticCustomError("problem", "{predicate}", {"predicate": predicate})


def _integral(value: object) -> object:
    """4.0 as 4: JSON has one kind of number, and some languages write each with a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        return int(value)
    return value


INTEGRAL = BeforeValidator(_integral)  # lets a field that is an integer take 4.0


@dataclass(frozen=True, slots=True)
class Only(AfterValidator):
    """Check of an unsupported field; its JSON schema has the values that it takes."""

    harmless: tuple[object, ...]

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of null and the harmless values."""
        values = list(dict.fromkeys(map(json.dumps, (None, *self.harmless))))
        return {"enum": [json.loads(value) for value in values], "description": NOT_SUPPORTED}


def only(*harmless: object) -> Only:
    """Check of an unsupported field: takes null and the values that ask for nothing."""

    def check(value: object) -> object:
        if value is None or value in harmless:
            return value
        raise problem("is not supported yet")

    return Only(check, harmless)


def renamed(name: str, *harmless: object) -> Only:
    """Check of a field that has another name today: takes null and the values that ask for nothing."""
    return dropped(f"it is '{name}' today", *harmless)


def dropped(advice: str, *harmless: object) -> Only:
    """Check of a field of former times: takes null and the values that ask for nothing."""

    def check(value: object) -> object:
        if value is None or value in harmless:
            return value
        raise problem(f"is not supported any more; {advice}")

    return Only(check, harmless)


@dataclass(frozen=True, slots=True)
class BodyRules:
    """What a server's configuration says about bodies."""

    takes_unknown: bool = False
    """Unknown fields have no effect; false: they are refused, at routes where clients rely on fields."""
    volatile_lines: tuple[str, ...] = ()
    """Beginnings of lines that clients put before the system message, and that change with each request."""


NO_RULES = BodyRules()


def parse_body(model: type[ModelT], body: bytes, *, takes_unknown: bool = False) -> ModelT:
    """The request of type `model` in a body. Raises RequestError naming the field at fault.

    `takes_unknown`: unknown fields are no error; `ignored_fields` names them.
    """
    try:
        if takes_unknown:
            return model.model_validate_json(body, extra="allow", context=TAKES_UNKNOWN)
        return model.model_validate_json(body)
    except ValidationError as error:
        raise request_error(error, model) from None


def ignored_fields(body: BaseModel) -> tuple[str, ...]:
    """Names of the fields of a body, at most `MAX_IGNORED`, that have a value and no effect: hints, and fields that are
    unknown here. Elements of lists are not looked at."""
    return tuple(islice(_ignored(body, ()), MAX_IGNORED))


def _ignored(model: BaseModel, location: tuple[str, ...]) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = (*location, field.alias or name)
        if isinstance(value, BaseModel):
            yield from _ignored(value, here)
        elif value is not None and any(value not in hint.neutral for hint in field.metadata if isinstance(hint, Hint)):
            yield _path(here)
    for name, value in (model.model_extra or {}).items():
        if value is not None:
            yield _path((*location, name))


def request_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    """The first finding about a request of type `model`, in words for the caller."""
    # The first one only: clients mend one fault at a time, and there may be thousands.
    finding = error.errors(include_url=False)[0]
    kind = finding["type"]
    if kind == "json_invalid":
        return RequestError(f"The request body is not valid JSON: {finding['ctx']['error']}.")

    location = finding["loc"]
    if kind == "unrecognized":
        location = (*location, str(finding["ctx"]["name"]))

    param = _path(location)
    if not param:
        return RequestError(f"The request body must be a JSON object, got {describe(finding['input'])}.")
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param)

    if kind in ("extra_forbidden", "unrecognized"):
        # Fields at the top alone: the names inside belong to other models.
        near = get_close_matches(param, model.model_fields, n=1) if len(location) == 1 else ()
        hint = "".join(f". Did you mean '{name}'?" for name in near)
        return RequestError(f"Unrecognized request argument supplied: {param}{hint}", param=param)

    return RequestError(f"'{param}' {_predicate(finding)}.", param=param)


def describe(value: object) -> str:
    """A short name of a JSON value."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    if not isinstance(value, str | int | float):
        return f"a value of type {type(value).__name__}"
    # Python refuses to write integers of thousands of digits.
    if isinstance(value, int) and abs(value) >= 2**128:
        return "a huge integer"
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def name_all(values: Iterable[object]) -> str:
    """Names of the values at fault, each once: `1, 2 and 3`; behind the first `MAX_NAMED` only how many more."""
    distinct = list(dict.fromkeys(values))
    num_more = len(distinct) - MAX_NAMED
    # Only those that are named are described: there may be a million.
    names = [describe(value) for value in (distinct[:MAX_NAMED] if num_more > 1 else distinct)]
    if num_more > 1:
        names.append(f"{num_more} more")
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


_Words = Callable[[dict[str, Any]], str]
_EXPECTED: dict[str, _Words] = {
    "greater_than_equal": lambda c: f"must be at least {_figure(c['ge'])}",
    "greater_than": lambda c: f"must be greater than {_figure(c['gt'])}",
    "less_than_equal": lambda c: f"must be at most {_figure(c['le'])}",
    "less_than": lambda c: f"must be less than {_figure(c['lt'])}",
    "int_type": lambda c: "must be an integer",
    "float_type": lambda c: "must be a number",
    "bool_type": lambda c: "must be true or false",
    "string_type": lambda c: "must be a string",
    "list_type": lambda c: "must be a list",
    "dict_type": lambda c: "must be an object",
    "model_type": lambda c: "must be an object",
    "model_attributes_type": lambda c: "must be an object",
    "finite_number": lambda c: "must be a finite number",
    "literal_error": lambda c: f"must be one of {c['expected']}",
}


def _figure(bound: float) -> float:
    return int(bound) if bound == int(bound) else bound


def _predicate(finding: ErrorDetails) -> str:
    kind, context, value = finding["type"], finding.get("ctx", {}), finding["input"]
    if kind == "problem":
        return str(context["predicate"])
    if kind in _EXPECTED:
        return f"{_EXPECTED[kind](context)}, got {describe(value)}"
    if kind == "string_unicode":
        return "must be valid Unicode"
    if kind in ("string_too_short", "too_short") and context["min_length"] == 1:
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if kind == "too_long":
        return f"must have at most {context['max_length']} elements, got {len(value)}"
    return f"is not valid: {finding['msg']}"


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for step in location:
        if step == "[key]":  # pydantic's mark for a finding about the key itself
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path if len(path) <= 100 else f"{path[:97]}..."
