"""smolagents' tool-calling agent over chat completions: URL, model and task are arguments."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

url, model, task = sys.argv[1:]


@tool  # type: ignore[untyped-decorator]
def step(number: int) -> str:
    """Make a step.

    Args:
        number: Number of the step.
    """
    return f"smolagents-step-{number}"


agent = ToolCallingAgent(tools=[step], model=OpenAIModel(model, api_base=f"{url}/v1", api_key="none"), max_steps=20)
print(agent.run(task))
