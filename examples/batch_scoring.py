"""Score each line of a file: the log-probability that the model gives to the line after a prompt that all share.

    python examples/batch_scoring.py answers.txt --prompt "The capital of France is"

The prompt is computed and scored once; the lines are scored at the same time, as many as `--concurrency`.
"""

import argparse
import asyncio
from pathlib import Path

import raydix


def main() -> None:
    """Print each line behind its score, the likeliest first."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path, help="a text in each line")
    options.add_argument("--prompt", default="", help="stands before each line")
    options.add_argument("--address", help="the Ray cluster's, as raydix serve prints it")
    options.add_argument("--concurrency", type=int, default=16, help="lines under way at the same time")
    arguments = options.parse_args()

    lines = [line for line in arguments.file.read_text().splitlines() if line]
    server = raydix.connect(arguments.address)
    scores = asyncio.run(score_all(server, arguments.prompt, lines, arguments.concurrency))
    for score, line in sorted(zip(scores, lines, strict=True), reverse=True):
        print(f"{score:10.3f}  {line}")


async def score_all(server: raydix.Client, prompt: str, lines: list[str], concurrency: int) -> list[float]:
    """The score of each line. The prompt is scored first, so that all lines find it in the cache."""
    free = asyncio.Semaphore(concurrency)
    num_shared = len(await log_probabilities(server, prompt)) if prompt else 0

    async def score(line: str) -> float:
        async with free:
            text = f"{prompt} {line}" if prompt else line
            return sum((await log_probabilities(server, text))[num_shared:])

    return list(await asyncio.gather(*map(score, lines)))


async def log_probabilities(server: raydix.Client, text: str) -> list[float]:
    """Of each token of a text after those before it; the first token has 0."""
    answer = await server.generate_async(raydix.GenerateRequest(prompt=text, max_tokens=0, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    return [0.0 if token is None else token.chosen for token in answer.prompt_logprobs]


if __name__ == "__main__":
    main()
