"""Functions that a message may call."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from raydix.engine.api.anthropic.blocks import CacheControl
from raydix.engine.api.anthropic.client_tools import client_tool
from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ToolUse
from raydix.engine.api.tools import FunctionName, ToolFields, ToolPaths, check_parameters, few_tools
from raydix.engine.api.validation import LenientModel
from raydix.engine.core.errors import RequestError

__all__ = ["ToolChoice", "ToolDefinition", "few_tools", "server_tools", "tool_use"]


PATHS = ToolPaths(name="name", schema="input_schema", chosen="tool_choice.name")


class ToolDefinition(LenientModel):
    """Function that an answer may call."""

    type: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        default=None,
        description="Kind of tool: `custom`, the default, or one of Anthropic's that clients run (`bash_*`, "
        "`text_editor_*`, `memory_*`). One that Anthropic's servers run is left out, and named in the header "
        "`x-raydix-ignored`.",
    )
    name: FunctionName = Field(description="Its name.")
    description: str | None = Field(default=None, description="Its purpose, for the model.")
    input_schema: Annotated[dict[str, Any], AfterValidator(check_parameters)] | None = Field(
        default=None, description="JSON schema of the arguments, an object; required of a `custom` tool."
    )
    strict: bool | None = Field(
        default=None, description="The arguments follow the schema: every object lists all its properties as required."
    )
    cache_control: CacheControl | None = Field(default=None, description="A mark behind all tools.")

    @property
    def is_custom(self) -> bool:
        """True if the client describes the function."""
        return self.type in (None, "custom")

    def function(self) -> Json | None:
        """The tool in OpenAI's form; None for a tool of Anthropic's servers."""
        function: Json = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        if self.description is not None:
            function["description"] = self.description
        if not self.is_custom:
            known = client_tool(str(self.type))
            if known is None:
                return None
            function["description"], function["parameters"] = known
        return {"type": "function", "function": function}


class ToolChoice(LenientModel):
    """Functions that an answer has to call."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="Kind of choice.")
    name: str | None = Field(default=None, description="Of `tool`: the function.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="The answer ends with its first call.")


def tool_use(tools: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolUse | None:
    """The tools in normal form; None if there are none. Raises RequestError for contradicting fields."""
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise RequestError("Missing required parameter: 'tool_choice.name'.", param="tool_choice.name")
    for index, tool in enumerate(tools):
        if tool.is_custom and tool.input_schema is None:
            param = f"tools[{index}].input_schema"
            raise RequestError(f"Missing required parameter: '{param}'.", param=param)
    functions = [tool.function() for tool in tools]
    fields: Json = {"tools": [function for function in functions if function is not None]}
    if choice is not None:
        fields |= {"tool_choice": _openai_choice(choice), "parallel_tool_calls": not choice.disable_parallel_tool_use}
    return ToolFields.model_validate(fields).tool_use(PATHS)


def server_tools(tools: Sequence[ToolDefinition]) -> tuple[str, ...]:
    """Names, as paths in the body, of the tools that Anthropic's servers would run."""
    return tuple(f"tools.{tool.type}" for tool in tools if tool.function() is None)


def _openai_choice(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
