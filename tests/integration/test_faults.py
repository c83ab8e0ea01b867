"""Processes die and clients leave; streams go on, tokens come exactly once, and nothing stays held."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.integration.cluster import paced
from tests.integration.conftest import Server, eventually, random_prompt

PREFILL_PACE_S = 1.0
"""Least time of a step, so that a prompt of a dozen chunks is not prefilled before something is done to it."""


def collect(chunks: Any) -> list[int]:
    """All token ids of a stream that has to end properly."""
    token_ids, finish = [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            token_ids += choice.get("token_ids", [])
            finish = choice["finish_reason"] or finish
    assert finish == "length"
    return token_ids


def is_replaced(server: Server, killed: dict[str, Any]) -> bool:
    """Whether another incarnation of a killed worker runs, started by the host that had started the killed one."""
    worker = server.workers()[killed["role"]]
    assert worker["worker_id"] == killed["worker_id"], "Serve had to replace the host"
    return bool(worker["epoch"] > killed["epoch"])


def num_attempts(server: Server, request_id: str) -> int:
    status, _, body = server.request("GET", f"/v1/requests/{request_id}/explain")
    assert status == 200, body
    return len(json.loads(body)["choices"][0]["attempts"])


def test_a_stream_survives_the_death_of_its_decode_worker(server: Server, tmp_path: Path) -> None:
    prompt = random_prompt(20, 400)
    expected = server.complete(prompt, max_tokens=100, cache_salt="reference")["choices"][0]["token_ids"]
    worker = server.workers()["decode"]
    with paced(server, tmp_path / "gate"):
        chunks = server.stream(prompt, max_tokens=100, cache_salt="killed")
        seen = [next(chunks), next(chunks)]
        server.kill(worker)
    assert collect([*seen, *chunks]) == expected
    eventually(lambda: is_replaced(server, worker), "the decode worker is back")
    assert num_attempts(server, seen[0]["id"]) == 2


def test_a_stream_survives_the_death_of_the_prefill_worker_after_its_first_token(
    server: Server, tmp_path: Path
) -> None:
    """The decode worker computes what of the prompt's KV has not come, and the request stays where it is."""
    prompt = random_prompt(25, 3000)
    expected = server.complete(prompt, max_tokens=20, cache_salt="reference")["choices"][0]["token_ids"]
    worker = server.workers()["prefill"]
    with paced(server, tmp_path / "gate"):
        chunks = server.stream(prompt, max_tokens=20, cache_salt="killed late")
        first = next(chunks)
        server.kill(worker)
    assert collect([first, *chunks]) == expected
    eventually(lambda: is_replaced(server, worker), "the prefill worker is back")
    assert num_attempts(server, first["id"]) == 1


def test_a_stream_survives_the_death_of_the_prefill_worker_before_its_first_token(
    server: Server, tmp_path: Path
) -> None:
    prompt = random_prompt(21, 3000)
    expected = server.complete(prompt, max_tokens=4, cache_salt="reference")["choices"][0]["token_ids"]
    worker = server.workers()["prefill"]
    with ThreadPoolExecutor(1) as pool:
        with paced(server, tmp_path / "gate", PREFILL_PACE_S):
            answer = pool.submit(server.complete, prompt, max_tokens=4, cache_salt="killed early")
            eventually(lambda: server.workers()["prefill"]["num_running"] > 0, "prefill has begun")
            server.kill(worker)
        assert answer.result()["choices"][0]["token_ids"] == expected
    eventually(lambda: is_replaced(server, worker), "the prefill worker is back")


def test_streams_and_requests_survive_the_death_of_the_manager(server: Server, tmp_path: Path) -> None:
    prompt = random_prompt(22, 300)
    expected = server.complete(prompt, max_tokens=60, cache_salt="m0")["choices"][0]["token_ids"]
    with paced(server, tmp_path / "gate"):
        chunks = server.stream(prompt, max_tokens=60, cache_salt="m1")
        seen = [next(chunks)]
        server.kill(server.manager())
    during = server.complete(prompt, max_tokens=60, cache_salt="m2")["choices"][0]["token_ids"]
    assert collect([*seen, *chunks]) == expected
    assert during == expected
    eventually(lambda: len(server.workers()) == 2, "workers have registered with the new manager")
    warm = server.complete(prompt, max_tokens=60, cache_salt="m0")
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the index grew back from the workers' pools"


def test_a_client_that_leaves_frees_everything(server: Server, tmp_path: Path) -> None:
    """While each step of the model takes so long that the answer does not end by itself."""
    with paced(server, tmp_path / "gate"):
        chunks = server.stream(random_prompt(23, 300), max_tokens=3000)
        next(chunks)
        assert not server.is_idle()
        chunks.close()
        eventually(server.is_idle, "the request's blocks and leases are free")


def test_a_client_that_leaves_before_the_first_token_frees_everything(server: Server, tmp_path: Path) -> None:
    connection = http.client.HTTPConnection(server.host, server.port)
    body = {"model": "SmolLM2-135M-Instruct", "prompt": random_prompt(24, 3500), "max_tokens": 100}
    with paced(server, tmp_path / "gate", PREFILL_PACE_S):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        eventually(lambda: server.workers()["prefill"]["num_running"] > 0, "prefill has begun")
        connection.close()
    eventually(server.is_idle, "the request's blocks and leases are free")
