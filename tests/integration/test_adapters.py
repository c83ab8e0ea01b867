"""A server with adapters: each answer has the bits of one engine, over hand-overs, hits, neighbours and a death."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.core.settings import EngineSettings, SchedulerLimits
from raydix.engine.core.tenants import salt_of
from raydix.engine.core.types import Adapter, Assignment, Sampling, Stage
from raydix.engine.model.adapters import identify_adapter
from raydix.engine.model.build import build_engine
from raydix.engine.model.sources import read_description
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL, Server, eventually, random_prompt
from tests.integration.local import Process, require_default_model
from tests.integration.thin_model import write_thin_model
from tests.model.random_adapters import write_adapter

PROMPT, ANSWER_TOKENS = random_prompt(960, 300), 24


@pytest.fixture
def model(tmp_path: Path) -> Path:
    require_default_model()
    return write_thin_model(tmp_path)


def logprobs_of_an_engine(model: Path, adapters: list[Adapter]) -> dict[str, list[float]]:
    """What one engine answers, each request alone."""
    folders = tuple((adapter.name, adapter.folder) for adapter in adapters)
    limits = SchedulerLimits(512, 8)
    engine = build_engine(EngineSettings(str(model), "bfloat16", "cpu", 2048, 16, 200, 0, limits, adapters=folders))
    sampling, values = Sampling(ANSWER_TOKENS, temperature=0.0, logprobs=0), {}
    for adapter in (None, *adapters):
        name, digest = (MODEL, b"") if adapter is None else (adapter.name, adapter.digest)
        salt = salt_of("tenant", None, adapter=digest)
        engine.submit(
            Assignment(name, 0, Stage.WHOLE, tuple(PROMPT), len(PROMPT), sampling, "", salt=salt, adapter=adapter),
            time.monotonic(),
        )
        events: list[Any] = []
        while (step := engine.step(time.monotonic())) is not None:
            events += step.events
        values[name] = [event.logprobs.chosen for event in events]
    return values


def ask(server: Server, name: str) -> tuple[list[float], int]:
    answer = server.complete(PROMPT, model=name, max_tokens=ANSWER_TOKENS, logprobs=0)
    assert answer["model"] == name
    cached = int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return answer["choices"][0]["logprobs"]["token_logprobs"], cached


def written(folder: Path, model: Path) -> list[Adapter]:
    """Two adapters of the model, with random weights."""
    config = read_description(str(model))
    for seed in range(2):
        write_adapter(folder / str(seed), config, seed, rank=8)
    return [identify_adapter(name, str(folder / str(at)), config) for at, name in enumerate(("sql", "org/rivers"))]


def check(server: Server, expected: dict[str, list[float]]) -> None:
    """Ask for each name, side by side and again."""
    with ThreadPoolExecutor(len(expected)) as pool:
        cold = dict(zip(expected, pool.map(lambda name: ask(server, name), expected), strict=True))
    assert {name: values for name, (values, _) in cold.items()} == expected, "side by side"
    assert {cached for _, cached in cold.values()} == {0}, "no KV of another name"
    warm = {name: ask(server, name) for name in expected}
    assert {name: values for name, (values, _) in warm.items()} == expected, "from the cache"
    assert all(cached >= len(PROMPT) // 16 * 16 for _, cached in warm.values())


def test_a_server_of_one_process(model: Path, tmp_path: Path) -> None:
    adapters = written(tmp_path, model)
    expected = logprobs_of_an_engine(model, adapters)
    assert len({tuple(values) for values in expected.values()}) == 3, "each says something else"
    folders = {adapter.name: adapter.folder for adapter in adapters}
    config = {
        "model": {"source": str(model), "max_model_len": 2048, "adapters": folders},
        "cache": {"num_blocks": 200},
        "batches": {"gib": 0},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    running = Process("--config", str(tmp_path / "config.yaml"))
    try:
        running.until("ready after")
        server = Server("127.0.0.1", running.port)
        check(server, expected)
        models = json.loads(server.request("GET", "/v1/models")[2])["data"]
        assert [(model["id"], model["parent"]) for model in models] == [
            (MODEL, None),
            *((adapter.name, MODEL) for adapter in adapters),
        ]
    finally:
        running.end()


def test_an_adapter_that_cannot_be_used_ends_the_start(model: Path, tmp_path: Path) -> None:
    adapter = written(tmp_path, model)[0]
    settings = Path(adapter.folder) / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "use_dora": True}))
    section = {"source": str(model), "adapters": {"sql": adapter.folder}}
    (tmp_path / "config.yaml").write_text(json.dumps({"model": section}))
    running = Process("--config", str(tmp_path / "config.yaml"))
    running.until("adapter sql: .*use_dora is not supported")
    assert running.process.wait() != 0


def test_a_cluster(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Prefilled by one worker and decoded by another, before and after the latter's death."""
    adapters = written(tmp_path, model)
    expected = logprobs_of_an_engine(model, adapters)
    workers = {"prefill": {"token_budget": 128, "max_requests": 8}, "decode": {"token_budget": 128, "max_requests": 8}}
    folders = {adapter.name: adapter.folder for adapter in adapters}
    section = {"source": str(model), "max_model_len": 2048, "adapters": folders}
    cache = {"num_blocks": 200, "segment_gib": 0.25}
    server = cluster.serve({"model": section, "cache": cache, "workers": workers}).server
    check(server, expected)

    server.kill(server.workers()["decode"])
    eventually(lambda: {"prefill", "decode"} <= server.workers().keys(), "another decode worker")
    assert {name: ask(server, name)[0] for name in expected} == expected, "with a worker that has just started"
