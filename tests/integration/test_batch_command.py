"""`raydix batch` with a model in its own process: it goes on from its journal, whatever ended it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raydix.engine.model.sources import DEFAULT_MODEL, NULL
from tests.integration.conftest import WAIT_S, eventually
from tests.integration.local import require_default_model
from tests.integration.test_batches import MANY_TOKENS, ROOT, line

NUM_COMMANDED = 40
"""Lines for the command, of which four have short answers."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A server that makes its tokens up, with a folder for batches."""
    require_default_model()
    path = tmp_path / "batches.yaml"
    sections = {
        "model": {"source": f"{NULL}{DEFAULT_MODEL}"},
        "cache": {"segment_gib": 0.1, "num_blocks": 600},
        "workers": {"mixed": {"token_budget": 256, "max_requests": 8}},
        "batches": {"folder": str(tmp_path / "batches"), "concurrency": 2},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


def raydix_batch(config: Path, source: Path, output: Path, gate: Path) -> subprocess.Popen[bytes]:
    """`raydix batch`, which steps slowly while there is a gate."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paced = [sys.executable, "-m", "tests.integration.paced_command", str(gate)]
    command = [*paced, "batch", str(source), "-o", str(output), "--config", str(config), "--concurrency", "2"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=own, cwd=ROOT, start_new_session=True)


def num_answered(command: subprocess.Popen[bytes] | None, journal: Path) -> int:
    """Lines of the journal; fails if the command has ended."""
    assert command is None or command.poll() is None, command.communicate()
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_the_command_goes_on_where_it_was_interrupted_and_killed(config: Path, tmp_path: Path) -> None:
    """Each time when its journal has another answer, while those behind it would take some minutes more."""
    source, output, gate = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "gate"
    journal = output.with_name("out.jsonl.journal")
    lengths = [MANY_TOKENS * (1 if number < 4 else 8) for number in range(NUM_COMMANDED)]
    answerable = [
        line(str(number), {"prompt": f"{number} sheep", "max_tokens": length, "ignore_eos": True})
        for number, length in enumerate(lengths)
    ]
    source.write_bytes(b"".join(answerable) + line("bad", {"prompt": 7}))

    gate.touch()
    first = raydix_batch(config, source, output, gate)
    eventually(lambda: num_answered(first, journal) > 0, "some are answered")
    first.send_signal(signal.SIGINT)
    _, shown = first.communicate(timeout=WAIT_S)
    assert first.returncode == 130, shown
    assert b"the same command goes on" in shown and not output.exists()

    num_before = num_answered(None, journal)
    second = raydix_batch(config, source, output, gate)
    eventually(lambda: num_answered(second, journal) > num_before, "more are answered")
    second.kill()
    second.communicate(timeout=WAIT_S)
    assert num_before < num_answered(None, journal) < NUM_COMMANDED and not output.exists()

    gate.unlink()
    third = raydix_batch(config, source, output, gate)
    _, shown = third.communicate(timeout=WAIT_S)
    assert third.returncode == 1, shown
    assert f"{NUM_COMMANDED} of {NUM_COMMANDED + 1} lines answered".encode() in shown.replace(b"\n", b" ")
    ids = [json.loads(each)["custom_id"] for each in output.read_bytes().splitlines()]
    assert ids == [*map(str, range(NUM_COMMANDED))]
    [failed] = (tmp_path / "out.errors.jsonl").read_bytes().splitlines()
    assert json.loads(failed)["custom_id"] == "bad"
    assert not journal.exists()

    config.write_text(yaml.safe_dump({"model": {"source": f"{NULL}/nowhere"}}))
    fourth = raydix_batch(config, source, output, gate)
    _, shown = fourth.communicate(timeout=WAIT_S)
    assert fourth.returncode == 1 and f"{NUM_COMMANDED} of {NUM_COMMANDED + 1} lines answered".encode() in shown, (
        "nothing is left to do, so no model is loaded"
    )
