"""Ten streams on three workers, of which two die of a request, no third one does, and one leaves in the end."""

import ctypes
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.chaos.harness import NUM_STREAMS, Load, Outcome, Streams
from tests.integration.cluster import Cluster, Live, paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt

NUM_WORKERS = 3
NUM_TOKENS = 120
PACE_S = 0.4
"""Least time of a step while workers die: the other streams outlast that."""
FATAL = 300
"""The first token of the prompt under which workers die."""
BLOCK = 16
LEAVING_PACE_S = 1.0
"""Least time of a step while a worker leaves: the streams outlast that."""


def config(num_workers: int) -> dict[str, Any]:
    return {
        "model": {"max_model_len": 4096},
        "cache": {"num_blocks": 2400, "segment_gib": 0.5, "swap_gib": 0.05},
        "workers": {"mixed": {"replicas": num_workers, "token_budget": 256, "max_requests": 32}},
        "speculation": {"mode": "off"},  # one token per step, as the pace is one of steps
    }


@pytest.fixture(scope="module")
def live(cluster: Cluster) -> Live:
    running = cluster.serve(config(NUM_WORKERS))
    eventually(lambda: running.num_workers() == NUM_WORKERS, "all workers")
    return running


def arm(server: Server) -> None:
    """Have each present worker get a fatal signal in a step of the fatal request: when it has three tokens."""

    def replace(worker: Any) -> None:  # runs in the worker's process
        runner = worker._engine.runner
        compute = runner.hidden

        def hidden(chunks: Any) -> Any:
            requests = [chunk.request for chunk in chunks]
            if any(each.token_ids[0] == FATAL and each.num_output >= 3 for each in requests):
                ctypes.string_at(0)  # SIGSEGV
            return compute(chunks)

        runner.hidden = hidden

    ray.get([worker.__ray_call__.remote(replace) for worker in server.incarnations()], timeout=WAIT_S)


def epochs(server: Server) -> dict[str, int]:
    """The incarnation of each worker, once all workers are there."""
    statistics = eventually(
        lambda: found if len(found := server.all_workers()) == NUM_WORKERS else None, "all workers are back"
    )
    return {each["worker_id"]: each["epoch"] for each in statistics}


def fatal(*, stream: bool) -> dict[str, Any]:
    prompt = [FATAL, *range(400, 440)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_request_that_kills_its_workers_is_refused_after_the_second(
    live: Live, tmp_path: Path, *, is_streamed: bool
) -> None:
    server, salt = live.server, f"beside {is_streamed}"
    prompts = [random_prompt(8000 + index, 60 + 20 * index) for index in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(partial(server.complete, max_tokens=NUM_TOKENS, cache_salt=salt), prompts))
    load = Load(prompts, [answer["choices"][0]["token_ids"] for answer in answers])
    before, num_refused = epochs(server), len([each for each in live.events("request_named") if each["refused"]])

    streams, gate = Streams(server, load, salt), tmp_path / "gate"
    with paced(server, gate, PACE_S):  # the streams last until the gate is gone
        arm(server)
        streams.start()
        streams.wait_for_tokens(3, NUM_STREAMS)
        status, _, data = server.request("POST", "/v1/completions", fatal(stream=is_streamed))
        is_beside = [len(stream.token_ids) < NUM_TOKENS for stream in streams.streams]
        gate.unlink()

        outcome = Outcome("worker", "decode", "dies")
        streams.finish(outcome, 0.0)
        after = epochs(server)

    assert any(is_beside), "workers died under streams"
    if is_streamed:
        lines = [line for line in data.decode().splitlines() if line.startswith("data: ")]
        assert status == 200 and len(lines) > 1, "tokens of the first attempt"
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
    else:
        assert status == 400, data
        error = json.loads(data)["error"]
    assert error["code"] == "request_stops_workers"
    named = [each for each in live.events("request_named") if each["refused"]]
    assert len(named) == num_refused + 1

    assert (outcome.identical, outcome.broken) == (NUM_STREAMS, 0), outcome.errors
    assert before.keys() == after.keys()
    assert len([name for name in before if after[name] > before[name]]) == 2, "two workers died and are back"
    assert len([name for name in before if after[name] == before[name]]) == 1, "no third worker is hit"


def hit_rate(live: Live, load: Load, salt: str) -> float:
    """Share of the prompts' full blocks that are found when everything is asked again."""
    answers = [live.server.complete(prompt, max_tokens=1, cache_salt=salt) for prompt in load.prompts]
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    return float(cached / sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in load.prompts))


def test_a_worker_leaves_under_load(live: Live, tmp_path: Path) -> None:
    """The last test of this application: fewer workers, and nothing fails over."""
    eventually(lambda: live.num_workers() == NUM_WORKERS, "all workers")
    num_failovers = len(live.events("failover"))
    prompts = [random_prompt(7000 + index, 200 + 35 * index) for index in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "cache_salt": "before"}
        answers = list(pool.map(lambda each: live.server.complete(each, **fields), prompts))
    load = Load(prompts, [answer["choices"][0]["token_ids"] for answer in answers])
    before = hit_rate(live, load, "before")
    assert before > 0.9

    streams = Streams(live.server, load, "leaving")
    with paced(live.server, tmp_path / "gate", LEAVING_PACE_S):
        streams.start()
        streams.wait_for_tokens(8, NUM_STREAMS)
        since = time.monotonic()
        done = live.deploy(config(NUM_WORKERS - 1))
        eventually(lambda: live.events("moved"), "requests move")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = Outcome("worker", "decode", "leaves")
    streams.finish(outcome, since)
    assert (outcome.identical, outcome.broken) == (NUM_STREAMS, 0), outcome.errors
    print(f"longest pause {outcome.longest_pause_s:.2f} s, {len(live.events('moved'))} requests moved")
    assert len(live.events("failover")) == num_failovers

    eventually(lambda: live.num_workers() == NUM_WORKERS - 1, "one worker less")
    assert hit_rate(live, load, "before") >= before - 0.1
    assert hit_rate(live, load, "leaving") >= before - 0.1
