"""Elastic workers under a load that changes: their number follows it within its bounds, and no stream notices."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.model.sources import DEFAULT_MODEL
from tests.chaos.harness import Stream
from tests.integration.cluster import Cluster, Live, Pace, paced
from tests.integration.conftest import Server, eventually, random_prompt

MOST = 3
NUM_ASKING = 8
PROMPT_TOKENS = 1500
STREAM_TOKENS = 3000
"""More than a stream gets before its client leaves."""
PACE_S = 0.2
"""Least time of a step while workers leave: the streams outlast that, and their objective is met."""
NUM_ANSWERS = 16
DUTIES = Pace(step_s=0.01, prompt_token_s=0.003, decode_s=0.06)
"""Slower than this model on most machines. A step with a long chunk takes longer than the objective for tokens, and
nine streams keep within it."""


def config(**elastic: Any) -> dict[str, Any]:
    return {
        "model": {"source": DEFAULT_MODEL, "max_model_len": 4096},  # whose prompts keep all workers busy
        "cache": {"num_blocks": 1200, "segment_gib": 0.5, "swap_gib": 0.05},
        "workers": {"elastic": {"token_budget": 256, "max_requests": 32, "num_threads": 1, **elastic}},
        "slo": {"ttft_ms": 1000, "tpot_ms": 1000},
        "speculation": {"mode": "off"},  # one token per step, as the pace is one of steps
    }


@pytest.fixture(scope="module")
def live(cluster: Cluster) -> Live:
    return cluster.serve(config(min_replicas=1, max_replicas=MOST, shrink_after_s=6))


class Asking:
    """Clients with long prompts and short answers, until they are stopped."""

    def __init__(self, server: Server, num_clients: int = NUM_ASKING, num_tokens: int = PROMPT_TOKENS) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._over = threading.Event()
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        seed = 1000 * number
        while not self._over.is_set():
            seed += 1
            body = {"model": "SmolLM2-135M-Instruct", "prompt": random_prompt(seed, self._num_tokens), "max_tokens": 1}
            self.statuses.append(self._server.request("POST", "/v1/completions", body)[0])


def workers(live: Live) -> list[dict[str, Any]]:
    status, _, data = live.server.request("GET", "/v1/cache")
    found: list[dict[str, Any]] = json.loads(data)["workers"] if status == 200 else []
    return found


def started(
    live: Live, salt: str, count: int = MOST, num_tokens: int = STREAM_TOKENS
) -> tuple[list[Stream], list[threading.Thread]]:
    """Streams of long answers that have begun."""
    streams = [Stream(random_prompt(7000 + index, 100), num_tokens, salt) for index in range(count)]
    threads = [threading.Thread(target=stream.run, args=(live.server,)) for stream in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def test_the_number_of_workers_follows_the_load(live: Live, tmp_path: Path) -> None:
    """The manager is killed while there are as many as there may be: nobody leaves because of that."""
    eventually(lambda: len(workers(live)) == 1, "the first worker")
    asking = Asking(live.server)
    try:
        eventually(lambda: len(workers(live)) == MOST, "as many workers as there may be")
        num_left = len(live.events("worker_leaving"))  # while others started, and slowed this machine down
        [pid] = [pid for pid, part in live.parts().items() if part == "KVCacheManager"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(workers(live)) == MOST, "the next manager knows the workers")
    finally:
        asking.stop()
    assert {*asking.statuses} == {200}

    with paced(live.server, tmp_path / "gate", PACE_S):
        streams, threads = started(live, "changing")
        eventually(lambda: len(workers(live)) == 1, "the least number of workers")
        assert all(thread.is_alive() for thread in threads), "the streams go on meanwhile"
        for stream in streams:
            stream.has_enough.set()
    for thread in threads:
        thread.join()

    assert [stream.error for stream in streams] == [None] * MOST
    pause_s = max(stream.longest_pause_s(stream.times[0]) for stream in streams)
    print(f"longest pause {pause_s:.2f} s, {len(live.events('moved'))} requests moved")
    assert len(live.events("worker_leaving")) >= num_left + MOST - 1 and not live.events("failover")

    longest = max(len(stream.token_ids) for stream in streams)
    undisturbed, threads = started(live, "undisturbed", num_tokens=longest)
    for thread in threads:
        thread.join()
    for stream, whole in zip(streams, undisturbed, strict=True):
        assert stream.token_ids == whole.token_ids[: len(stream.token_ids)]


def test_duties_follow_the_load(live: Live, tmp_path: Path) -> None:
    """Long prompts beside two answers, and then many answers: two workers prefill, and then none does only that."""
    fixed = {**config(replicas=MOST, token_budget=1024), "slo": {"ttft_ms": 1000, "tpot_ms": 600}}
    done = live.deploy(fixed)
    assert done.returncode == 0 and "restarts: nothing" in done.stdout, done.stdout + done.stderr
    eventually(lambda: len(workers(live)) == MOST, "three workers")

    with paced(live.server, tmp_path / "gate", DUTIES):
        for thread in started(live, "for measuring", 3 * MOST, 50)[1]:
            thread.join()

        few, threads = started(live, "few", 2, 3000)
        asking = Asking(live.server, 6, 1000)
        try:
            eventually(lambda: duties(live) == ["decode", "prefill", "prefill"], "two workers prefill")
        finally:
            asking.stop()

        many, others = started(live, "many", NUM_ANSWERS, 1000)
        eventually(lambda: duties(live).count("prefill") < 2, "more workers decode")
        for stream in [*few, *many]:
            stream.has_enough.set()
        for thread in [*threads, *others]:
            thread.join()
    assert {stream.error for stream in [*few, *many]} == {None}


def duties(live: Live) -> list[str]:
    return sorted(worker["duty"] for worker in workers(live))


def test_the_last_worker_goes_and_comes_back_for_a_request(live: Live) -> None:
    """Two clients ask while there is no worker: both are answered, with the KV that the last worker left behind."""
    none = config(min_replicas=0, max_replicas=MOST, shrink_after_s=4)
    done = live.deploy(none)
    assert done.returncode == 0 and "restarts: nothing" in done.stdout, done.stdout + done.stderr

    def answered() -> list[dict[str, Any]]:
        with ThreadPoolExecutor() as pool:
            prompts = [random_prompt(8000 + number, 400) for number in range(2)]
            return list(pool.map(lambda prompt: live.server.complete(prompt, max_tokens=8, cache_salt="zero"), prompts))

    before = answered()
    eventually(lambda: not workers(live), "no worker")
    assert live.server.request("GET", "/health")[0] == 200
    began = time.monotonic()
    after = answered()
    print(f"two answers after {time.monotonic() - began:.1f} s; {len(workers(live))} worker")
    assert [each["choices"][0]["token_ids"] for each in after] == [each["choices"][0]["token_ids"] for each in before]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in after] == [399, 399], (
        "all but the last position"
    )
