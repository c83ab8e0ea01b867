"""Functions that a message may call."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from engine.api.anthropic.blocks import CacheControl
from engine.api.responses import Json
from engine.api.spec import ToolUse
from engine.api.tools import FunctionName, ToolFields, ToolPaths, check_parameters, few_tools
from engine.api.validation import LenientModel
from engine.core.errors import RequestError

__all__ = ["ToolChoice", "ToolDefinition", "few_tools", "tool_use"]


PATHS = ToolPaths(name="name", schema="input_schema", chosen="tool_choice.name")


class ToolDefinition(LenientModel):
    """Function that an answer may call."""

    type: Literal["custom"] | None = Field(default=None, description="Kind of tool.")
    name: FunctionName = Field(description="Its name.")
    description: str | None = Field(default=None, description="Its purpose, for the model.")
    input_schema: Annotated[dict[str, Any], AfterValidator(check_parameters)] = Field(
        description="JSON schema of the arguments, an object."
    )
    strict: bool | None = Field(
        default=None, description="The arguments follow the schema: every object lists all its properties as required."
    )
    cache_control: CacheControl | None = Field(default=None, description="A mark behind all tools.")

    def function(self) -> Json:
        """The tool in OpenAI's form."""
        function: Json = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        if self.description is not None:
            function["description"] = self.description
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
    fields: Json = {"tools": [tool.function() for tool in tools]}
    if choice is not None:
        fields |= {"tool_choice": _openai_choice(choice), "parallel_tool_calls": not choice.disable_parallel_tool_use}
    return ToolFields.model_validate(fields).tool_use(PATHS)


def _openai_choice(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
