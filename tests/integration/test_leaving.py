"""Fewer workers, and then more, under ten streams: nothing breaks, nothing fails over, and what was cached is hit."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import NUM_STREAMS, Load, Outcome, Streams
from tests.integration.cluster import Cluster, Live, paced
from tests.integration.conftest import eventually, random_prompt

BLOCK = 16
NUM_TOKENS = 120
PACE_S = 1.0
"""Least time of a step while the worker leaves: the streams outlast that."""


def config(num_workers: int) -> dict[str, Any]:
    return {
        "model": {"max_model_len": 4096},
        "cache": {"num_blocks": 2400, "segment_gib": 0.5, "swap_gib": 0.05},
        "workers": {"mixed": {"replicas": num_workers, "token_budget": 256, "max_requests": 32}},
        "speculation": {"mode": "off"},  # one token per step, as the pace is one of steps
    }


@pytest.fixture(scope="module")
def live(cluster: Cluster) -> Live:
    running = cluster.serve(config(2))
    eventually(lambda: running.num_workers() == 2, "two workers")
    return running


def hit_rate(live: Live, load: Load, salt: str) -> float:
    """Share of the prompts' full blocks that are found when everything is asked again."""
    answers = [live.server.complete(prompt, max_tokens=1, cache_salt=salt) for prompt in load.prompts]
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    return float(cached / sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in load.prompts))


def test_a_worker_leaves_under_load(live: Live, tmp_path: Path) -> None:
    prompts = [random_prompt(7000 + index, 200 + 35 * index) for index in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "cache_salt": "before"}
        answers = list(pool.map(lambda each: live.server.complete(each, **fields), prompts))
    load = Load(prompts, [answer["choices"][0]["token_ids"] for answer in answers])
    before = hit_rate(live, load, "before")
    assert before > 0.9

    streams = Streams(live.server, load, "leaving")
    with paced(live.server, tmp_path / "gate", PACE_S):
        streams.start()
        streams.wait_for_tokens(8, NUM_STREAMS)
        since = time.monotonic()
        done = live.deploy(config(1))
        eventually(lambda: live.events("moved"), "requests move")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = Outcome("worker", "decode", "leaves")
    streams.finish(outcome, since)
    assert (outcome.identical, outcome.broken) == (NUM_STREAMS, 0), outcome.errors
    print(f"longest pause {outcome.longest_pause_s:.2f} s, {len(live.events('moved'))} requests moved")
    assert not live.events("failover")

    eventually(lambda: live.num_workers() == 1, "one worker is left")
    assert hit_rate(live, load, "before") >= before - 0.1
    assert hit_rate(live, load, "leaving") >= before - 0.1
