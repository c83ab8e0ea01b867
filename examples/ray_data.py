"""Answer a dataset of prompts with Ray Data's processor for Serve deployments, prompts that begin alike together.

    pip install 'ray[data]'
    RAY_AUTH_MODE=token python examples/ray_data.py --address 192.168.1.5:43737 --prompts 10000 -o answers

Without a file of prompts (`--file`, JSON lines with `prompt`) the program makes some: questions about `--documents`
texts. A prompt is computed from where it leaves one that was computed before, so the rows are sorted: all questions
about a text come one after the other, and its text is computed once.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

import raydix

WORDS = ("river", "stone", "harbour", "winter", "letter", "garden", "market", "signal", "paper", "bridge")
QUESTIONS = ("What is it about?", "Name one thing in it.", "Who wrote it?", "Is it long?", "What comes last?")
PROGRESS_S = 2.0


def main() -> None:
    """Sort, answer and write the rows, and print what the cache saved."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--address", help="the Ray cluster's, as raydix serve prints it")
    options.add_argument("--file", type=Path, help="JSON lines with `prompt`; by default prompts are made")
    options.add_argument("--prompts", type=int, default=10_000, help="how many are made")
    options.add_argument("--documents", type=int, default=100, help="texts that they are about")
    options.add_argument("--max-tokens", type=int, default=16)
    options.add_argument("--batch-size", type=int, default=64, help="rows that one worker of Ray Data has under way")
    options.add_argument("--concurrency", type=int, default=1, help="workers of Ray Data")
    options.add_argument("-o", "--output", type=Path, required=True, help="folder for JSON lines of answers")
    arguments = options.parse_args()

    raydix.connect(arguments.address)  # joins the cluster of this server
    from ray.data import from_items
    from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

    prompts = read(arguments.file) if arguments.file else made(arguments.prompts, arguments.documents)
    # Sorted texts with a common beginning are neighbours, and Ray Data keeps the order of the rows of a block.
    rows = [{"prompt": prompt} for prompt in sorted(prompts)]
    config = ServeDeploymentProcessorConfig(
        deployment_name="ingress",
        app_name="raydix",
        batch_size=arguments.batch_size,
        concurrency=arguments.concurrency,
        should_continue_on_error=True,
    )
    max_tokens = arguments.max_tokens

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        """The row's request: a method of the deployment, and the fields of a body over HTTP."""
        body = {"messages": [{"role": "user", "content": row["prompt"]}], "temperature": 0}
        return {"method": "chat", "request_kwargs": {**body, "max_tokens": max_tokens}, "prompt": row["prompt"]}

    def answered(row: dict[str, Any]) -> dict[str, Any]:
        """What is kept of the response."""
        usage = row["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        text = row["choices"][0]["message"]["content"]
        return {"answer": text, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}

    processor = build_processor(config, preprocess=asked, postprocess=answered)
    started = time.perf_counter()
    counts = {"rows": 0, "tokens": 0, "cached": 0, "failed": 0}
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "answers.jsonl").open("w") as file, progress(lambda: shown(counts, len(rows), started)):
        for row in processor(from_items(rows)).iter_rows():
            file.write(json.dumps(row, default=str) + "\n")
            counts["rows"] += 1
            counts["failed"] += bool(row.get("__inference_error__"))
            counts["tokens"] += row.get("prompt_tokens") or 0
            counts["cached"] += row.get("cached_tokens") or 0
    print(shown(counts, len(rows), started))
    ray.shutdown()


def read(file: Path) -> list[str]:
    """The prompts of a file."""
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines() if line]


def made(num_prompts: int, num_documents: int) -> list[str]:
    """Questions about texts, in an order in which no text follows itself."""

    def text(number: int) -> str:
        return " ".join(f"{WORDS[(number * 7 + at * at) % len(WORDS)]} {number}.{at}" for at in range(120))

    texts = [text(number) for number in range(num_documents)]
    return [
        f"{texts[number % num_documents]}\n\n{QUESTIONS[number // num_documents % len(QUESTIONS)]} ({number})"
        for number in range(num_prompts)
    ]


def shown(counts: dict[str, int], num_rows: int, started: float) -> str:
    """The progress as a line."""
    took = time.perf_counter() - started
    share = counts["cached"] / max(1, counts["tokens"])
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    rate = counts["rows"] / took
    return f"{counts['rows']} of {num_rows} rows in {took:.0f} s ({rate:.1f} a second{failed}), {share:.0%} cached"


@contextmanager
def progress(line: Callable[[], str]) -> Iterator[None]:
    """Print a line every `PROGRESS_S` to standard error, until the block ends."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(PROGRESS_S):
            print(line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    main()
