"""CrewAI's crew of one agent over chat completions: URL, model and task are arguments."""

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

url, model, task = sys.argv[1:]


@tool("step")  # type: ignore[untyped-decorator]
def step(number: int) -> str:
    """Make a step."""
    return f"crewai-step-{number}"


llm = LLM(f"hosted_vllm/{model}", base_url=f"{url}/v1", api_key="none")
agent = Agent(role="stepper", goal="Make steps.", backstory="You make steps.", tools=[step], llm=llm, max_iter=20)
crew = Crew(agents=[agent], tasks=[Task(description=task, expected_output="The steps.", agent=agent)])
print(crew.kickoff().raw)
