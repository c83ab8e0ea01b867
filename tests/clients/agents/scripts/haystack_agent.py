"""Haystack's agent over chat completions: URL, model and task are arguments."""

import sys
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

url, model, task = sys.argv[1:]


@tool  # type: ignore[untyped-decorator]
def step(number: Annotated[int, "Number of the step."]) -> str:
    """Make a step."""
    return f"haystack-step-{number}"


generator = OpenAIChatGenerator(model=model, api_base_url=f"{url}/v1", api_key=Secret.from_token("none"))
agent = Agent(chat_generator=generator, tools=[step], system_prompt="You make steps.", max_agent_steps=20)
print(agent.run(messages=[ChatMessage.from_user(task)])["last_message"].text)
