"""DSPy's agent with functions as tools over chat completions: URL, model and task are arguments."""

import sys

import dspy
from dspy import lm15

url, model, task = sys.argv[1:]


def step(number: int) -> str:
    """Make a step."""
    return f"dspy-step-{number}"


# DSPy offers functions to a model that its tables do not know only where a declared provider says that it may.
served = lm15.EndpointSupport(complete=True, stream=True, models=True)
access = lm15.AccessPolicy("raydix", auth_modes=("bearer",), base_url=f"{url}/v1", supports=served)
provider = lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat.preset("vllm"))
lm15.register_provider(provider, supports=lm15.ModelSupport(function_calling=True))
adapter = dspy.ChatAdapter(use_native_function_calling=True)
dspy.configure(lm=dspy.LM(f"raydix/{model}", api_key="none"), adapter=adapter)
print(dspy.ReActV2("task -> answer", tools=[step])(task=task).answer)
