"""Functions that a response may call."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StringConstraints

from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ToolUse
from raydix.engine.api.tools import FunctionName, ToolFields, ToolPaths, check_parameters, few_tools
from raydix.engine.api.validation import LenientModel, StrictModel, describe, problem
from raydix.engine.core.errors import RequestError

PATHS = ToolPaths(name="name", schema="parameters", chosen="tool_choice.name", grammar="format.definition")


# Types of tools that the client runs. OpenAI's servers run those of any other type.
FUNCTION, NAMESPACE, CUSTOM = "function", "namespace", "custom"


class _Named(LenientModel):
    """Tool with a name."""

    name: FunctionName | None = Field(default=None, description="Its name.")
    description: str | None = Field(default=None, description="Its purpose, for the model.")
    parameters: Annotated[dict[str, Any], AfterValidator(check_parameters)] | None = Field(
        default=None, description="JSON schema of the arguments, an object; by default there are none."
    )
    strict: bool | None = Field(default=None, description="The arguments follow the schema, which has OpenAI's form.")

    def function(self, path: str, namespace: str | None = None) -> Json:
        """The tool as chats have it. Raises RequestError for a missing name, in words for the field at `path`."""
        if self.name is None:
            raise RequestError(f"Missing required parameter: '{path}.name'.", param=f"{path}.name")
        function = {
            "name": self.name if namespace is None else flat_name(namespace, self.name),
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        return {"type": FUNCTION, "function": function}

    def repeated(self) -> Json:
        """The function as the response repeats it."""
        return {
            "type": FUNCTION,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class Member(_Named):
    """Function of a namespace."""

    type: Literal["function"] = Field(description="Kind of tool.")


class InputForm(StrictModel):
    """Form of a custom tool's input."""

    type: Literal["text", "grammar"] = Field(description="`text`: any.")
    syntax: Literal["lark", "regex"] | None = Field(default=None, description="Of `grammar`: its notation.")
    definition: str | None = Field(default=None, description="Of `grammar`: the grammar.")

    def for_chat(self, path: str) -> Json | None:
        """The form as chats have it. Raises RequestError for a missing part, in words for the field at `path`."""
        if self.type == "text":
            return None
        for name in ("syntax", "definition"):
            if getattr(self, name) is None:
                raise RequestError(f"Missing required parameter: '{path}.{name}'.", param=f"{path}.{name}")
        return {"type": self.type, "grammar": {"syntax": self.syntax, "definition": self.definition}}


class ResponseTool(_Named):
    """A function, a namespace of functions, or a tool that OpenAI's servers run."""

    type: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="Kind of tool: `function`, `custom`, `namespace`, or a tool of OpenAI's servers."
    )
    format: InputForm | None = Field(
        default=None, description="Of a custom tool: the form of its input, any text or one that follows a grammar."
    )
    tools: Annotated[list[Member], BeforeValidator(few_tools)] | None = Field(
        default=None, description="Of a namespace: its functions. The model knows each as `<namespace>__<name>`."
    )

    @property
    def is_of_server(self) -> bool:
        """True if the client does not run the tool."""
        return self.type not in (FUNCTION, NAMESPACE, CUSTOM)

    def functions(self, path: str) -> Iterator[Json]:
        """The functions of the tool as chats have them. Raises RequestError for one that the model cannot be told of,
        in words for the field at `path`."""
        if self.type == CUSTOM:
            if self.name is None:
                raise RequestError(f"Missing required parameter: '{path}.name'.", param=f"{path}.name")
            form = None if self.format is None else self.format.for_chat(f"{path}.format")
            yield {"type": CUSTOM, "custom": {"name": self.name, "description": self.description, "format": form}}
        elif self.type == FUNCTION:
            yield self.function(path)
        elif self.type == NAMESPACE:
            if self.name is None:
                raise RequestError(f"Missing required parameter: '{path}.name'.", param=f"{path}.name")
            for index, member in enumerate(self.tools or ()):
                yield member.function(f"{path}.tools[{index}]", self.name)

    def repeated(self) -> Json:
        """The tool as the response repeats it."""
        if self.type == FUNCTION:
            return super().repeated()
        if self.type == CUSTOM:
            form = {"type": "text"} if self.format is None else self.format.model_dump(exclude_none=True)
            return {"type": CUSTOM, "name": self.name, "description": self.description, "format": form}
        members = {} if self.tools is None else {"tools": [member.repeated() for member in self.tools]}
        named = {"name": self.name, "description": self.description} if self.type == NAMESPACE else {}
        return {"type": self.type, **named, **members}


def flat_name(namespace: str, name: str) -> str:
    """Name under which the model knows a function of a namespace."""
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def namespaces_of(tools: Sequence[ResponseTool]) -> Mapping[str, tuple[str, str]]:
    """Namespace and name of each function in a namespace, by the name that the model knows."""
    return {
        flat_name(tool.name, member.name): (tool.name, member.name)
        for tool in tools
        for member in tool.tools or ()
        if tool.type == NAMESPACE and tool.name is not None and member.name is not None
    }


def server_tools(tools: Sequence[ResponseTool]) -> Iterator[str]:
    """Names, as paths in the body, of the tools that OpenAI's servers would run."""
    return (f"tools.{tool.type}" for tool in tools if tool.is_of_server)


def _parse_choice(value: object) -> str | Json:
    if value in ("none", "auto", "required"):
        return str(value)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and kind in (FUNCTION, CUSTOM) and isinstance(value.get("name"), str):
        return {"type": kind, "name": value["name"]}
    raise problem(
        "must be 'none', 'auto', 'required' or {'type': 'function' or 'custom', 'name': a string}, "
        f"got {describe(value)}"
    )


ToolChoice = Annotated[
    str | Json,
    PlainValidator(_parse_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]),
]


def tool_use(tools: Sequence[ResponseTool], choice: str | Json | None, parallel: bool | None) -> ToolUse | None:
    """The tools in normal form; None if there are none. Raises RequestError for contradicting fields."""
    if isinstance(choice, dict):
        # In the form of chats, whose fields check it: one set of rules for both APIs.
        choice = {"type": choice["type"], str(choice["type"]): {"name": choice["name"]}}
    functions = [each for index, tool in enumerate(tools) for each in tool.functions(f"tools[{index}]")]
    fields = {"tools": functions, "tool_choice": choice, "parallel_tool_calls": parallel}
    return ToolFields.model_validate(fields).tool_use(PATHS)
