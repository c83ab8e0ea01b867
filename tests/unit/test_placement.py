"""Which workers a request is given to."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import NoWorkerError
from raydix.engine.core.hashing import preferred
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.explain import MAX_CONSIDERED, best_considered
from raydix.engine.core.manager.fleet import WorkerGroups
from raydix.engine.core.manager.placement import (
    DECODE_HORIZON,
    MAX_DELAYED,
    MAX_SPREAD,
    MIN_CONSIDERED,
    TIE,
    TIE_S,
    CostModel,
    Demand,
    Placement,
    PredictedTimes,
    SessionWorkers,
    WorkerLoad,
    WorkersAlike,
    place,
    predict,
)
from raydix.engine.core.types import AdmitRequest, CacheHints, Role

MODEL = CostModel(block_size=16, block_bytes=1_000_000, piggyback_tokens=64)
"""Importing a block takes a millisecond."""


def worker(
    worker_id: str,
    role: Role = Role.MIXED,
    *,
    rate: float = 1000.0,
    queued: int = 0,
    requests: int = 0,
    local: int = 0,
    free: int | None = None,
    waiting: int = 0,
    empty: int | None = None,
    spread: float = 0.01,
) -> WorkersAlike:
    """One that computes `rate` tokens a second, steps and imports costing nothing beyond tokens and bytes."""
    costs = WorkerCosts(0.0, 1 / rate, 1 / rate, 0.0, 0.0, 1e-9, spread=spread)
    load = WorkerLoad(role, costs, 1 << 20, queued / rate, requests, free, waiting, empty)
    return WorkersAlike([worker_id], load, local)


def choose(
    candidates: list[WorkersAlike],
    num_tokens: int = 1000,
    reachable: int = 0,
    session: str = "s",
    pending_s: float = 0.0,
    return_rate: float = 0.0,
) -> Placement:
    return place(Demand(num_tokens, reachable, pending_s, session, return_rate), candidates, MODEL)


def test_nobody_there() -> None:
    with pytest.raises(NoWorkerError):
        choose([])


def test_the_shortest_queue_wins() -> None:
    workers = [worker("busy", queued=500), worker("idle"), worker("busier", queued=900)]
    assert choose(workers).prefill == "idle"


def test_the_cache_wins_over_a_short_queue_by_what_it_saves() -> None:
    workers = [worker("cached", queued=300, local=50), worker("idle")]
    assert choose(workers).prefill == "cached"
    workers = [worker("cached", queued=900, local=50), worker("idle")]
    assert choose(workers).prefill == "idle"


def test_a_fast_worker_wins_over_a_slow_one() -> None:
    assert choose([worker("slow", rate=100.0), worker("fast", rate=5000.0, queued=2000)]).prefill == "fast"


def test_a_common_first_block_does_not_gather_everybody_on_one_worker() -> None:
    """All requests share the system prompt that one worker holds; each placed request queues its tokens."""
    queued = dict.fromkeys("abcd", 0)
    chosen = dict.fromkeys("abcd", 0)
    for index in range(40):
        workers = [worker(w, queued=queued[w], local=2 if w == "a" else 0) for w in queued]
        placement = choose(workers, num_tokens=500, reachable=2, session=f"s{index}")
        queued[placement.prefill] += 500
        chosen[placement.prefill] += 1
    assert max(chosen.values()) <= 11 and min(chosen.values()) >= 9


@pytest.mark.parametrize(("rate", "num_imported"), [(1000.0, 20), (100_000.0, 0)])
def test_blocks_are_imported_only_where_computing_them_takes_longer(rate: float, num_imported: int) -> None:
    chosen = choose([worker("w", rate=rate)], reachable=20).chosen
    assert chosen.num_imported_blocks == num_imported
    recomputed = 1000 - num_imported * 16
    assert chosen.ttft_s == pytest.approx(recomputed / rate + num_imported * 0.001)


def test_what_is_local_is_not_imported() -> None:
    assert choose([worker("w", local=15)], reachable=20).chosen.num_imported_blocks == 5
    assert choose([worker("w", local=20)], reachable=20).chosen.num_imported_blocks == 0


def test_who_imports_what_is_being_computed_waits_for_it() -> None:
    """The worker that computes it has the same wait as its own queue, and nothing to import."""
    workers = [worker("producer", queued=800), worker("other")]
    placement = choose(workers, reachable=50, pending_s=0.8)
    assert placement.prefill == "producer" or placement.chosen.wait_s == 0.8
    assert {p.wait_s for p in placement.considered} == {0.8}
    assert choose([worker("other")], reachable=50, pending_s=0.8).chosen.num_imported_blocks == 50


def test_what_a_worker_computes_for_others_before_costs_only_its_queue() -> None:
    """Importing takes longer than computing."""
    model = replace(MODEL, block_bytes=1_000_000_000)
    producer = worker("producer", queued=800, waiting=1)._replace(num_promised_blocks=50)
    placement = place(Demand(1000, 50, 0.8, "s"), [producer, worker("other", queued=500)], model)
    chosen = placement.chosen
    assert (placement.prefill, chosen.num_local_blocks, chosen.num_imported_blocks) == ("producer", 0, 50)
    assert (chosen.wait_s, chosen.import_s) == (0.8, 0.0) and chosen.compute_s == pytest.approx(0.2)


@given(
    num_new=st.integers(1, 5000),
    local=st.integers(0, 20),
    more=st.integers(0, 20),
    queued=st.integers(0, 5000),
    rate=st.floats(1.0, 1e6),
)
def test_predictions_are_never_worse_than_computing_everything(
    num_new: int, local: int, more: int, queued: int, rate: float
) -> None:
    num_tokens = (local + more) * 16 + num_new
    candidate = worker("w", rate=rate, queued=queued, local=local)
    prediction = predict(candidate, Demand(num_tokens, local + more), MODEL)
    assert 0 < prediction.ttft_s <= (queued + num_tokens) / rate * (1 + 1e-9)
    assert prediction.num_imported_blocks in (0, more)


def test_even_a_fully_cached_prompt_computes_a_token() -> None:
    assert choose([worker("w", local=10)], num_tokens=160, reachable=10).chosen.ttft_s == pytest.approx(0.001)


# Prefill and decode apart


def test_a_long_prompt_is_split() -> None:
    workers = [worker("p", Role.PREFILL), worker("d1", Role.DECODE, requests=3), worker("d2", Role.DECODE)]
    placement = choose(workers)
    assert (placement.prefill, placement.decode) == ("p", "d2")


def test_a_short_suffix_is_computed_by_the_decode_worker_that_has_the_rest() -> None:
    workers = [worker("p", Role.PREFILL), worker("d1", Role.DECODE), worker("d2", Role.DECODE, local=60, requests=5)]
    placement = choose(workers, num_tokens=60 * 16 + 64, reachable=60)
    assert (placement.prefill, placement.decode) == ("d2", "d2")
    placement = choose(workers, num_tokens=60 * 16 + 65, reachable=60)
    assert placement.prefill == "p", "longer than what may be piggybacked"


def test_a_decode_worker_prefills_when_there_is_nobody_else() -> None:
    placement = choose([worker("d1", Role.DECODE, queued=100), worker("d2", Role.DECODE)])
    assert (placement.prefill, placement.decode) == ("d2", "d2")


def test_a_prefill_worker_decodes_when_there_is_nobody_else() -> None:
    placement = choose([worker("p1", Role.PREFILL, queued=100), worker("p2", Role.PREFILL)])
    assert (placement.prefill, placement.decode) == ("p2", "p2")


def test_a_mixed_worker_keeps_what_it_prefills() -> None:
    placement = choose([worker("m", local=30), worker("d", Role.DECODE), worker("p", Role.PREFILL)], reachable=30)
    assert (placement.prefill, placement.decode) == ("m", "m")


def test_a_decode_worker_without_room_is_avoided() -> None:
    full = worker("full", Role.DECODE, free=3)
    assert choose([worker("p", Role.PREFILL), full, worker("busy", Role.DECODE, requests=0, free=500)]).decode == "busy"


def test_a_hot_session_does_not_pin_an_overloaded_worker() -> None:
    """All of a session's blocks are on one worker, whose queue grows with each of its requests."""
    names = ["a", "b", "c"]
    queued = dict.fromkeys(names, 0)
    for _ in range(30):
        workers = [worker(w, queued=queued[w], local=40 if w == "a" else 0) for w in names]
        placement = choose(workers, num_tokens=1000, reachable=40, session="hot")
        queued[placement.prefill] += round(placement.chosen.compute_s * 1000)
    assert max(queued.values()) < 1.5 * min(queued.values())


