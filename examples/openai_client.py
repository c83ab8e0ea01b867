"""Ask a running server through OpenAI's client, twice: the second time most of the prompt comes from the cache.

python examples/openai_client.py --url http://127.0.0.1:8000
"""

import argparse
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Stream two answers, with what the cache saved."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    options.add_argument("--question", default="Name three rivers of Europe.")
    options.add_argument("--max-tokens", type=int, default=64)
    arguments = options.parse_args()

    with OpenAI(base_url=f"{arguments.url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        [model] = client.models.list().data
        for _ in range(2):
            ask(client, model.id, arguments.question, arguments.max_tokens)


def ask(client: OpenAI, model: str, question: str, max_tokens: int) -> None:
    """Print one answer while it is generated."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            print(f"\n[{cached} of {chunk.usage.prompt_tokens} prompt tokens cached]")


if __name__ == "__main__":
    main()
