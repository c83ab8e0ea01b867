"""What workers are reckoned to cost, by their own fits and their peers'."""

import random

import pytest

from raydix.engine.core.costs import CostFit, StepShape, WorkerCosts
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.peers import PeerCosts
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.types import AdmitRequest, BlockHash, EvictionReason, Role

PRIOR = WorkerCosts()
KIND = (Role.MIXED, 512, "cpu")


def costs(factor: float = 1.0, spread: float = 0.1) -> WorkerCosts:
    return WorkerCosts(2e-3 * factor, 3e-4 * factor, 5e-4 * factor, 1e-9 * factor, spread=spread)


def peers(*reports: WorkerCosts | None) -> PeerCosts:
    """Workers `w0`, `w1` and so on that have reported these; None: nothing yet."""
    made = PeerCosts(PRIOR)
    for index in range(len(reports)):
        made.add(f"w{index}", KIND)
    for _ in range(3):
        for index, report in enumerate(reports):
            if report is not None:
                made.report(f"w{index}", report, has_stepped=True)
    return made


def test_those_that_differ_by_less_than_is_known_of_them_are_alike() -> None:
    alike = peers(costs(0.95), costs(1.0), costs(1.05))
    assert len({alike.costs_of(f"w{index}") for index in range(3)}) == 1


def test_those_that_differ_by_more_keep_their_own() -> None:
    different = peers(costs(1.0), costs(1.0), costs(2.0), costs(0.5, spread=0.01))
    assert different.costs_of("w0").prefill_token_s == costs(1.0).prefill_token_s
    assert different.costs_of("w2").prefill_token_s == costs(2.0).prefill_token_s
    assert different.costs_of("w3").prefill_token_s == costs(0.5).prefill_token_s


def test_who_has_measured_nothing_costs_what_its_peers_do() -> None:
    assert peers(None).costs_of("w0") == PRIOR
    assert peers(costs(0.3), None).costs_of("w1").prefill_token_s == costs(0.3).prefill_token_s


def test_workers_of_another_kind_are_no_peers() -> None:
    made = peers(costs(0.3))
    made.add("gpu", (Role.MIXED, 512, "cuda"))
    assert made.costs_of("gpu") == PRIOR


def trained(factor: float) -> CostFit:
    """The fit of a worker that has seen steps of all kinds, each within 5 % of its costs."""
    fit, noise, real = CostFit(PRIOR), random.Random(7), costs(factor)
    for _ in range(500):
        num_tokens, num_decodes = noise.choice([0, 64, 256]), noise.randint(1, 16)
        num_pairs = 300.0 * num_tokens
        seconds = real.decode_step_s(num_decodes) + num_tokens * real.prefill_token_s + num_pairs * real.pair_s
        fit.step(StepShape(num_tokens, num_decodes, num_pairs), seconds * (1 + noise.uniform(-0.05, 0.05)))
        fit.costs()
    return fit


@pytest.mark.parametrize("is_used", [False, True])
def test_unused_costs_fade_towards_the_peers(is_used: bool) -> None:
    """A worker that looked slow once is not asked again, and so measures nothing; two minutes later it is like others.
    One that goes on computing slowly stays slow."""
    directory, fits = cluster(3), [trained(factor) for factor in (1.0, 1.0, 3.0)]
    slow = costs(3.0)
    for heartbeat in range(240):
        for index, fit in enumerate(fits):
            fit.fade()
            if is_used or index < 2:
                factor = 3.0 if index == 2 else 1.0
                fit.step(StepShape(0, 8, 0.0), costs(factor).decode_step_s(8))
            directory.fleet.measured(f"w{index}", 1, fit.costs(), 1000, 1000, num_steps=fit.num_steps)
        if heartbeat == 1:
            assert directory.fleet["w2"].costs.prefill_token_s == pytest.approx(slow.prefill_token_s, rel=0.3)
    known = directory.fleet["w2"].costs
    if is_used:
        assert known.decode_step_s(8) == pytest.approx(slow.decode_step_s(8), rel=0.1)
    else:
        assert known == directory.fleet["w0"].costs


def test_a_worker_that_left_is_forgotten() -> None:
    made = peers(costs(), costs(0.2), costs(0.2))
    made.remove("w1")
    made.remove("w1")
    made.remove("w2")
    for _ in range(3):
        made.report("w0", costs(), has_stepped=True)
    made.add("w3", KIND)
    assert made.costs_of("w3").prefill_token_s == costs().prefill_token_s


# In the directory


def served(directory: Directory, number: int, session: str, blocks: tuple[BlockHash, ...] = ()) -> str:
    """Place a request, let it end before the next one comes, and return its worker."""
    hashes = blocks or tuple(f"{session} {index}".encode() for index in range(20))
    admission, _ = directory.admit(AdmitRequest(f"r{number}", 0, hashes, len(hashes) * 16 + 5, session), 0.0)
    directory.first_token(f"r{number}", 0, 0.1)
    directory.blocks_changed(admission.prefill, 1, hashes, ())
    directory.end_request(f"r{number}", 0.0)
    return admission.prefill


def cluster(num_workers: int) -> Directory:
    directory = Directory(CostModel(block_size=16), segment_budget_bytes=1 << 20)
    for index in range(num_workers):
        directory.register(f"w{index}", Role.MIXED, 1, 1000, ())
    return directory


@pytest.mark.parametrize("jitter", [0.05, 0.1])
def test_sessions_spread_over_workers_whose_fits_differ(jitter: float) -> None:
    directory, noise = cluster(8), random.Random(1)
    for index in range(8):
        directory.fleet.measured(f"w{index}", 1, costs(1 + noise.uniform(-jitter, jitter)), 1000, 1000)
    used = [served(directory, number, f"s{number}") for number in range(200)]
    assert all(10 <= used.count(f"w{index}") <= 50 for index in range(8))
    later = [served(directory, 200 + number, f"s{number}") for number in range(200)]
    assert later == used, "each goes back to its blocks"
    directory.check_integrity()


def test_a_worker_that_was_never_used_is_tried() -> None:
    """Its costs are the first guess, which is three times what the other has measured."""
    directory = cluster(2)
    directory.fleet.measured("w0", 1, costs(), 1000, 1000)
    directory.fleet.measured("w1", 1, None, 1000, 1000)
    used = [served(directory, number, f"s{number}") for number in range(40)]
    assert 10 <= used.count("w1") <= 30


def test_sessions_that_fit_into_both_pools_stay_in_both() -> None:
    """14 sessions of 20 blocks, pools of 160: one holds 8 of them. Turns after the first hit all that they sent."""
    directory = cluster(2)
    pools: dict[str, dict[BlockHash, None]] = {"w0": {}, "w1": {}}
    num_evicted = 0
    for number in range(56):
        for factor, (worker_id, pool) in zip((0.95, 1.05), pools.items(), strict=True):
            directory.fleet.measured(worker_id, 1, costs(factor), 160, 160 - len(pool))
        session = f"s{number % 14}"
        hashes = tuple(f"{session} {index}".encode() for index in range(20))
        pool = pools[served(directory, number, session, hashes)]
        pool.update(dict.fromkeys(hashes))
        gone = list(pool)[: max(0, len(pool) - 160)]
        for block_hash in gone:
            del pool[block_hash]
        evicted = [(block_hash, EvictionReason.FULL) for block_hash in gone]
        worker_id = next(name for name, blocks in pools.items() if blocks is pool)
        directory.blocks_changed(worker_id, 1, (), evicted)
        num_evicted += len(gone)
    assert num_evicted == 0 and all(len(pool) >= 120 for pool in pools.values())