# Sessions


def test_ties_go_to_the_worker_that_the_session_prefers() -> None:
    names = ["a", "b", "c", "d"]
    for session in map(str, range(30)):
        expected = preferred(session, names)
        for workers in (names, names[::-1]):
            assert choose([worker(name) for name in workers], session=session).prefill == expected


@given(sessions=st.sets(st.text(max_size=8), min_size=1, max_size=30), lost=st.sampled_from("abcde"))
def test_losing_a_worker_moves_its_sessions_only(sessions: set[str], lost: str) -> None:
    for session in sessions:
        before = preferred(session, "abcde")
        after = preferred(session, [name for name in "abcde" if name != lost])
        assert after != lost and (after == before or before == lost)


def test_sessions_are_spread_evenly() -> None:
    first = [preferred(f"session-{index}", "abcd") for index in range(2000)]
    assert all(400 < first.count(name) < 600 for name in "abcd")


def test_the_session_decides_where_costs_differ_by_less_than_is_known_of_them() -> None:
    rates = {f"w{index}": 1000 * (0.9 + 0.2 * index / 7) for index in range(8)}
    for spread, least, most in ((0.1, 8, 8), (0.001, 1, 1)):
        workers = [worker(name, rate=rate, spread=spread) for name, rate in rates.items()]
        used = {choose(workers, session=f"s{index}").prefill for index in range(100)}
        assert least <= len(used) <= most


