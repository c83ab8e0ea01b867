"""AutoGen's assistant over chat completions: URL, model and task are arguments."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

url, model, task = sys.argv[1:]
INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}


async def step(number: int) -> str:
    """Make a step."""
    return f"autogen-step-{number}"


async def main() -> None:
    client = OpenAIChatCompletionClient(model=model, base_url=f"{url}/v1", api_key="none", model_info=INFO)
    agent = AssistantAgent("stepper", client, tools=[step], max_tool_iterations=20)
    result = await agent.run(task=task)
    print(result.messages[-1].content)


asyncio.run(main())
