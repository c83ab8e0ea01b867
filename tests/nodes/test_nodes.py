"""Four Ray nodes, each on a network of its own: equal answers, KV from other nodes, and nodes and links that fail.

The tests run in order: nodes go and come.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.chaos.harness import Load
from tests.integration.conftest import eventually, random_prompt
from tests.nodes.clients import Clients
from tests.nodes.conftest import NUM_TOKENS, ROLES, TABLE, Disturbance, config
from tests.nodes.deployment import FRONT, Deployment, wait_for_roles

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1200)]

BLOCK = 16
GONE_GAP_S = 5.0
"""Longest gap of a stream whose worker vanishes."""
LEAVING_GAP_S = 1.0
"""Longest gap of a stream whose worker leaves."""
CHANGED_GAP_S = 1.0
"""Longest gap of a stream while a limit changes."""


def completed(cluster: Deployment, prompt: list[int], salt: str) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a greedy answer, and the explanation of its only attempt."""
    answer = cluster.server.complete(prompt, max_tokens=NUM_TOKENS, cache_salt=salt)
    status, _, data = cluster.server.request("GET", f"/v1/requests/{answer['id']}/explain")
    assert status == 200, data
    [request] = json.loads(data)["choices"]
    [attempt] = request["attempts"]
    return answer["choices"][0]["token_ids"], attempt


def hit_rate(cluster: Deployment, load: Load, salt: str) -> float:
    """Share of the prompts' full blocks that are found when everything is asked again."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda prompt: cluster.server.complete(prompt, max_tokens=1, cache_salt=salt), load.prompts)
        )
    full = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in load.prompts]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    return float(sum(map(min, cached, full)) / sum(full))


def disturbed(
    cluster: Deployment,
    load: Load,
    what: str,
    disturb: Callable[[], object],
    disturbances: list[Disturbance],
    until: Callable[[], object] = lambda: True,
) -> Disturbance:
    """Ten clients, disturbed when all streams decode, that go on `until` it is over; nothing may change in their
    answers."""
    hit_rate(cluster, load, what)
    before, num_failovers, num_moves = hit_rate(cluster, load, what), *counts(cluster)
    clients = Clients(cluster.server, load, what)
    clients.start()
    since = time.monotonic()
    try:
        disturb()
        eventually(until, f"the end of: {what}")
    finally:
        clients.finish()
    after_failovers, after_moves = counts(cluster)
    seen = Disturbance(
        what,
        streams=len(clients.streams),
        identical=clients.num_identical,
        broken=len(clients.errors),
        longest_gap_s=round(clients.longest_gap_s(since), 2),
        longest_wait_s=round(clients.longest_wait_s(since), 2),
        failovers=after_failovers - num_failovers,
        moves=after_moves - num_moves,
        hit_rate_before=round(before, 3),
        hit_rate_after=round(hit_rate(cluster, load, what), 3),
    )
    disturbances.append(seen)
    print(seen)
    assert seen.broken == 0, clients.errors
    assert seen.identical == seen.streams
    return seen


def check_gap(seen: Disturbance, goal_s: float) -> None:
    """Hold the longest gap to its goal where the table is written; other runs may share the machine with others."""
    assert TABLE is None or seen.longest_gap_s <= goal_s


def counts(cluster: Deployment) -> tuple[int, int]:
    """Failovers and moves so far."""
    return cluster.head.events("failover"), cluster.head.events("moved")


def failed_over(cluster: Deployment) -> Callable[[], bool]:
    """True once a request has failed over since now: without one, equal answers say nothing of the failure."""
    before, _ = counts(cluster)
    return lambda: counts(cluster)[0] > before


def pids(cluster: Deployment) -> dict[str, list[int]]:
    """The workers' processes by node."""
    return {name: node.worker_pids() for name, node in cluster.nodes.items()}


def test_roles_land_on_their_nodes(cluster: Deployment) -> None:
    assert {name: len(found) for name, found in pids(cluster).items()} == {FRONT: 0, **dict.fromkeys(ROLES, 1)}


def test_same_tokens_as_one_node(cluster: Deployment, load: Load) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: completed(cluster, prompt, "same")[0], load.prompts))
    assert answers == load.answers