def test_what_differs_between_workers_of_equal_costs_is_known() -> None:
    """Their real costs are the same, however badly they are known: hits and queues decide."""
    for better, worse in (
        (worker("warm", local=28, spread=0.3), worker("cold", spread=0.3)),
        (worker("idle", spread=0.3), worker("busy", queued=100, spread=0.3)),
    ):
        used = {choose([better, worse], session=str(index)).prefill for index in range(50)}
        assert used == set(better.worker_ids)
    decoders = [worker("free", Role.DECODE, spread=0.3), worker("busy", Role.DECODE, requests=1, spread=0.3)]
    workers = [worker("p", Role.PREFILL), *decoders]
    assert {choose(workers, session=str(index)).decode for index in range(50)} == {"free"}


def test_what_is_known_for_sure_is_not_left_to_the_session() -> None:
    """A fit that knows nothing still knows a long queue from none."""
    workers = [worker("idle", spread=9.0), worker("busy", queued=3000, spread=9.0)]
    assert {choose(workers, session=str(index)).prefill for index in range(20)} == {"idle"}


# What a placement costs others


def test_hits_count_more_where_others_wait() -> None:
    """The cold worker answers this request sooner; those behind it would wait for all that the warm one has."""
    for waiting, expected in ((0, "cold"), (3, "warm")):
        workers = [worker("warm", queued=900, local=40, waiting=waiting), worker("cold", queued=200, waiting=waiting)]
        assert choose(workers).prefill == expected


def test_a_long_queue_delays_only_so_many() -> None:
    few, many = (choose([worker("w", queued=100, waiting=count)]).chosen for count in (MAX_DELAYED, 100))
    assert few.others_s == many.others_s == pytest.approx(MAX_DELAYED * 1.0)


def test_of_workers_alike_the_one_with_fewer_decodes_prefills() -> None:
    workers = [worker("busy", requests=5), worker("idle", requests=1)]
    assert {choose(workers, session=str(index)).prefill for index in range(20)} == {"idle"}


# Room


def test_an_empty_pool_is_filled_before_useful_blocks_are_evicted() -> None:
    workers = [worker("full", empty=0), worker("empty", empty=64)]
    assert {choose(workers, session=str(index), return_rate=0.5).prefill for index in range(20)} == {"empty"}
    used = {choose(workers, session=str(index), return_rate=0.0).prefill for index in range(20)}
    assert used == {"full", "empty"}, "nobody wants again what is evicted here"


