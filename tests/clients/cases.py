"""Questions, functions and forms that all clients are tried with.

The default model is small: forms leave it few choices, so that greedy answers end, and functions are called where a
client can require it. Nothing about the model's words is expected.
"""

import json
from typing import Any, Literal, TypeAlias

import jsonschema
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Name three rivers of Europe."
NEXT_QUESTION = "Which of them is the longest?"
WEATHER_QUESTION = "What will the weather be in Kyiv? Ask for it."
REPORT = "It will be sunny, 21 degrees."

MAX_TOKENS = 32
"""Of answers in words."""
MAX_FORM_TOKENS = 256
"""Of answers in a form, which end by themselves long before."""
TIMEOUT_S = 120
"""Of one request."""


City: TypeAlias = Literal["Kyiv", "Lima", "Oslo"]
Days: TypeAlias = Literal[1, 3, 7]


class WeatherQuery(BaseModel):
    """Ask for the weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: City = Field(description="The city.")
    days: Days = Field(description="Number of days.")


class River(BaseModel):
    """A river."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Danube", "Dnipro", "Rhine"]
    continent: Literal["Africa", "Europe"]
    is_long: bool


WEATHER_SCHEMA: dict[str, Any] = WeatherQuery.model_json_schema()


def weather(city: City, days: Days) -> str:
    """Ask for the weather in a city."""
    return f"{city}, {days} days: {REPORT}"


def assert_query(arguments: str | dict[str, Any]) -> None:
    """Check the arguments of a call against the function's schema."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(values, WEATHER_SCHEMA)


def assert_finish(reason: str | None) -> None:
    """Check the end of an answer in words, which depends on the model."""
    assert reason in ("stop", "length")
