"""What many requests of one prefix compute together, on however many workers: each block once."""

import os
import subprocess
import sys
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raydix.engine.core.types import DraftSource, Role
from tests.unit.cluster import AWAIT_TIMEOUT_S, PING_S, Cluster, Sizes

pytestmark = pytest.mark.no_cover
"""Tracing makes these tests ten times slower; what they drive has tests of its own."""

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
WORKER_SETS = [(M,), (M, M), (M, M, M, M), (P, D), (P, P, D, D), (P, P, P, D)]
SIZES = Sizes(block_size=16, num_blocks=256, token_budget=256, max_requests=16)
NUM_REQUESTS = 16
MAX_MESSAGES = 50
PREFIX = tuple(range(1000, 2024))
"""1,024 tokens: 64 blocks."""
SUFFIXES = [tuple(range(5000 + 100 * index, 5000 + 103 * index + 7)) for index in range(NUM_REQUESTS)]
"""From 7 to 52 tokens; no two begin with the same one, so that nothing of a block's beginning can be copied."""

every_worker_set = pytest.mark.parametrize("roles", WORKER_SETS, ids=lambda roles: "+".join(role[0] for role in roles))
seeds = st.integers(0, 1 << 30)


def start(cluster: Cluster, prompts: list[tuple[int, ...]], random: Random, at_once: bool) -> None:
    """Requests r0, r1 ... in one batch, or one by one while the others are under way."""
    named = {f"r{index}": prompt for index, prompt in enumerate(prompts)}
    if at_once:
        cluster.request(named)
        return
    for name, prompt in named.items():
        cluster.request({name: prompt})
        for _ in range(random.randrange(8)):
            cluster.turn(random)


def run(roles: tuple[Role, ...], prompts: list[tuple[int, ...]], seed: int, at_once: bool) -> Cluster:
    """All requests from their arrival to their end; nothing goes wrong, so nobody may wait for time to pass."""
    random, cluster = Random(seed), Cluster(roles, SIZES)
    # A partial block that is sent to a decode worker before its request is there gets lost, and is computed again.
    cluster.calls_are_prompt = D in roles
    start(cluster, prompts, random, at_once)
    cluster.drain(random)
    assert len(cluster.ended) == len(prompts)
    assert cluster.num_timeouts == 0
    return cluster


@every_worker_set
@given(seed=seeds, at_once=st.booleans())
@settings(max_examples=8)
def test_a_cold_prefix_is_computed_once(roles: tuple[Role, ...], seed: int, at_once: bool) -> None:
    cluster = run(roles, [PREFIX + suffix for suffix in SUFFIXES], seed, at_once)
    assert cluster.num_prefill_tokens == len(PREFIX) + sum(map(len, SUFFIXES))


@every_worker_set
@given(seed=seeds, at_once=st.booleans())
@settings(max_examples=8)
def test_the_suffix_begins_at_the_last_full_shared_block(roles: tuple[Role, ...], seed: int, at_once: bool) -> None:
    """Eleven tokens more are the same, and so few follow that no block gets full that another could begin with."""
    prompts = [(*PREFIX, *range(11), 100 + index) for index in range(NUM_REQUESTS)]
    assert run(roles, prompts, seed, at_once).num_prefill_tokens == len(PREFIX) + NUM_REQUESTS * 12


@every_worker_set
@given(seed=seeds, at_once=st.booleans())
@settings(max_examples=8)
def test_of_identical_prompts_the_last_token_is_computed(roles: tuple[Role, ...], seed: int, at_once: bool) -> None:
    assert run(roles, [PREFIX] * NUM_REQUESTS, seed, at_once).num_prefill_tokens == len(PREFIX) + NUM_REQUESTS - 1


