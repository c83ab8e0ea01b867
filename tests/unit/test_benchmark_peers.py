"""Processes of peers, and the figures of what they took."""

import sys
from pathlib import Path

import pytest

from benchmarks.command import distribution
from benchmarks.peers.process import PeerProcess, WorkerError

ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["say"] == "end":
        break
    print(json.dumps({request["say"]: 1}), flush=True)
"""


def test_distribution() -> None:
    assert distribution("a", [3.0, 1.0, 2.0], 10) == {"a_p50": 20, "a_p99": 30, "a_max": 30}
    assert distribution("a", [], 1) == {}


def test_a_process_answers_fails_and_ends(tmp_path: Path) -> None:
    process = PeerProcess([sys.executable, "-c", ECHO], tmp_path / "log", {})
    try:
        assert process.ask({"say": "hello"}, 60) == {"hello": 1}
        with pytest.raises(WorkerError, match=r"^1$"):
            process.ask({"say": "error"}, 60)
        with pytest.raises(WorkerError, match="its process"):
            process.ask({"say": "end"}, 60)
    finally:
        process.close()
    assert not process.is_open and process.process.returncode is not None