def test_kv_is_found_across_nodes(cluster: Deployment) -> None:
    """A prompt is computed on one node, handed over to another, and hit by a third."""
    workers: set[str] = set()
    prompt = random_prompt(1, 40 * BLOCK)
    expected, first = completed(cluster, prompt, "across")
    workers |= {first["prefill_worker"], first["decode_worker"]}
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: completed(cluster, prompt, "across"), range(8)))
    for tokens, attempt in again:
        assert tokens == expected
        assert attempt["blocks"][0]["hit"]
        workers |= {attempt["prefill_worker"], attempt["decode_worker"]}
    assert len(workers) > 1, "blocks were sent from node to node"


def test_limits_change_in_place(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    """Neither a worker, nor the ingress, nor the manager is replaced for a limit."""
    before = cluster.parts()
    usual = config(labelled=True)

    def is_refused() -> bool:
        body = {"prompt": "a", "n": 41, "max_tokens": 1}
        return b"at most 40" in cluster.server.request("POST", "/v1/completions", body)[2]

    def change() -> None:
        cluster.deploy({**usual, "ingress": {**usual["ingress"], "max_queued_requests": 40}})

    assert not is_refused()
    seen = disturbed(cluster, load, "a limit of the ingress changed", change, disturbances, until=is_refused)
    cluster.deploy(usual)
    eventually(lambda: not is_refused(), "the limit is as before")
    assert cluster.parts() == before
    check_gap(seen, CHANGED_GAP_S)


@pytest.mark.parametrize("seconds", [2.0, 6.0])
def test_a_short_cut_replaces_nobody(
    cluster: Deployment, load: Load, disturbances: list[Disturbance], seconds: float
) -> None:
    """The link of a decode worker is gone for some seconds: its streams go on, its process stays."""
    before = pids(cluster)
    machine = cluster.nodes["decode"].machine
    timer = threading.Timer(seconds, machine.mend)

    def cut() -> None:
        machine.cut()
        timer.start()

    what = f"link of the decode worker gone for {seconds:g} s"
    seen = disturbed(cluster, load, what, cut, disturbances, timer.finished.is_set)
    timer.join()
    wait_for_roles(cluster, *ROLES)
    assert pids(cluster) == before
    check_gap(seen, GONE_GAP_S)


def test_a_slow_link(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    machine = cluster.nodes["decode"].machine
    machine.limit(50)
    try:
        disturbed(cluster, load, "link of the decode worker slowed to 50 Mbit/s", lambda: None, disturbances)
    finally:
        machine.unlimit()


def test_a_node_is_drained(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    """Another node is there for the worker of a node that is to be taken away."""
    old = cluster.nodes["decode"]
    cluster.add_node("decode", "decode 2")
    try:
        seen = disturbed(
            cluster,
            load,
            "decode node drained",
            lambda: cluster.drain_node("decode"),
            disturbances,
            until=lambda: not old.worker_pids() and cluster.nodes["decode 2"].worker_pids(),
        )
        wait_for_roles(cluster, *ROLES)
    finally:
        cluster.kill_node("decode")
    assert seen.failovers == 0
    check_gap(seen, LEAVING_GAP_S)
    assert seen.hit_rate_after >= seen.hit_rate_before - 0.1


def test_a_node_is_killed(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    kill = partial(cluster.kill_node, "decode 2")
    seen = disturbed(cluster, load, "decode node killed", kill, disturbances, until=failed_over(cluster))
    wait_for_roles(cluster, "prefill", "mixed")
    check_gap(seen, GONE_GAP_S)


def test_a_node_is_added(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    before = pids(cluster)
    disturbed(
        cluster,
        load,
        "decode node added",
        lambda: cluster.add_node("decode"),
        disturbances,
        until=lambda: len(cluster.workers()) == len(ROLES),
    )
    after = pids(cluster)
    assert after.pop("decode") and after == before
    assert completed(cluster, load.prompts[0], "added")[0] == load.answers[0]


def test_a_node_vanishes(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    """The link of a node is cut for good: its processes go on, and nobody hears them."""
    machine = cluster.nodes["mixed"].machine
    seen = disturbed(
        cluster,
        load,
        "link of the mixed worker gone for good",
        machine.cut,
        disturbances,
        until=failed_over(cluster),
    )
    eventually(
        lambda: "mixed" not in [worker["role"] for worker in cluster.workers()],
        "the silent worker is forgotten",
    )
    assert completed(cluster, load.prompts[1], "vanished")[0] == load.answers[1]
    check_gap(seen, GONE_GAP_S)
