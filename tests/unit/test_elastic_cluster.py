"""Elastic workers of a whole cluster: same tokens whatever the duties, and nothing is lost when they change."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.types import Role
from tests.unit.cluster import Cluster, Sizes

pytestmark = pytest.mark.no_cover
"""Tracing makes these tests ten times slower; what they drive has tests of its own."""

E = Role.ELASTIC
SIZES = Sizes(block_size=4, num_blocks=256, token_budget=16, max_requests=16)
COSTS = WorkerCosts(step_s=0.01, prefill_token_s=2e-3, decode_token_s=2e-3, import_s=1e-3, spread=0.0)
"""A step of 16 prompt tokens takes 42 ms, one of 5 streams 20 ms."""
TIGHT = Objectives(ttft_s=1.0, tpot_s=0.025)
seeds = st.integers(0, 1 << 30)


def make_cluster(num_workers: int, objectives: Objectives = TIGHT) -> Cluster:
    """Elastic workers whose costs are known."""
    cluster = Cluster([E] * num_workers, SIZES)
    directory = cluster.manager.directory
    directory.change_limits(0, COSTS, (), objectives)
    for name, worker in cluster.workers.items():
        directory.fleet.measured(name, worker.epoch, COSTS, SIZES.num_blocks)
    return cluster


def duties(cluster: Cluster) -> list[Role]:
    return [worker.duty for worker in cluster.manager.directory.fleet.values()]


def deal(cluster: Cluster, random: Random) -> None:
    """Give the workers any duties, as no load would."""
    fleet = cluster.manager.directory.fleet
    fleet.assign({name: random.choice([Role.PREFILL, Role.DECODE, Role.MIXED]) for name in fleet})


@given(seed=seeds, num_workers=st.integers(1, 4))
@settings(max_examples=25)
def test_duties_may_change_at_any_time(seed: int, num_workers: int) -> None:
    """`Cluster.drain` checks tokens, blocks and reservations of every request."""
    random, cluster = Random(seed), make_cluster(num_workers)
    for number in range(12):
        start = 1000 * random.randrange(4)
        cluster.request({f"r{number}": range(start, start + random.randrange(1, 60))}, random.randrange(1, 12))
        for _ in range(random.randrange(12)):
            cluster.turn(random)
        deal(cluster, random)
    cluster.drain(random)
    assert len(cluster.ended) == 12


@given(seed=seeds)
@settings(max_examples=15)
def test_a_worker_may_die_under_any_duty(seed: int) -> None:
    random, cluster = Random(seed), make_cluster(3)
    for number in range(8):
        cluster.request({f"r{number}": range(100 * number, 100 * number + 40)}, 8)
        deal(cluster, random)
        for _ in range(random.randrange(10)):
            cluster.turn(random)
    cluster.kill("w0")
    cluster.drain(random)
    assert len(cluster.ended) == 8


@pytest.mark.parametrize("seed", range(3))
def test_duties_follow_a_load_that_shifts_from_prompts_to_answers(seed: int) -> None:
    """Long prompts first, and when most of them are done short ones with long answers."""
    random, cluster = Random(seed), make_cluster(3)
    directory = cluster.manager.directory
    for number in range(30):
        cluster.request({f"prompt{number}": range(1000 * number, 1000 * number + 100)}, 2)
        for _ in range(12):
            cluster.turn(random)
        cluster.pass_time(0.1)
        directory.fleet.divide(directory.objectives, cluster.now)
    num_prefill = duties(cluster).count(Role.PREFILL)
    assert num_prefill and Role.DECODE in duties(cluster)
    while sum(worker.queued_us for worker in directory.fleet.values()) > 300_000:
        cluster.turn(random)

    cluster.request({f"answer{number}": range(100_000 * number, 100_000 * number + 8) for number in range(1, 41)}, 60)
    for _ in range(5):
        for _ in range(60):
            cluster.turn(random)
        cluster.pass_time(1.0)
        directory.fleet.divide(directory.objectives, cluster.now)
    assert duties(cluster).count(Role.PREFILL) < num_prefill
    cluster.drain(random)
    assert len(cluster.ended) == 70
