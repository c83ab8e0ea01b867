"""The examples, each in a process of its own, as somebody who tries them would run them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.integration.conftest import WAIT_S, Server
from tests.skips import NO_RAY_DATA, has_no_ray_data

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """What an example prints; fails with its errors where it ends with another code than 0."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**environment, "PYTHONPATH": str(EXAMPLES.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def address(server: Server) -> str:
    """The cluster's."""
    return str(ray.get_runtime_context().gcs_address)


def test_openai_client(server: Server) -> None:
    printed = run_example(
        "openai_client.py", "--url", server.url, "--max-tokens", "8", "--question", "Why do rivers bend?"
    )
    [_, second] = [int(cached) for cached in re.findall(r"\[(\d+) of \d+ prompt tokens cached\]", printed)]
    assert second > 0


def test_ray_handle(address: str) -> None:
    printed = run_example("ray_handle.py", "--address", address, "--max-tokens", "8")
    answer, streamed = re.findall(r"(?s)\A(.+)\n\[\S+, \d+ of \d+ tokens cached\]\n(.+)\n\{'one': \d", printed)[0]
    assert answer == streamed


def test_ray_data(address: str, tmp_path: Path) -> None:
    if has_no_ray_data():
        pytest.skip(NO_RAY_DATA)
    counts = ("--prompts", "20", "--documents", "4", "--max-tokens", "4", "--batch-size", "8")
    printed = run_example("ray_data.py", "--address", address, *counts, "-o", str(tmp_path))
    rows, cached = re.findall(r"(\d+) of 20 rows in .*, (\d+)% cached", printed)[-1]
    assert int(rows) == 20 and int(cached) > 50, printed
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 20 and all(answer["answer"] for answer in answers)


def test_batch_scoring(address: str, tmp_path: Path) -> None:
    lines = tmp_path / "answers.txt"
    lines.write_text("Paris\nxyzzy\n")
    printed = run_example("batch_scoring.py", str(lines), "--prompt", "The capital of France is", "--address", address)
    first, second = (line.split() for line in printed.splitlines())
    assert (first[1], second[1]) == ("Paris", "xyzzy")
    assert 0 > float(first[0]) > float(second[0])


@pytest.mark.skipif(importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_langchain_chat(server: Server) -> None:
    assert "Which of them" in run_example("langchain_chat.py", "--url", server.url, "--max-tokens", "8")
