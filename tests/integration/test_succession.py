"""The manager is replaced by another one, and killed, under streams: nothing breaks, and what was cached is hit."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster, Live, paced
from tests.integration.conftest import eventually, random_prompt
from tests.integration.test_live_changes import PACE_S, STREAM_TOKENS, Background, cached, streamed

NUM_PROMPTS = 20
NUM_AT_ONCE = 5
"""Prompts that are asked right after the kill, whether the next manager is there or not."""


def config(transcript_mib: int) -> dict[str, Any]:
    return {
        "model": {"max_model_len": 4096},
        "cache": {"num_blocks": 600, "segment_gib": 0.1, "swap_gib": 0.05, "transcript_mib": transcript_mib},
        "workers": {
            "prefill": {"token_budget": 256, "max_requests": 8},
            "decode": {"token_budget": 128, "max_requests": 8},
        },
    }


@pytest.fixture(scope="module")
def live(cluster: Cluster) -> Live:
    running = cluster.serve(config(16))
    eventually(lambda: running.num_workers() == 2, "two workers")
    return running


def test_the_manager_is_replaced_under_a_stream(live: Live, tmp_path: Path) -> None:
    prompt = random_prompt(50, 320)
    live.server.complete(prompt, max_tokens=1)
    expected = [token_id for token_ids in streamed(live.server) for token_id in token_ids]
    before = live.parts()

    with paced(live.server, tmp_path / "gate", PACE_S):
        work = Background(live.server)
        eventually(lambda: work.token_ids, "the stream begins")
        done = live.deploy(config(17))
        num_streamed = len(work.token_ids)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarts: kv_cache_manager" in done.stdout, done.stdout
    assert num_streamed < STREAM_TOKENS, "the stream goes on meanwhile"
    assert {*work.stop_asking()} == {200}
    assert work.result() == expected and len(expected) == STREAM_TOKENS

    eventually(lambda: len(live.parts()) == len(before), "the old manager's host is gone")
    changed = {part for pid, part in before.items() - live.parts().items()}
    assert changed == {"KVCacheManager", "ServeReplica:raydix:kv_cache_manager"}
    [took_over] = live.events("took_over")
    assert took_over["segments"] > 0, took_over
    print(took_over)
    assert not live.events("failover")
    assert cached(live.server.complete(prompt, max_tokens=1)) >= 304


def test_hits_from_pools_return_after_the_manager_is_killed(live: Live) -> None:
    """Each prompt is asked once after the kill: one that missed is cached again."""
    prompts = [random_prompt(100 + number, 320) for number in range(NUM_PROMPTS)]
    for prompt in prompts:
        live.server.complete(prompt, max_tokens=1)
    eventually(live.standbys, "the manager has a standby")
    known = num_cached_blocks(live)
    [pid] = [pid for pid, part in live.parts().items() if part == "KVCacheManager"]
    os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    hits = [cached(live.server.complete(prompt, max_tokens=1)) for prompt in prompts[:NUM_AT_ONCE]]
    eventually(lambda: live.num_workers() == 2 and num_cached_blocks(live) >= known, "the next manager knows all")
    print(f"{sum(hit >= 304 for hit in hits)} of {NUM_AT_ONCE} hit; all known after {time.monotonic() - since:.2f} s")
    for prompt in prompts[NUM_AT_ONCE:]:
        assert cached(live.server.complete(prompt, max_tokens=1)) >= 304


def num_cached_blocks(live: Live) -> int:
    """Blocks in the pools of all workers, as far as the manager knows."""
    status, _, data = live.server.request("GET", "/v1/cache")
    return sum(worker["cached_blocks"] for worker in json.loads(data)["workers"]) if status == 200 else 0
