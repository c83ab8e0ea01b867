"""KV on disk: what was computed before a restart is hit after it, and damage costs time only.

`test_whole_kill` kills a whole server with a disk; here the application is replaced, every process of it by SIGKILL.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydix.engine.model.segment_files import SegmentFiles
from tests.integration.cluster import Cluster
from tests.integration.conftest import Server, eventually, random_prompt
from tests.integration.test_serve_cli import Terminal

PROMPT, DAMAGED = random_prompt(901, 500), random_prompt(902, 500)
LIMITS = {"token_budget": 256, "max_requests": 8}


def config(folder: Path, workers: dict[str, Any]) -> dict[str, Any]:
    cache = {"num_blocks": 200, "segment_gib": 0.1, "swap_gib": 0.05, "disk_gib": 0.5, "disk_path": str(folder)}
    return {"model": {"max_model_len": 2048}, "cache": cache, "workers": workers}


def ask(server: Server, prompt: list[int], num_answer: int = 8) -> tuple[list[int], int]:
    """Tokens of the answer, and how many of the prompt were cached."""
    answer: dict[str, Any] = server.complete(prompt, max_tokens=num_answer)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_blocks_in(folder: Path) -> int:
    files = [path.read_bytes().split(b"\n", 1)[0] for path in folder.glob("*.kv")]
    return sum(len(json.loads(header)["hashes"]) for header in files)


def test_a_second_server_does_not_start_on_the_same_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "kv", tmp_path / "disk.yaml"
    file.write_text(yaml.safe_dump({"cache": {"disk_gib": 0.5, "disk_path": str(folder)}, "workers": {"mixed": {}}}))
    first = SegmentFiles(folder)
    first.open()
    second = Terminal("--config", str(file))
    try:
        assert second.wait() == 2
        assert "is used by another server" in " ".join(second.screen.split())
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize("workers", [{"prefill": LIMITS, "decode": LIMITS}, {"mixed": LIMITS}], ids=["split", "mixed"])
def test_another_application_hits_what_was_cached_before(
    cluster: Cluster, tmp_path: Path, workers: dict[str, Any]
) -> None:
    folder = tmp_path / "kv"
    server = cluster.serve(config(folder, workers)).server
    answer, num_cached = ask(server, PROMPT, 45)
    assert num_cached == 0
    eventually(lambda: num_blocks_in(folder) >= (500 + 44) // 16, "prompt and answer on disk")
    undamaged = set(folder.iterdir())
    expected, _ = ask(server, DAMAGED)
    eventually(lambda: num_blocks_in(folder) >= (500 + 44) // 16 + 500 // 16, "the other prompt on disk")

    cluster.remove()
    damaged = set(folder.iterdir()) - undamaged
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    server = cluster.serve(config(folder, workers)).server
    again, num_cached = ask(server, PROMPT, 45)
    assert again == answer and num_cached >= 500 // 16 * 16
    follow_up = PROMPT + answer + random_prompt(903, 100)
    assert ask(server, follow_up)[1] == (500 + 44) // 16 * 16
    assert ask(server, DAMAGED) == (expected, 0)