def test_only_what_does_not_fit_is_evicted() -> None:
    for empty, num_evicted in ((0, 63), (60, 3), (63, 0), (None, 0)):
        chosen = choose([worker("w", empty=empty)], return_rate=0.5).chosen
        assert chosen.room_s == pytest.approx(num_evicted * 16 / 1000 * 0.5)
    assert choose([worker("w", empty=0, local=60)], return_rate=0.5).chosen.room_s == pytest.approx(3 * 16 / 1000 * 0.5)


def test_a_decode_worker_with_empty_blocks_is_preferred() -> None:
    decoders = [worker("full", Role.DECODE, empty=0), worker("empty", Role.DECODE, empty=64)]
    workers = [worker("p", Role.PREFILL), *decoders]
    assert {choose(workers, session=str(index), return_rate=0.5).decode for index in range(20)} == {"empty"}


# Many workers


COSTS = [
    WorkerCosts(),
    WorkerCosts(1e-3, 2e-4, 1e-4, 1e-9, 5e-3, 2e-9, spread=0.0),
    WorkerCosts(prefill_token_s=1.01e-3, spread=1.5),
]

LOADS = st.builds(
    WorkerLoad,
    role=st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED]),
    costs=st.sampled_from(COSTS),
    token_budget=st.sampled_from([64, 512]),
    queued_s=st.sampled_from([0.0, 0.0, 4e-4, 0.01, 0.1, 0.5, 2.0]),
    num_decoding=st.integers(0, 3),
    num_free_blocks=st.sampled_from([None, 10, 1000]),
    num_queued=st.sampled_from([0, 1, 20]),
    num_empty_blocks=st.sampled_from([None, 0, 64]),
    node=st.sampled_from("ab"),
    behind_s=st.sampled_from([0.0, 0.0, 0.01]),
).filter(lambda load: load.behind_s <= load.queued_s)
"""Few different ones, so that some are equal."""

LINKED = CostModel(block_size=16, block_bytes=1_000_000, piggyback_tokens=64)
"""With a slow link from `a` to `b`, and a very slow one from `b` to `a`."""
for _ in range(30):
    LINKED.links.imported("a", "b", 1_000_000, 0.01, LINKED.prior)
    LINKED.links.imported("b", "a", 1_000_000, 0.2, LINKED.prior)

LAST_WORKERS = st.sampled_from(["", "w0", "w1", "w2", "w7", "gone"])


def cheapest(sums: dict[str, tuple[WorkerCosts, float]], session: str, last_worker: str) -> str:
    """The session's last worker if tied, or else the preferred one of the tied. Tied: close to the best sum of equal
    costs, if the range of that sum reaches below the upper end of every worker's range."""
    tied = []
    for worker_id, (costs, cost_s) in sums.items():
        best_s = min(other_s for other, other_s in sums.values() if other == costs)
        lowest_s = best_s * (1 - min(costs.spread, MAX_SPREAD))
        is_in_reach = all(lowest_s <= s * (1 + min(other.spread, MAX_SPREAD)) for other, s in sums.values())
        if is_in_reach and cost_s <= best_s * (1 + TIE) + TIE_S:
            tied.append(worker_id)
    return last_worker if last_worker in tied else preferred(session, tied)


def fetch_s(load: WorkerLoad, start: int, demand: Demand, node: str) -> float:
    """Import of a prompt's blocks from `start` on, computed on `node` as far as they are nowhere."""
    end = demand.num_tokens // LINKED.block_size + 1
    if demand.sources is None:
        return load.costs.import_all_s(max(0, end - start) * LINKED.block_bytes)
    nodes = [source for source, count in demand.sources for _ in range(count)]
    counts = Counter(nodes[start:])
    counts[node] += end - max(start, len(nodes))
    sizes = {source: count * LINKED.block_bytes for source, count in counts.items()}
    return sum(LINKED.links.import_s(source, load.node, size, load.costs) for source, size in sizes.items())