@pytest.mark.parametrize("roles", [(M, M), (P, D, D)])
@given(seed=seeds)
@settings(max_examples=8)
def test_the_same_question_is_drafted_from_the_answer_of_another_worker(roles: tuple[Role, ...], seed: int) -> None:
    random, cluster = Random(seed), Cluster(roles, SIZES, sources=[DraftSource.CLUSTER])
    question = PREFIX[:70]
    cluster.request({"first": question}, max_tokens=40)
    cluster.drain(random)
    assert cluster.answered == ["first"]
    finished_by = cluster.ended["first"].finished_by
    assert finished_by is not None and cluster.num_accepted(finished_by, DraftSource.CLUSTER) == 0
    cluster.kill(finished_by)
    cluster.request({"again": question, "other": PREFIX[:71]}, max_tokens=40)
    cluster.drain(random)
    again = cluster.ended["again"]
    assert again.finished_by not in (None, finished_by) and again.tokens == cluster.ended["first"].tokens
    assert again.drafts[DraftSource.CLUSTER].num_accepted > 30 and not cluster.ended["other"].drafts
    assert sorted(cluster.answered) == ["again", "first", "other"]


@pytest.mark.parametrize("roles", [(M,), (P, D)])
@given(seed=seeds)
@settings(max_examples=8)
def test_the_beginning_of_a_block_is_copied(roles: tuple[Role, ...], seed: int) -> None:
    """One after the other on one prefilling worker: eleven tokens of the next block are found in the first's."""
    random, cluster = Random(seed), Cluster(roles, SIZES)
    cluster.calls_are_prompt = True
    for index in range(NUM_REQUESTS):
        cluster.request({f"r{index}": (*PREFIX, *range(11), *range(100 + 20 * index, 120 + 20 * index))})
        cluster.drain(random)
    assert cluster.num_prefill_tokens == len(PREFIX) + 31 + (NUM_REQUESTS - 1) * 20


@every_worker_set
@given(seed=seeds, num_steps=st.integers(1, 3))
@settings(max_examples=8)
def test_who_computes_leaves_and_another_goes_on(roles: tuple[Role, ...], seed: int, num_steps: int) -> None:
    """The blocks that were full stay where they are; only the rest of the prefix is computed, by one other."""
    random, cluster = Random(seed), Cluster(roles, SIZES)
    cluster.calls_are_prompt = True
    start(cluster, [PREFIX + suffix for suffix in SUFFIXES], random, at_once=True)
    while cluster.num_prefill_tokens < num_steps * SIZES.token_budget:
        cluster.turn(random)
    cluster.leave("r0")
    cluster.drain(random)
    assert cluster.num_prefill_tokens == len(PREFIX) + sum(map(len, SUFFIXES[1:]))
    assert cluster.num_timeouts == 0


@every_worker_set
@given(seed=seeds, num_steps=st.integers(1, 3), loses_mail=st.booleans(), comes_back=st.booleans())
@settings(max_examples=8)
def test_a_worker_that_computes_dies(
    roles: tuple[Role, ...], seed: int, num_steps: int, loses_mail: bool, comes_back: bool
) -> None:
    random, cluster = Random(seed), Cluster(roles, SIZES)
    cluster.calls_are_prompt = True
    start(cluster, [PREFIX + suffix for suffix in SUFFIXES], random, at_once=True)
    while cluster.num_prefill_tokens < num_steps * SIZES.token_budget:
        cluster.turn(random)
    lost = cluster.num_prefill_tokens
    worker = cluster.workers[cluster.active["r0"].prefill or ""]
    cluster.kill(worker.worker_id, loses_mail)
    if comes_back or len(roles) == 1:
        # A new one takes longer to start than the others take to notice.
        while worker.worker_id in cluster.manager.directory.fleet or cluster.admitting:
            cluster.turn(random)
        cluster.start_worker(worker.worker_id, worker.role, worker.epoch + 1)
    cluster.drain(random)
    assert len(cluster.ended) == NUM_REQUESTS
    # A decode worker that has just heard that blocks are lost does not wait when they are promised anew
    # (`EarlyMessages`); if then the handover overtakes an import, it computes the missing part of the prefix, too.
    again = len(PREFIX) if D in roles else 0
    assert cluster.num_prefill_tokens <= len(PREFIX) + sum(map(len, SUFFIXES)) + lost + again


