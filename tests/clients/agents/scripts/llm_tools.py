"""Tools of the program `llm`."""


def step(number: int) -> str:
    """Make a step."""
    return f"llm-step-{number}"
