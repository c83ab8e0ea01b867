"""guidellm: a run with synthetic prompts, as its first page shows it, by the routes of completions and of chats."""

import json
from pathlib import Path

import pytest

from tests.clients.programs.environment import PROGRAMS, installed_version, run
from tests.clients.server import Server

VERSION = installed_version("guidellm")
NUM_REQUESTS = 6
NUM_TOKENS = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VERSION, reason="not installed: .venv-clients/programs does not have it"),
]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_run(server: Server, tokenizer: Path, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    command: list[str | Path] = [PROGRAMS / "bin/guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={server.url},request_format={route}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={report}"]
    run(command, tmp_path)

    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    requests = benchmark["requests"]["successful"]
    assert [request["output_metrics"]["text_tokens"] for request in requests] == [NUM_TOKENS] * NUM_REQUESTS
