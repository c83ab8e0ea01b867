"""Functions that an answer may call: `tools`, `tool_choice` and `parallel_tool_calls` of chats."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StringConstraints

from raydix.engine.api.custom_tools import CustomDefinition
from raydix.engine.api.grammars import schema_grammar
from raydix.engine.api.spec import GenerationSpec, ToolUse
from raydix.engine.api.validation import LenientModel, StrictModel, describe, problem
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.forms import CallForm
from raydix.engine.core.ingress.parsers.harmony_forms import HarmonyForm
from raydix.engine.core.types import GrammarKind

MAX_TOOLS = 1024
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


def check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of an object."""
    if schema.get("type", "object") != "object":
        raise problem(f"must be the schema of an object, got the type {describe(schema['type'])}")
    # The schema is written into the prompt as JSON: one that nests too deeply, or is no JSON, fails here with its name.
    try:
        json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        raise problem("must be JSON") from None
    return schema


class FunctionDefinition(LenientModel):
    """Function that an answer may call."""

    name: FunctionName = Field(description="Its name.")
    description: str | None = Field(default=None, description="Its purpose, for the model.")
    parameters: Annotated[dict[str, Any], AfterValidator(check_parameters)] | None = Field(
        default=None, description="JSON schema of the arguments, an object; by default there are none."
    )
    strict: bool | None = Field(default=None, description="The arguments follow the schema, which has OpenAI's form.")

    def for_template(self) -> Mapping[str, object]:
        """Return the function as chat templates know it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        description = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **description, "parameters": parameters}}


Definition: TypeAlias = FunctionDefinition | CustomDefinition


class Tool(LenientModel):
    """Tool of a chat."""

    type: Literal["function", "custom"] = Field(default="function", description="Kind of tool.")
    function: FunctionDefinition | None = Field(default=None, description="The function.")
    custom: CustomDefinition | None = Field(
        default=None, description="Tool whose input is a text, free or in the form of a grammar."
    )

    @property
    def definition(self) -> Definition | None:
        """The function or the custom tool, as the type says; None if it is missing."""
        return self.function if self.type == "function" else self.custom


def few_tools(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) > MAX_TOOLS:
        raise problem(f"must have at most {MAX_TOOLS} elements, got {len(value)}")
    return value


def _parse_choice(value: object) -> str | tuple[str]:
    """A word, or a tuple of the tool's name."""
    if value in ("none", "auto", "required"):
        return str(value)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("function", "custom"):
        raise problem(
            "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': a string}} or "
            f"{{'type': 'custom', 'custom': {{'name': a string}}}}, got {describe(value)}"
        )
    function = value.get(kind)
    name = function.get("name") if isinstance(function, Mapping) else None
    # Whether there is such a function is known only with `tools` (`ToolFields.tool_use`).
    if not isinstance(name, str):
        raise problem(f"must have the name of a {kind if kind == 'function' else 'tool'} in '{kind}.name'")
    return (name,)


ToolChoice = Annotated[
    str | tuple[str],
    PlainValidator(_parse_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]),
]


class ToolPaths(NamedTuple):
    """Names of the fields of tools in one API, for error messages."""

    name: str = "function.name"
    schema: str = "function.parameters"
    chosen: str = "tool_choice.function.name"
    grammar: str = "custom.format.grammar.definition"


CHAT_PATHS = ToolPaths()


class OfferedTools(StrictModel):
    """Functions that the prompt of a chat has."""

    tools: Annotated[list[Tool], BeforeValidator(few_tools)] | None = Field(
        default=None, description="Functions that the answer may call."
    )

    def offered(self) -> ToolUse | None:
        """Return the tools as a prompt needs them; None if there are none. Raises RequestError for equal names."""
        definitions = _definitions(self.tools or (), CHAT_PATHS)
        return ToolUse(tuple(each.for_template() for each in definitions), may_call=False) if definitions else None