def decode_cost_s(load: WorkerLoad, num_local: int, demand: Demand, node: str) -> float:
    lacking = max(0, demand.num_tokens // LINKED.block_size + 1 - num_local)
    cost_s = DECODE_HORIZON * load.costs.decode_step_s(load.num_decoding + 1)
    if load.num_free_blocks is not None and load.num_free_blocks < lacking:
        cost_s *= 2
    if load.num_empty_blocks is not None:
        evicted = max(0, lacking - load.num_empty_blocks)
        cost_s += evicted * LINKED.block_size * load.costs.prefill_token_s * demand.return_rate
    return cost_s + fetch_s(load, num_local, demand, node)


def handed_over(
    prediction: PredictedTimes, load: WorkerLoad, decoders: list[tuple[WorkerLoad, int]], demand: Demand
) -> tuple[PredictedTimes, bool]:
    """The prediction with the hand-over to the best decoder, and whether each best one would compute it sooner."""
    costs_s = [decode_cost_s(*decoder, demand, load.node) for decoder in decoders]
    best = [decoder for decoder, cost_s in zip(decoders, costs_s, strict=True) if cost_s == min(costs_s)]
    transfers_s: list[float] = []
    is_dear = True
    for decoder, num_local in best:
        computed = max(num_local, prediction.num_local_blocks + prediction.num_imported_blocks)
        chunk = -(-load.token_budget // LINKED.block_size)
        last = max(computed, demand.num_tokens // LINKED.block_size + 1 - chunk)
        all_s, computed_s, last_s = (
            fetch_s(decoder, start, demand, load.node) for start in (num_local, computed, last)
        )
        transfers_s.append(max(last_s, computed_s - prediction.compute_s, all_s - prediction.ttft_s))
        alone = predict(WorkersAlike(["d"], decoder, num_local), demand, LINKED)
        is_dear &= all_s > alone.import_s + alone.compute_s
    return prediction._replace(transfer_s=min(transfers_s)), is_dear


def full_scan(demand: Demand, workers: dict[str, tuple[WorkerLoad, int]]) -> tuple[str, str]:
    """The rule without any short cut: every worker's prediction, then every decoder's cost."""
    by_role = {role: [w for w, (load, _) in workers.items() if load.role is role] for role in Role}
    decoders = by_role[Role.DECODE] + by_role[Role.MIXED]
    sums: dict[str, tuple[WorkerCosts, float]] = {}
    spared: dict[str, tuple[WorkerCosts, float]] = {}
    dear: dict[str, bool] = {}
    for worker_id, (load, num_local) in workers.items():
        prediction = predict(WorkersAlike([worker_id], load, num_local), demand, LINKED)
        uncached = demand.num_tokens - (num_local + prediction.num_imported_blocks) * LINKED.block_size
        only_decodes = load.role is Role.DECODE and len(by_role[Role.DECODE]) < len(workers)
        if load.role is Role.PREFILL and decoders and demand.sources is not None:
            others = [workers[decoder] for decoder in decoders]
            prediction, dear[worker_id] = handed_over(prediction, load, others, demand)
        if only_decodes and uncached > LINKED.piggyback_tokens:
            spared[worker_id] = load.costs, prediction.cost_s
        else:
            sums[worker_id] = load.costs, prediction.cost_s
    lowest_s = min(cost_s for _, cost_s in sums.values())
    if all(dear.get(worker_id, False) for worker_id, (_, cost_s) in sums.items() if cost_s == lowest_s):
        sums |= spared
    prefill = cheapest(sums, demand.session, demand.last_workers.prefill)
    if prefill in decoders or not decoders:
        return prefill, prefill
    node = workers[prefill][0].node
    sums = {each: (workers[each][0].costs, decode_cost_s(*workers[each], demand, node)) for each in decoders}
    return prefill, cheapest(sums, demand.session, demand.last_workers.decode)


@given(
    loads=st.lists(st.tuples(LOADS, st.sampled_from([0, 0, 3, 20])), min_size=1, max_size=60),
    num_tokens=st.integers(321, 5000),
    pending_s=st.sampled_from([0.0, 0.3]),
    session=st.text(max_size=3),
    return_rate=st.sampled_from([0.0, 0.5]),
    last_workers=st.builds(SessionWorkers, prefill=LAST_WORKERS, decode=LAST_WORKERS),
    sources=st.sampled_from([None, [("a", 20)], [("b", 5), ("a", 15)], [("c", 20)]]),
    is_behind=st.booleans(),
)
def test_grouping_and_pruning_change_no_choice(
    loads: list[tuple[WorkerLoad, int]],
    num_tokens: int,
    pending_s: float,
    session: str,
    return_rate: float,
    last_workers: SessionWorkers,
    sources: list[tuple[str, int]] | None,
    is_behind: bool,
) -> None:
    workers = {f"w{index}": load for index, load in enumerate(loads)}
    groups = WorkerGroups()
    holders: dict[int, set[str]] = {}
    for worker_id, (load, num_local) in workers.items():
        groups.put(worker_id, load)
        holders.setdefault(num_local, set()).add(worker_id)
    demand = Demand(num_tokens, 20, pending_s, session, return_rate, last_workers, sources=sources, is_behind=is_behind)
    placement = place(demand, groups.candidates(holders), LINKED)
    assert (placement.prefill, placement.decode) == full_scan(demand, workers)


def test_who_queues_longer_than_the_best_takes_is_not_predicted() -> None:
    busy = [worker(f"busy {index}", queued=2000 + index) for index in range(100)]
    assert len(choose([*busy, worker("idle")]).considered) == MIN_CONSIDERED


def test_those_alike_are_predicted_once() -> None:
    groups = WorkerGroups()
    load = worker("any").load
    for index in range(1000):
        groups.put(f"w{index}", load)
    groups.put("w7", load._replace(num_decoding=1))
    groups.remove("w8")
    first = {"w7", "w9"}
    candidates = groups.candidates({0: {f"w{index}" for index in range(1000)} - first, 5: first})
    assert [(len(c.worker_ids), c.num_local_blocks, c.load.num_decoding) for c in candidates] == [
        (997, 0, 0),
        (1, 5, 0),
        (1, 5, 1),
    ]
    assert len(choose(candidates).considered) == 3


def test_only_the_best_are_remembered() -> None:
    many = worker("any")._replace(worker_ids={f"w{index}" for index in range(1000)})
    best = best_considered(choose([worker("busy", queued=10), many, worker("first", local=3)]))
    assert [prediction.num_local_blocks for prediction in best] == [3, 0]
    assert sum(len(prediction.worker_ids) for prediction in best) == MAX_CONSIDERED


def test_the_chosen_one_is_remembered_among_many_alike() -> None:
    many = worker("any")._replace(worker_ids={f"w{index}" for index in range(1000)})
    chosen = {choose([many], session=session).prefill: session for session in map(str, range(20))}
    assert len(chosen) > 1
    for name, session in chosen.items():
        [best] = best_considered(choose([many], session=session))
        assert name in best.worker_ids and len(best.worker_ids) == MAX_CONSIDERED


def test_a_session_stays_while_nothing_speaks_for_another_worker() -> None:
    last_workers = SessionWorkers("a", "a")
    session = next(str(number) for number in range(100) if preferred(str(number), "ab") == "b")
    for queued, expected in ((0, "a"), (5000, "b")):
        workers = [worker("a", queued=queued), worker("b")]
        assert place(Demand(1000, session=session, last_workers=last_workers), workers, MODEL).prefill == expected


def test_a_session_that_had_to_move_does_not_move_back() -> None:
    """The worker that its name hashes to is busy at first; then the blocks are on the other one."""
    directory = Directory(CostModel(block_size=16), segment_budget_bytes=1 << 20)
    for name in ("a", "b"):
        directory.register(name, Role.MIXED, 1, 1, ())
    session = next(str(number) for number in range(100) if preferred(str(number), "ab") == "a")
    directory.admit(AdmitRequest("busy", 0, (), 5000, session), 0.0)
    assert directory.fleet["a"].num_queued == 1
    used = []
    for number in range(3):
        request = AdmitRequest(f"r{number}", 0, (), 100, session, cache=CacheHints("" if number else "other tenant"))
        used.append(directory.admit(request, 0.0)[0].prefill)
        directory.end_request(f"r{number}", 0.0)
        if number == 1:
            directory.end_request("busy", 0.0)
    assert used == ["b", "b", "b"]
    directory.check_integrity()
