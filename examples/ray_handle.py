"""Ask a running server from another Ray program, without HTTP.

    RAY_AUTH_MODE=token python examples/ray_handle.py --address 192.168.1.5:43737

The address is the one that `raydix serve` prints; it may be left out where no other cluster runs on the machine.
"""

import argparse
import asyncio
from typing import Any

import raydix


def main() -> None:
    """Answer as a whole, as a stream, and several at once."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--address", help="the Ray cluster's")
    options.add_argument("--max-tokens", type=int, default=32)
    arguments = options.parse_args()

    server = raydix.connect(arguments.address)
    messages: list[Any] = [{"role": "user", "content": "Name three rivers."}]
    request = raydix.GenerateRequest(messages=messages, max_tokens=arguments.max_tokens, temperature=0)
    answer = server.generate(request)
    print(answer.text)
    print(f"[{answer.finish_reason}, {answer.usage.cached_tokens} of {answer.usage.prompt_tokens} tokens cached]")

    for chunk in server.stream(request):
        print(chunk.text, end="", flush=True)
    print()

    print(asyncio.run(count(server, ("one", "two", "three"), arguments.max_tokens)))


async def count(server: raydix.Client, words: tuple[str, ...], max_tokens: int) -> dict[str, int]:
    """Tokens that are generated after each word, for all words at the same time."""
    answers = await asyncio.gather(
        *(server.generate_async(raydix.GenerateRequest(prompt=word, max_tokens=max_tokens)) for word in words)
    )
    return {word: len(answer.token_ids) for word, answer in zip(words, answers, strict=True)}


if __name__ == "__main__":
    main()
