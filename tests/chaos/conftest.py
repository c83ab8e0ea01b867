"""A cluster with two workers of each role on the real model. What the kills did is printed as a table at the end, and
written to the file that the environment variable RAYDIX_CHAOS_JSON names."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.machine import describe
from raydix.engine.model.sources import DEFAULT_MODEL
from tests.chaos.harness import NUM_STREAMS, NUM_WORKERS, Load, Outcome
from tests.integration.cluster import Cluster
from tests.integration.conftest import Server, eventually, random_prompt

COLUMNS = (
    "victim",
    "moment",
    "how",
    "identical",
    "unfinished",
    "broken",
    "failovers",
    "longest_pause_s",
    "fresh_s",
    "noticed_s",
    "back_s",
)


@pytest.fixture(scope="module")
def pairs(cluster: Cluster) -> Server:
    """A server with two prefill and two decode workers."""
    pool = {"replicas": 2, "token_budget": 256, "max_requests": 32}
    config = {
        "model": {"source": DEFAULT_MODEL, "max_model_len": 4096},  # whose prompts take long enough to be disturbed
        "cache": {"num_blocks": 1600, "segment_gib": 0.5, "swap_gib": 0.05},
        "workers": {"prefill": pool, "decode": pool},
    }
    server = cluster.serve(config).server
    eventually(lambda: len(server.all_workers()) == NUM_WORKERS, "all workers are registered")
    return server


@pytest.fixture(scope="module")
def load(pairs: Server) -> Load:
    """Ten prompts with the answers of an undisturbed server."""
    prompts = [random_prompt(9000 + index, 150 + 35 * index) for index in range(NUM_STREAMS)]

    def answer(prompt: list[int]) -> list[int]:
        token_ids: list[int] = pairs.complete(prompt, max_tokens=60, cache_salt="reference")["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return Load(prompts, list(pool.map(answer, prompts)))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[Outcome]]:
    """What the kills did; printed and written at its end."""
    collected: list[Outcome] = []
    yield collected
    rows = [asdict(outcome) for outcome in collected]
    lines = [" | ".join(_cell(row[column]) for column in COLUMNS) for row in rows]
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print("", " | ".join(COLUMNS), *lines, sep="\n")
    path = os.environ.get("RAYDIX_CHAOS_JSON")
    if path is not None:
        result = {**describe("pytest", ["tests/chaos"]), "cases": rows}
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
