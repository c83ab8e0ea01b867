"""Semantic Kernel's agent over chat completions: URL, model and task are arguments."""

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

url, model, task = sys.argv[1:]


class Steps:
    """The agent's tools."""

    @kernel_function(name="step", description="Makes a step.")  # type: ignore[untyped-decorator]
    def step(self, number: int) -> str:
        return f"semantic-kernel-step-{number}"


async def main() -> None:
    service = OpenAIChatCompletion(ai_model_id=model, async_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    agent = ChatCompletionAgent(
        name="stepper",
        instructions="You make steps.",
        service=service,
        plugins=[Steps()],
        function_choice_behavior=FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=20),
    )
    print(await agent.get_response(messages=task))


asyncio.run(main())
