"""Fewer workers, and then more, under ten streams: nothing breaks, nothing fails over, and what was cached is hit."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from engine.core.errors import StartupError
from engine.model.sources import DEFAULT_MODEL, resolve_model
from tests.chaos.harness import NUM_STREAMS, Load, Outcome, Streams
from tests.integration.conftest import Server, eventually, random_prompt
from tests.integration.test_live_changes import Live
from tests.integration.test_serve_cli import READY_S, Terminal

BLOCK = 16


def config(num_workers: int) -> dict[str, Any]:
    return {
        "model": {"max_model_len": 4096},
        "cache": {"num_blocks": 2400, "segment_gib": 0.5, "swap_gib": 0.05},
        "workers": {"mixed": {"replicas": num_workers, "token_budget": 256, "max_requests": 32}},
        "speculation": {"mode": "off"},  # Streams that repeat themselves would be over before the worker leaves.
    }


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    try:
        resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))
    file = tmp_path_factory.mktemp("leaving") / "leaving.yaml"
    file.write_text(yaml.safe_dump(config(2)))
    terminal = Terminal("--config", str(file))
    try:
        eventually(lambda: terminal.shows("ready after"), "ready", READY_S)
        running = Live(terminal, Server("127.0.0.1", terminal.port), file)
        eventually(lambda: num_workers(running) == 2, "two workers", READY_S)
        yield running
    finally:
        terminal.close()


def num_workers(live: Live) -> int:
    status, _, data = live.server.request("GET", "/v1/cache")
    return len(json.loads(data)["workers"]) if status == 200 else 0


def events(live: Live, name: str) -> int:
    """Lines of an event in the logs of all processes."""
    lines = [line for path in live.terminal.log_files() for line in path.read_text().splitlines()]
    return sum(json.loads(line).get("event") == name for line in lines)


def hit_rate(live: Live, load: Load, salt: str) -> float:
    """Share of the prompts' full blocks that are found when everything is asked again."""
    answers = [live.server.complete(prompt, max_tokens=1, cache_salt=salt) for prompt in load.prompts]
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    return float(cached / sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in load.prompts))


def test_a_worker_leaves_under_load(live: Live) -> None:
    prompts = [random_prompt(7000 + index, 200 + 35 * index) for index in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(lambda each: live.server.complete(each, max_tokens=1000, cache_salt="before"), prompts))
    load = Load(prompts, [answer["choices"][0]["token_ids"] for answer in answers])
    before = hit_rate(live, load, "before")
    assert before > 0.9

    streams = Streams(live.server, load, "leaving")
    streams.start()
    streams.wait_for_tokens(8, NUM_STREAMS)
    since = time.monotonic()
    done = live.deploy(config(1))
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = Outcome("worker", "decode", "leaves")
    streams.finish(outcome, since)
    assert (outcome.identical, outcome.broken) == (NUM_STREAMS, 0), outcome.errors
    print(f"longest pause {outcome.longest_pause_s:.2f} s, {events(live, 'moved')} requests moved")
    assert events(live, "moved") > 0 and events(live, "failover") == 0

    eventually(lambda: num_workers(live) == 1, "one worker is left", 90)
    assert hit_rate(live, load, "before") >= before - 0.1
    assert hit_rate(live, load, "leaving") >= before - 0.1
