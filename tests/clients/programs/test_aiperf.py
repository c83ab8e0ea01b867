"""aiperf: a profile with synthetic prompts, as its first page shows it."""

import json
from pathlib import Path

import pytest

from tests.clients.programs.environment import PROGRAMS, installed_version, run
from tests.clients.server import MODEL, Server

VERSION = installed_version("aiperf")
NUM_REQUESTS = 6
NUM_TOKENS = 16
PATIENCE = {"AIPERF_SERVICE_REGISTRATION_TIMEOUT": "200", "AIPERF_SERVICE_REGISTRATION_MAX_ATTEMPTS": "200"}
"""Its ten processes start slowly where few cores serve the model, too."""
FOLDERS_ALLOWED = {"HF_HUB_OFFLINE": ""}
"""Offline, it takes every tokenizer for a repository of a hub, and refuses a folder."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VERSION, reason="not installed: .venv-clients/programs does not have it"),
]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_profile(server: Server, tokenizer: Path, tmp_path: Path, endpoint: str) -> None:
    command: list[str | Path] = [PROGRAMS / "bin/aiperf", "profile", "--model", MODEL, "--url", server.url]
    command += ["--endpoint-type", endpoint, "--streaming", "--tokenizer", tokenizer, "--ui", "none"]
    command += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--isl", "64", "--osl", str(NUM_TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", tmp_path / "artifacts", "--max-workers", "2"]
    run(command, tmp_path, **PATIENCE, **FOLDERS_ALLOWED)

    [report] = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS and not found.get("error_request_count")
    assert found["time_to_first_token"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] > 0  # counted by aiperf's own tokenizer, from the text
