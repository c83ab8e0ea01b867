"""Four Ray nodes on this machine: ingress and manager, and a worker of each role. The table of disturbances is printed
at the end, and written to the file that the environment variable RAYDIX_NODES_JSON names."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.machine import describe
from raydix.engine.core.errors import StartupError
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from tests.chaos.harness import NUM_STREAMS, Load
from tests.integration.conftest import Server, random_prompt
from tests.integration.test_serve_cli import Terminal, terminate
from tests.nodes.deployment import FRONT, Deployment, wait_for_roles
from tests.nodes.network import Network, obstacle

TABLE = os.environ.get("RAYDIX_NODES_JSON") or None
"""File to write the table of disturbances to."""
ROLES = ("prefill", "decode", "mixed")
POOL = {"token_budget": 256, "max_requests": 32}
NUM_TOKENS = 100


def config(labelled: bool) -> dict[str, Any]:
    """Configuration of the cluster; with labels each role has a node of its own."""

    def on(label: str) -> dict[str, Any]:
        return {"label_selector": {"raydix": label}} if labelled else {}

    return {
        "model": {"max_model_len": 4096},
        "cache": {"num_blocks": 1600, "segment_gib": 0.25, "swap_gib": 0.05, **on(FRONT)},
        "workers": {role: {**POOL, **on(role)} for role in ROLES},
        "ingress": on(FRONT),
    }


@dataclass
class Disturbance:
    """One disturbance, and what ten clients saw of it."""

    what: str
    streams: int
    identical: int
    broken: int
    longest_gap_s: float
    """Between two tokens of a stream."""
    longest_wait_s: float
    """From a request to its first token."""
    failovers: int
    moves: int
    """Requests that left a worker which was about to stop."""
    hit_rate_before: float
    hit_rate_after: float


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Ten prompts, and their answers by a server of one node."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    try:
        resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))
    file = tmp_path_factory.mktemp("single") / "single.yaml"
    file.write_text(yaml.safe_dump(config(labelled=False)))
    terminal = Terminal("--config", str(file))
    try:
        terminal.until("ready after")
        server = Server("127.0.0.1", terminal.port)
        prompts = [random_prompt(9000 + index, 150 + 35 * index) for index in range(NUM_STREAMS)]
        answers = [server.complete(each, max_tokens=NUM_TOKENS)["choices"][0]["token_ids"] for each in prompts]
        terminate(terminal)
        terminal.wait()
    finally:
        terminal.close()
    return Load(prompts, answers)


@pytest.fixture(scope="module")
def cluster(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Four nodes, each with its part of raydix."""
    with Network() as network:
        deployment = Deployment(network, tmp_path_factory.mktemp("nodes"))
        for label in (FRONT, *ROLES):
            deployment.add_node(label)
        deployment.deploy(config(labelled=True))
        wait_for_roles(deployment, *ROLES)
        yield deployment


@pytest.fixture(scope="module")
def disturbances(request: pytest.FixtureRequest) -> Iterator[list[Disturbance]]:
    """What the disturbances did; printed and written at its end."""
    collected: list[Disturbance] = []
    yield collected
    rows = [asdict(each) for each in collected]
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        columns = " | ".join(each.name for each in fields(Disturbance))
        print("", columns, *(" | ".join(map(str, row.values())) for row in rows), sep="\n")
    if TABLE is not None:
        result = {**describe("pytest", ["tests/nodes"]), "disturbances": rows}
        Path(TABLE).write_text(json.dumps(result, indent=1) + "\n")