class ToolFields(OfferedTools):
    """Functions that the answer of a chat may call."""

    tool_choice: ToolChoice | None = Field(
        default=None,
        description="`auto`, the default where there are tools, leaves calls to the model; `none` has it call nothing, "
        "`required` some function, and an object with a function's name that one.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may have several calls; true. With false it ends with its first."
    )

    def tool_use(self, paths: ToolPaths = CHAT_PATHS) -> ToolUse | None:
        """Return the tools in normal form; None if there are none. Raises RequestError for contradicting fields."""
        tools, choice = _definitions(self.tools or (), paths), self.tool_choice
        if isinstance(choice, tuple) and choice[0] not in {tool.name for tool in tools}:
            raise RequestError(
                f"'{paths.chosen}' is {describe(choice[0])}, a function that 'tools' does not have.",
                param=paths.chosen,
            )
        # Nothing could be called, and the model would be held to a form that no text has.
        if choice == "required" and not tools:
            raise RequestError("'tool_choice' requires a call, but there are no 'tools'.", param="tool_choice")
        if not tools:
            return None
        # A named function is required alone; `required` leaves the choice among all.
        required: tuple[str, ...] = ()
        if isinstance(choice, tuple):
            required = choice
        elif choice == "required":
            required = tuple(tool.name for tool in tools)
        strict = tuple(tool.name for tool in tools if tool.strict)
        # Only schemas that become grammars are checked: others are text for the model, whatever they say.
        _check_schemas(tools, {*required, *strict}, paths.schema)

        return ToolUse(
            definitions=tuple(tool.for_template() for tool in tools),
            may_call=choice != "none",
            # A function that is required by its name is called once, as at OpenAI.
            is_single=self.parallel_tool_calls is False or isinstance(choice, tuple),
            required=required,
            strict=strict,
            schema_field=paths.schema,
            inputs={
                tool.name: tool.input_schema(f"tools[{index}].{paths.grammar}")
                for index, tool in enumerate(tools)
                if isinstance(tool, CustomDefinition)
            },
            input_field=paths.grammar,
        )


def _check_schemas(tools: Sequence[Definition], names: Collection[str], field: str) -> None:
    """Raise RequestError naming the place where the schema of one of these functions cannot be followed."""
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionDefinition) and tool.name in names and tool.parameters is not None:
            schema_grammar(tool.parameters, f"tools[{index}].{field}", strict=bool(tool.strict))


def _definitions(tools: Sequence[Tool], paths: ToolPaths) -> Sequence[Definition]:
    """Return what the tools are. Raises RequestError for equal names, and for a tool that is nothing."""
    found: list[Definition] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        definition = tool.definition
        if definition is None:
            param = f"tools[{index}].{tool.type}"
            raise RequestError(f"Missing required parameter: '{param}'.", param=param)
        if definition.name in names:
            param = f"tools[{index}].{paths.name.replace('function', tool.type)}"
            raise RequestError(f"'{param}' is {describe(definition.name)}, the name of another function.", param=param)
        names.add(definition.name)
        found.append(definition)
    return found


def with_calls(spec: GenerationSpec, form: CallForm | HarmonyForm, special: Mapping[str, int]) -> GenerationSpec:
    """A request with the form of its answer where that may call functions, and where the request asks for a form, too.

    `form` is the one of the model's calls, `special` the ids of special tokens in it by name. Raises RequestError where
    the two exclude each other.
    """
    tools, grammar, param = spec.tools, spec.sampling.grammar, spec.grammar_param
    if tools is None or not tools.may_call or not (tools.required or tools.strict or grammar is not None):
        return spec
    # A function that is not strict may have any arguments, as long as they are JSON.
    schemas = {name: schema if name in tools.strict else {} for name, schema in tools.schemas.items()}
    # Only the required ones: the grammar offers no other call.
    if tools.required:
        schemas = {name: tools.schemas[name] for name in tools.required}
    calls = form.grammar(schemas, special, is_single=tools.is_single)
    if grammar is None:
        grammar, param = calls.required() if tools.required else calls.among_text(), _place_of(schemas, tools)
    elif tools.required:
        raise RequestError(
            f"'tool_choice' and '{param}' both prescribe the answer's form; give one of them.", param=param
        )
    # JSON and a call are told apart by how they begin; an answer of another form may begin like a call.
    elif grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise RequestError(
            f"'{param}' other than JSON is not supported together with 'tools': set 'tool_choice' to 'none'.",
            param=param,
        )
    else:
        grammar = calls.or_json(json.loads(grammar.source))
    return replace(spec, sampling=replace(spec.sampling, grammar=grammar), grammar_param=param)


def _place_of(schemas: Mapping[str, Mapping[str, object]], tools: ToolUse) -> str:
    """Name of the field with the schema of a grammar; of all tools if there are several schemas."""
    places = [
        f"tools[{index}].{tools.input_field if name in tools.inputs else tools.schema_field}"
        for index, name in enumerate(tools.schemas)
        if schemas.get(name)
    ]
    return places[0] if len(places) == 1 else "tools"