@pytest.mark.parametrize("roles", [(M, M), (M, M, M, M), (P, P, D, D), (P, P, P, D)])
@given(seed=seeds, num_steps=st.integers(0, 3))
@settings(max_examples=8)
def test_a_worker_that_computes_stalls(roles: tuple[Role, ...], seed: int, num_steps: int) -> None:
    """One of those that wait elsewhere computes for all of them. The first goes on after all, and does no harm."""
    random, cluster = Random(seed), Cluster(roles, SIZES)
    cluster.calls_are_prompt = True
    start(cluster, [PREFIX + suffix for suffix in SUFFIXES], random, at_once=True)
    while cluster.is_placing or cluster.num_prefill_tokens < num_steps * SIZES.token_budget:
        cluster.turn(random)
    assume("r0" in cluster.active)  # its answer may be whole before the last request is placed
    computed = cluster.num_prefill_tokens
    stalled = cluster.active["r0"].prefill or ""
    cluster.stall(stalled)
    elsewhere = {name: g for name, g in cluster.active.items() if stalled not in (g.prefill, g.decode)}
    while elsewhere.keys() & cluster.active.keys():
        if not cluster.turn(random):
            cluster.ping()
            assert cluster.wait()
    assert cluster.now < 2 * AWAIT_TIMEOUT_S
    needed = len(PREFIX) + sum(len(generation.prompt) - len(PREFIX) for generation in elsewhere.values())
    assert needed <= cluster.num_prefill_tokens <= needed + computed
    cluster.resume(stalled)
    cluster.drain(random)
    assert len(cluster.ended) == NUM_REQUESTS
    assert cluster.num_prefill_tokens <= 2 * len(PREFIX) + sum(map(len, SUFFIXES)) + computed


@pytest.mark.parametrize("kind", ["calls", "tokens"])
@pytest.mark.parametrize("roles", [(M, M), (P, P, D, D)], ids=["mixed", "split"])
def test_a_call_or_tokens_that_are_lost_cost_seconds(roles: tuple[Role, ...], kind: str) -> None:
    """Pings find out, whichever it was; nobody waits for the end of a timeout."""
    num_found = 0
    for number in range(MAX_MESSAGES):
        random, cluster = Random(number), Cluster(roles, SIZES)
        cluster.request({"r0": PREFIX[:300], "r1": PREFIX[300:400]}, max_tokens=4)
        num_left = number
        while cluster.active and num_left >= 0:
            channel = next((each for each in cluster.mail if each[0] == kind), None)
            if channel is not None and not num_left:
                cluster.lose(channel)
                num_left -= 1
            elif channel is not None:
                num_left -= 1
                cluster.deliver(channel)
            elif not cluster.turn(random):
                assert cluster.wait()
        cluster.drain(random)
        assert cluster.now <= 4 * PING_S
        num_found += cluster.num_lost_attempts > 0
        if not cluster.num_lost:
            break
    assert cluster.num_lost == 0, "more messages than were tried"
    assert num_found


def course() -> list[object]:
    """Everything that came of many requests, among whose workers and blocks several are equally good."""
    random, cluster = Random(7), Cluster((P, P, D, D, M), SIZES, sources=[DraftSource.CLUSTER])
    start(cluster, [PREFIX[:90] + suffix for suffix in SUFFIXES], random, at_once=False)
    cluster.kill("w0")
    cluster.drain(random)
    ended = [(name, each.tokens, each.attempt, each.prefill, each.decode) for name, each in cluster.ended.items()]
    pools = [list(worker.engine.pool.hashes()) for worker in cluster.workers.values()]
    return [ended, pools, cluster.num_prefill_tokens, cluster.now]


def test_another_process_decides_the_same() -> None:
    """No decision depends on the order of a set of strings or of bytes, which differs between processes."""
    code = "from tests.unit.test_cluster import course; print(course())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and b"w4" in outputs.pop()
