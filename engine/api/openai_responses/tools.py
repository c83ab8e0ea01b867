"""Functions that a response may call."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from engine.api.responses import Json
from engine.api.spec import ToolUse
from engine.api.tools import FunctionName, ToolFields, ToolPaths, check_parameters
from engine.api.validation import LenientModel, describe, problem

PATHS = ToolPaths(name="name", schema="parameters", chosen="tool_choice.name")


class FunctionTool(LenientModel):
    """Function that an answer may call."""

    type: Literal["function"] = Field(description="Kind of tool.")
    name: FunctionName = Field(description="Its name.")
    description: str | None = Field(default=None, description="Its purpose, for the model.")
    parameters: Annotated[dict[str, Any], AfterValidator(check_parameters)] | None = Field(
        default=None, description="JSON schema of the arguments, an object; by default there are none."
    )
    strict: bool | None = Field(default=None, description="The arguments follow the schema, which has OpenAI's form.")

    def repeated(self) -> Json:
        """The tool as the response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }

    def function(self) -> Json:
        """The tool as chats have it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


def _parse_choice(value: object) -> str | Json:
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, Mapping) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "name": value["name"]}
    raise problem(
        f"must be 'none', 'auto', 'required' or {{'type': 'function', 'name': a string}}, got {describe(value)}"
    )


ToolChoice = Annotated[
    str | Json,
    PlainValidator(_parse_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]),
]


def tool_use(tools: Sequence[FunctionTool], choice: str | Json | None, parallel: bool | None) -> ToolUse | None:
    """The tools in normal form; None if there are none. Raises RequestError for contradicting fields."""
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    fields = {"tools": [tool.function() for tool in tools], "tool_choice": choice, "parallel_tool_calls": parallel}
    return ToolFields.model_validate(fields).tool_use(PATHS)
