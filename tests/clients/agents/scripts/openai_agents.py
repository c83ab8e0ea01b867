"""OpenAI's Agents SDK over `/v1/responses`: URL, model and task are arguments."""

import asyncio
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, model, task = sys.argv[1:]


@function_tool  # type: ignore[untyped-decorator]
def step(number: int) -> str:
    """Make a step."""
    return f"openai-agents-step-{number}"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        name="stepper", instructions="You make steps.", tools=[step], model=OpenAIResponsesModel(model, client)
    )
    result = await Runner.run(agent, task, max_turns=20)
    print(result.final_output)


asyncio.run(main())
