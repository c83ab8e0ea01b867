"""A task of Inspect over chat completions: URL, model and task are arguments."""

import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

url, model, task = sys.argv[1:]
os.environ |= {"RAYDIX_BASE_URL": f"{url}/v1", "RAYDIX_API_KEY": "none"}


@tool  # type: ignore[untyped-decorator]
def step() -> Tool:
    async def execute(number: int) -> str:
        """Make a step.

        Args:
            number: Number of the step.
        """
        return f"inspect-step-{number}"

    return execute


steps = Task(dataset=[Sample(task)], solver=[use_tools(step()), generate(tool_calls="loop")])
[log] = eval(steps, model=f"openai-api/raydix/{model}", display="none")
assert log.status == "success" and log.samples, log.error
print(log.samples[0].output.completion)
