"""Four Ray nodes, each on a network of its own: equal answers, KV from other nodes, and nodes and links that fail.

The tests run in order: nodes go and come.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.harness import NUM_STREAMS, Load, Outcome, Streams
from tests.integration.conftest import eventually, random_prompt
from tests.nodes.conftest import NUM_TOKENS, ROLES, Disturbance
from tests.nodes.deployment import Deployment, wait_for_roles

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]

BLOCK = 16
CUT_S = 6.0
BACK_S = 120


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
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    return float(cached / sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in load.prompts))


def disturbed(
    cluster: Deployment, load: Load, what: str, disturb: Callable[[], None], disturbances: list[Disturbance]
) -> Disturbance:
    """Ten streams, disturbed when all decode; nothing may change in their answers."""
    streams = Streams(cluster.server, load, what)
    streams.start()
    streams.wait_for_tokens(8, NUM_STREAMS)
    since = time.monotonic()
    disturb()
    outcome = Outcome(what, "decode", "")
    streams.finish(outcome, since)
    seen = Disturbance(
        what,
        identical=outcome.identical,
        broken=outcome.broken,
        longest_pause_s=round(outcome.longest_pause_s, 2),
        hit_rate_after=round(hit_rate(cluster, load, what), 3),
    )
    disturbances.append(seen)
    assert outcome.broken == 0, outcome.errors
    assert outcome.identical == NUM_STREAMS
    return seen


def test_roles_land_on_their_nodes(cluster: Deployment) -> None:
    assert set(cluster.workers()) == set(ROLES)
    assert len({cluster.worker_pid(role) for role in ROLES}) == len(ROLES)


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


def test_a_short_cut_replaces_nobody(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    """The link of a decode worker is gone for two seconds, then for six: its streams go on, its process stays."""
    before = {role: cluster.worker_pid(role) for role in ROLES}
    machine = cluster.nodes["decode"].machine
    for seconds in (2.0, CUT_S):
        timer = threading.Timer(seconds, machine.mend)

        def cut(timer: threading.Timer = timer) -> None:
            machine.cut()
            timer.start()

        disturbed(cluster, load, f"link of the decode worker gone for {seconds:g} s", cut, disturbances)
        timer.join()
        wait_for_roles(cluster, *ROLES, timeout_s=BACK_S)
        assert {role: cluster.worker_pid(role) for role in ROLES} == before


def test_a_slow_link(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    machine = cluster.nodes["decode"].machine
    machine.limit(50)
    try:
        disturbed(cluster, load, "link of the decode worker slowed to 50 Mbit/s", lambda: None, disturbances)
    finally:
        machine.unlimit()


def test_a_node_is_killed_and_another_added(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    disturbed(cluster, load, "decode node killed", lambda: cluster.kill_node("decode"), disturbances)
    wait_for_roles(cluster, "prefill", "mixed", timeout_s=BACK_S)
    cluster.add_node("decode")
    wait_for_roles(cluster, *ROLES, timeout_s=2 * BACK_S)
    assert completed(cluster, load.prompts[0], "added")[0] == load.answers[0]


def test_a_node_vanishes(cluster: Deployment, load: Load, disturbances: list[Disturbance]) -> None:
    """The link of a node is cut for good: its processes go on, and nobody hears them."""
    machine = cluster.nodes["mixed"].machine
    disturbed(cluster, load, "link of the mixed worker gone for good", machine.cut, disturbances)
    eventually(lambda: "mixed" not in cluster.workers(), "the silent worker is forgotten", BACK_S)
    assert completed(cluster, load.prompts[1], "vanished")[0] == load.answers[1]
