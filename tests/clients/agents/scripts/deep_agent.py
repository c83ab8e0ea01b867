"""LangChain's deep agent over chat completions: URL, model and task are arguments."""

import sys

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

url, model, task = sys.argv[1:]


def step(number: int) -> str:
    """Make a step."""
    return f"deepagents-step-{number}"


agent = create_deep_agent(model=ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none"), tools=[step])
result = agent.invoke({"messages": [{"role": "user", "content": task}]}, {"recursion_limit": 100})
print(result["messages"][-1].text)
