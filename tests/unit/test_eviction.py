"""Eviction: what must hold whatever happens (a state machine), and what each rule means by example."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raydix.engine.core.eviction.duel import Duel, Ghost, once_first, recency
from raydix.engine.core.eviction.queue import EvictionQueue, Quota
from raydix.engine.core.eviction.ranking import LeastRecent, Ranking, Visit
from raydix.engine.core.eviction.survival import EDGES, NUM_BINS, NUM_KINDS, LifeTable, Survival, best_rates
from raydix.engine.core.types import EvictionReason, FinishReason, Retention

QUOTAS = {"a": Quota(floor=2), "b": Quota(floor=1, ceiling=3)}
Path = tuple[str, ...]


def path_of(name: str) -> Path:
    """Blocks of a sequence, each named by everything up to it, as hashes are."""
    return tuple(name[: end + 1] for end in range(len(name)))


def use(
    queue: EvictionQueue[str],
    name: str,
    now: float = 0.0,
    retention: Retention | None = None,
    stop: FinishReason | None = None,
) -> None:
    """One request from beginning to end."""
    path = path_of(name)
    for key in path:
        if key in queue:
            queue.acquire(key)
    queue.visit(path, now, retention or Retention(), stop=stop)
    queue.release(path, now)


def digest_of(key: str) -> int:
    return crc32(key.encode())


def evict_all(queue: EvictionQueue[str], now: float = 0.0) -> list[str]:
    return [queue.evict(now) for _ in range(len(queue))]


class EvictionMachine(RuleBasedStateMachine):
    """A queue under requests of three tenants that share prefixes, their own and public ones, wait, run at the same
    time, end or pause, and let time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.running: list[tuple[Path, Retention]] = []
        self.deadlines: dict[str, float] = {}
        self.owners: dict[str, str] = {}
        self.priorities: dict[str, int] = {}
        self.waiting: list[Path] = []
        self.survival: Survival[str] = Survival(max_visits=5)
        self.duel = Duel(self.survival)
        self.quotas = QUOTAS
        self.queue: EvictionQueue[str] = EvictionQueue(self.survival, QUOTAS)

    @initialize(policy=st.sampled_from([Duel, Survival, LeastRecent]), one_in=st.integers(1, 3))
    def build(self, policy: type[Ranking[str]], one_in: int) -> None:
        self.duel = Duel(self.survival, one_in, digest_of)
        rankings: dict[type[Ranking[str]], Ranking[str]] = {Duel: self.duel, Survival: self.survival}
        self.queue = EvictionQueue(rankings.get(policy, LeastRecent()), QUOTAS)

    @rule(order=st.integers(0, 2))
    def favour(self, order: int) -> None:
        """Whatever the ghosts saw: one order has won."""
        for index, ghost in enumerate(self.duel.ghosts):
            for score in ghost.scores:
                score.lead, score.spread = float(index == order), 0.0

    @rule(is_limited=st.booleans())
    def limit(self, is_limited: bool) -> None:
        self.quotas = QUOTAS if is_limited else {}
        self.queue.limit(self.quotas)

    @rule(
        tenant=st.sampled_from("abc"),
        is_public=st.booleans(),
        name=st.text("xyz", min_size=1, max_size=6),
        priority=st.integers(0, 2),
        ttl_s=st.just(float("inf")) | st.floats(0, 100),
    )
    def start(self, tenant: str, is_public: bool, name: str, priority: int, ttl_s: float) -> None:
        path = path_of(("p" if is_public else tenant) + name)
        for key in path:
            if key in self.queue:
                self.queue.acquire(key)
        expires_at = None if ttl_s == float("inf") else self.now + ttl_s
        self.running.append((path, Retention(tenant, priority, expires_at)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_ended=st.booleans())
    def leave(self, data: st.DataObject, has_ended: bool) -> None:
        path, retention = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        expires_at = float("inf") if retention.expires_at is None else retention.expires_at
        for key in path:
            self.deadlines[key] = max(self.deadlines.get(key, 0.0), expires_at)
            if self.owners.setdefault(key, retention.tenant) == retention.tenant:
                self.priorities[key] = max(self.priorities.get(key, 0), retention.priority)
        (self.queue.visit if has_ended else self.queue.pause)(path, self.now, retention)
        held = {key for other, _ in self.running for key in other}
        self.queue.release([key for key in path if key not in held], self.now)

    @rule(name=st.text("xyz", min_size=1, max_size=6), first=st.sampled_from("abcp"))
    def queue_up(self, name: str, first: str) -> None:
        self.waiting.append(path_of(first + name))
        self.queue.protect(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        self.queue.unprotect(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @rule(passed_s=st.floats(0.1, 5000))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s

    @precondition(lambda self: len(self.queue) > 0)
    @rule(count=st.integers(1, 5), at_once=st.booleans())
    def evict(self, count: int, at_once: bool) -> None:
        here, count = set(self.queue), min(count, len(self.queue))
        if at_once:
            victims = [key for key, _ in self.queue.evict_many(count, self.now)]
        else:
            victims = [self.queue.evict(self.now) for _ in range(count)]
        assert len(victims) == count and here - set(self.queue) == set(victims)
        for victim in victims:
            before, here = here, here - {victim}
            leaves = {key for key in before if not any(other != key and other.startswith(key) for other in before)}
            assert victim in leaves
            expired = {key for key in leaves if self.deadlines[key] <= self.now}
            if expired:
                assert victim in expired
            else:
                owner = self.owners[victim]
                assert self.respects_quotas(owner, before, leaves)
                assert self.place(victim) == min(self.place(leaf) for leaf in leaves if self.is_of(owner, leaf))
            del self.deadlines[victim], self.owners[victim], self.priorities[victim]

    def place(self, key: str) -> tuple[bool, int]:
        return any(key in path for path in self.waiting), self.priorities[key]

    def is_of(self, tenant: str, key: str) -> bool:
        return self.owners[key] == tenant

    def respects_quotas(self, payer: str, before: set[str], leaves: set[str]) -> bool:
        counts = {tenant: sum(self.is_of(tenant, key) for key in before) for tenant in "abc"}
        able = {self.owners[leaf] for leaf in leaves}
        if counts["b"] > 3 and "b" in able and self.quotas:
            return payer == "b"
        above = {tenant for tenant in able if counts[tenant] > self.quotas.get(tenant, Quota()).floor}
        return payer in above or not above

    @invariant()
    def is_whole(self) -> None:
        self.queue.check_integrity()
        self.duel.check_integrity()


TestEvictionMachine = pytest.mark.no_cover(EvictionMachine.TestCase)
TestEvictionMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture(params=[LeastRecent, Survival, Duel])
def queue(request: pytest.FixtureRequest) -> EvictionQueue[str]:
    return EvictionQueue(request.param(), QUOTAS)


def test_a_chain_goes_from_its_end(queue: EvictionQueue[str]) -> None:
    use(queue, "cxyz")
    assert evict_all(queue) == ["cxyz", "cxy", "cx", "c"]


def test_what_others_reached_it_by_stays_until_they_are_gone(queue: EvictionQueue[str]) -> None:
    use(queue, "cx")
    use(queue, "cxy", now=1)
    use(queue, "cxz", now=2)
    victims = evict_all(queue, now=3)
    assert sorted(victims[:2]) == ["cxy", "cxz"] and victims[2:] == ["cx", "c"]


def test_expired_blocks_go_first(queue: EvictionQueue[str]) -> None:
    use(queue, "cx", retention=Retention(priority=5, expires_at=10))
    use(queue, "dx")
    assert queue.evict(9) == "dx"
    assert queue.evict_many(1, 10) == [("cx", EvictionReason.EXPIRED)]


def test_the_most_generous_wish_counts(queue: EvictionQueue[str]) -> None:
    use(queue, "cx", retention=Retention(priority=1, expires_at=None))
    use(queue, "cx", retention=Retention(priority=0, expires_at=1))
    use(queue, "dx", now=2)
    assert evict_all(queue, now=3)[:2] == ["dx", "d"]


def test_the_first_request_s_wishes_count_for_an_imported_block(queue: EvictionQueue[str]) -> None:
    """It came before any request used it."""
    queue.release(path_of("ax"), 0)
    use(queue, "ax", retention=Retention(tenant="a", priority=-1, expires_at=10))
    use(queue, "c" + "x" * 20, now=1)
    assert "a" in evict_all(queue, now=2)[-2:], "the floor of its tenant keeps it"


def test_lower_priorities_go_first(queue: EvictionQueue[str]) -> None:
    use(queue, "cx", retention=Retention(priority=1))
    use(queue, "dx", now=1)
    assert evict_all(queue, now=2) == ["dx", "d", "cx", "c"]


def test_a_priority_counts_within_its_tenant_only(queue: EvictionQueue[str]) -> None:
    use(queue, "dx", retention=Retention("d", priority=10))
    use(queue, "cx", now=1, retention=Retention("c"))
    use(queue, "ex", now=2, retention=Retention("d"))
    assert evict_all(queue, now=3) == ["ex", "e", "dx", "d", "cx", "c"], "d's oldest came before c's"


def test_what_waiting_requests_will_use_goes_last(queue: EvictionQueue[str]) -> None:
    use(queue, "cx")
    queue.protect(path_of("cx"))
    queue.protect(path_of("cxy"))
    use(queue, "dx", now=1, retention=Retention(priority=9))
    queue.unprotect(path_of("cx"))
    queue.check_integrity()
    assert evict_all(queue, now=2) == ["dx", "d", "cx", "c"]
    use(queue, "cx", now=3)
    use(queue, "dx", now=4, retention=Retention(priority=9))
    queue.unprotect(path_of("cxy"))
    assert evict_all(queue, now=5) == ["cx", "c", "dx", "d"]


def test_waiting_requests_of_a_tenant_cost_others_nothing() -> None:
    queue: EvictionQueue[str] = EvictionQueue(LeastRecent())
    use(queue, "dx", retention=Retention("d"))
    use(queue, "cx", now=1, retention=Retention("c"))
    use(queue, "ex", now=2, retention=Retention("d"))
    queue.protect(path_of("dx"))
    assert evict_all(queue, now=3) == ["ex", "e", "dx", "d", "cx", "c"], "d's oldest came before c's"


def test_another_tenant_cannot_raise_a_priority(queue: EvictionQueue[str]) -> None:
    use(queue, "px", retention=Retention("c"))
    use(queue, "px", retention=Retention("d", priority=10))
    use(queue, "cx", now=1, retention=Retention("c", priority=1))
    assert evict_all(queue, now=2)[:2] == ["px", "p"]


def test_a_tenant_whose_blocks_are_all_parents_of_others_is_passed_over(queue: EvictionQueue[str]) -> None:
    """A public prefix that one tenant used first and another went on from."""
    use(queue, "px", retention=Retention("b"))
    use(queue, "pxyz", now=1, retention=Retention("a"))
    assert evict_all(queue, now=2) == ["pxyz", "pxy", "px", "p"]


@pytest.mark.parametrize("ranking", [LeastRecent, Survival, Duel])
def test_a_ceiling_without_a_leaf_to_pay_with_is_passed_over(ranking: type[Ranking[str]]) -> None:
    queue: EvictionQueue[str] = EvictionQueue(ranking(), {"a": Quota(floor=9), "b": Quota(ceiling=0)})
    use(queue, "p", retention=Retention("b"))
    use(queue, "px", now=1, retention=Retention("a"))
    assert evict_all(queue, now=2) == ["px", "p"]


@pytest.mark.parametrize("expires_at", [None, 1e9])
def test_what_is_queued_again_and_again_takes_no_more_room(queue: EvictionQueue[str], expires_at: float | None) -> None:
    for number in range(1000):
        use(queue, "cx", float(number), Retention(expires_at=expires_at))
    heaps = [queue._expiring, *(heap for heaps in queue._heaps.values() for heap in heaps.values())]
    assert all(len(heap) <= 2 * 2 + 65 for heap in heaps)


def test_nothing_is_learnt_from_a_pause() -> None:
    """A request that is preempted twice ranks and teaches like one that is not."""
    survivals: list[Survival[str]] = [Survival(), Survival()]
    for survival, num_pauses in zip(survivals, (0, 2), strict=True):
        queue: EvictionQueue[str] = EvictionQueue(survival)
        for _ in range(num_pauses):
            queue.pause(path_of("cxyz"), 1)
            queue.release(path_of("cxyz"), 1)
            for key in path_of("cxyz"):
                queue.acquire(key)
        queue.visit(path_of("cxyz"), 2)
        queue.check_integrity()
        survival.check_integrity()
    tables = [[survival._visit_table.chances(kind) for kind in range(NUM_KINDS)] for survival in survivals]
    assert tables[0] == tables[1]
    [plain], [resumed] = (list(survival._visits.values()) for survival in survivals)
    assert (plain.kind, plain.landmark, plain.turn) == (resumed.kind, resumed.landmark, resumed.turn)


def test_a_pause_keeps_leaves_first_and_ages(queue: EvictionQueue[str]) -> None:
    queue.pause(path_of("cxyz"), 0)
    queue.release(path_of("cxyz"), 0)
    queue.check_integrity()
    assert evict_all(queue, now=1e6) == ["cxyz", "cxy", "cx", "c"]


def test_a_scan_of_others_leaves_a_tenant_its_floor(queue: EvictionQueue[str]) -> None:
    use(queue, "axyz", retention=Retention(tenant="a"))
    use(queue, "c" + "x" * 20, now=1)
    assert "ax" in evict_all(queue, now=2)[-2:]


def test_a_tenant_above_its_ceiling_pays_itself(queue: EvictionQueue[str]) -> None:
    use(queue, "cxyz")
    use(queue, "bxyz", now=1, retention=Retention(tenant="b", priority=9))
    assert queue.evict_many(1, 2) == [("bxyz", EvictionReason.QUOTA)]
    assert queue.evict_many(1, 2) == [("cxyz", EvictionReason.FULL)]


def test_lru_is_the_order_of_use() -> None:
    queue: EvictionQueue[str] = EvictionQueue(LeastRecent())
    for now, name in enumerate(["cx", "dx", "ex", "cx"]):
        use(queue, name, now)
    assert evict_all(queue) == ["dx", "d", "ex", "e", "cx", "c"]


@pytest.mark.no_cover
def test_survival_keeps_a_loop_that_does_not_fit() -> None:
    """LRU hits nothing in a loop longer than the cache; keeping some of it whole hits those each time."""
    hits = {policy: _hits(policy(), _loop(), capacity=64) for policy in (LeastRecent, Survival, Duel)}
    assert hits[LeastRecent] == 0
    assert hits[Survival] > 0.6
    assert hits[Duel] > 0.6


def test_survival_gives_up_those_who_never_come_back() -> None:
    """Many short questions that end and few conversations that go on: recency would drop the latter."""
    queue: EvictionQueue[str] = EvictionQueue(Survival())
    now = 0.0
    for turn in range(1, 60):
        use(queue, "talk" + "t" * turn, now)
        for number in range(10):
            now += 3
            use(queue, f"{chr(1000 + turn * 10 + number)}1234567", now)
        while len(queue) > 100:
            queue.evict(now)
    assert "talk" + "t" * 59 in queue


def test_memory_is_bounded() -> None:
    survival: Survival[str] = Survival(max_visits=10)
    queue: EvictionQueue[str] = EvictionQueue(survival)
    for number in range(100):
        use(queue, f"{chr(1000 + number)}x", float(number))
        while len(queue) > 20:
            queue.evict(float(number))
    survival.check_integrity()


def test_visits_that_have_ended_take_no_room_behind_one_that_has_not() -> None:
    survival: Survival[str] = Survival(max_visits=10)
    for path in map(path_of, ["stays", *["comes back"] * 500]):
        survival.branch(path[1], 0.0)
        survival.visit(path, 0, 0, 0.0)
        survival.pause(path, 0, 0.0)
        survival.check_integrity()
    for ages in (survival._visit_ages, survival._pause_ages, survival._trunk_ages):
        assert sum(map(len, ages)) == 2


def test_without_knowledge_age_lowers_the_index() -> None:
    rates = best_rates(LifeTable(1).chances(0))[1:]
    assert rates == sorted(rates, reverse=True)


def test_the_index_rises_towards_the_usual_think_time() -> None:
    table = LifeTable(1)
    usual = next(index for index in range(NUM_BINS) if EDGES[index] >= 60)
    for _ in range(1000):
        for age_bin in range(usual + 1):
            table.enter(0, age_bin)
            table.leave(0, age_bin, returned=age_bin == usual)
    rates = best_rates(table.chances(0))
    assert rates[0] < rates[usual - 2] < rates[usual] and rates[usual + 1] < rates[0]


def test_a_ghost_hits_what_a_queue_would() -> None:
    ghost, numbers = Ghost[str](recency, recency), LeastRecent[str]()
    requests = [(now, path_of(name)) for now, name in _memoryless_chat(600)]
    num_hits = sum(ghost.see(path, numbers.visit(path, 0, 0, now), None, 100, now) for now, path in requests)
    ghost.queue.check_integrity()
    assert len(ghost.queue) <= 100
    expected = _hits(LeastRecent(), _memoryless_chat(600), capacity=100)
    assert num_hits / sum(len(path) for _, path in requests) == pytest.approx(expected)


@pytest.mark.no_cover
@pytest.mark.parametrize("order", [recency, once_first, Survival])
def test_sampled_ghosts_hit_the_share_that_the_whole_would(order: object) -> None:
    """Here all three of a duel's ghosts, each beside a queue that evicts in its order alone."""
    requests = [(now, path_of(name)) for now, name in _memoryless_chat(3000)]
    num_blocks = sum(len(path) for _, path in requests)
    shares = []
    for one_in in (1, 4):
        duel = Duel[str](one_in=one_in, digest=digest_of)
        ghost = duel.ghosts[(recency, once_first, Survival).index(order)]
        num_hits = 0
        see = ghost.see

        def counting(
            path: Sequence[str],
            visit: Visit[str],
            previous: Visit[str] | None,
            capacity: int,
            now: float,
            see: Callable[..., int] = see,
        ) -> int:
            nonlocal num_hits
            count = see(path, visit, previous, capacity, now)
            num_hits += count
            return count

        ghost.see = counting  # type: ignore[method-assign]
        for now, path in requests:
            duel.visit(path, 0, 400, now)
            duel.age(now)
        duel.check_integrity()
        assert len(ghost.queue) <= 400 / one_in
        shares.append(one_in * num_hits / num_blocks)
    assert shares[1] == pytest.approx(shares[0], abs=0.015)


def test_a_block_that_everybody_shares_and_the_sample_lacks_changes_nothing() -> None:
    """Every path begins with it; the blocks behind it are sampled as ever, and what it is worth stands there."""
    requests = [(now, ("everybody's", *path_of(name))) for now, name in _memoryless_chat(1500)]
    assert digest_of("everybody's") % 4, "in the sample"
    duel = Duel[str](one_in=4, digest=digest_of)
    for now, path in requests:
        duel.visit(path, 1, 400, now)
        duel.branch("everybody's", now)
        duel.age(now)
    duel.check_integrity()
    assert all(len(ghost.queue) > 90 and "everybody's" not in ghost.queue for ghost in duel.ghosts)


def test_a_sampled_block_stands_for_the_trunk_behind_it() -> None:
    """Else a ghost would give up the beginning of a document that is asked about again and again."""
    survival: Survival[str] = Survival()
    duel = Duel[str](survival, one_in=2, digest=lambda key: key != "p")
    queue: EvictionQueue[str] = EvictionQueue(duel)
    for now in range(40):
        use(queue, f"pq{chr(1000 + now)}abc", float(now))
    over = Visit(0, 0, 1, 40.0, "x", "x")
    over.is_over = True
    assert duel.ghosts[2].rank("p", 0, over) == survival.rank("pq", 1, over) > survival.rank("p", 0, over) == 0


@pytest.mark.no_cover
def test_a_duel_is_not_far_behind_the_best_order() -> None:
    """Whether recency is best, or keeping some of what does not fit."""
    for requests, capacity in ((list(_memoryless_chat(3000)), 400), (list(_loop()), 64)):
        best = max(_hits(policy(), requests, capacity) for policy in (LeastRecent, Survival))
        assert _hits(Duel(), requests, capacity) > best - 0.01


def test_the_real_queue_follows_the_leader_at_once() -> None:
    duel: Duel[str] = Duel()
    queue: EvictionQueue[str] = EvictionQueue(duel)
    for now, name in enumerate(["cx", "dx", "cx", "ex", "fx"]):
        use(queue, name, now)
    duel.ghosts[1].scores[0].lead = 1000.0
    assert evict_all(queue, now=5) == ["dx", "d", "ex", "e", "fx", "f", "cx", "c"], "used once first"
    for now, name in enumerate(["cx", "dx", "cx", "ex", "fx"], 6):
        use(queue, name, now)
    duel.ghosts[0].scores[0].lead = 1000.0
    assert evict_all(queue, now=11) == ["dx", "d", "cx", "c", "ex", "e", "fx", "f"], "the order of use"


def test_a_small_lead_changes_nothing() -> None:
    duel: Duel[str] = Duel()
    slow = duel.ghosts[1].scores[0]
    for _ in range(2):
        slow.add(9)
    assert slow.lead > 0 and duel.age(1.0) is not None
    slow.add(9)
    assert duel.age(2.0) is None
    assert slow.lead == 0, "whoever leads now is compared with it from now on"


def test_what_chance_can_do_is_not_forgotten_when_the_leader_changes() -> None:
    """Otherwise three requests would be enough for the next change."""
    duel: Duel[str] = Duel()
    recent, once = (ghost.scores[0] for ghost in duel.ghosts[:2])
    for _ in range(1000):
        once.add(9)
        once.add(-9)
    once.lead = 1000.0
    assert duel.age(1.0) is None
    for _ in range(3):
        recent.add(9)
    assert duel.age(2.0) is not None


def test_the_fast_clock_sees_a_load_that_has_changed() -> None:
    """After a long time of chance a lead is certain by it long before it is by the slow one."""
    duel: Duel[str] = Duel()
    slow, fast = duel.ghosts[1].scores
    for _ in range(3000):
        for num_more in (9, -9):
            slow.add(num_more)
            fast.add(num_more)
    num_steps = 0
    while duel.age(float(num_steps)) is not None:
        assert not slow.is_certain
        slow.add(3)
        fast.add(3)
        num_steps += 1
    assert num_steps < 200


def test_a_second_use_is_known_though_the_blocks_are_gone() -> None:
    """Of the whole path, the last block included, and of a trunk that others went on from."""
    survival: Survival[str] = Survival()
    queue: EvictionQueue[str] = EvictionQueue(survival)
    for now, name in enumerate(["cxyz", "pqabcd", "pqefgh"]):
        use(queue, name, float(now))
    evict_all(queue, now=10.0)
    assert survival.visit(path_of("cxyz"), 0, 0, 11.0).num_again == 4
    assert survival.visit(path_of("pqij"), 0, 0, 12.0).num_again == 2


def test_an_import_is_no_visit() -> None:
    """Blocks that come before the request that uses them teach nothing, and no ghost sees them."""
    duel: Duel[str] = Duel()
    queue: EvictionQueue[str] = EvictionQueue(duel)
    queue.release(path_of("cxyz"), 0)
    assert not any(len(ghost.queue) for ghost in duel.ghosts)
    use(queue, "cxyz", now=1)
    assert not any(score.lead for ghost in duel.ghosts for score in ghost.scores)


def _hits(ranking: Ranking[str], requests: Iterable[tuple[float, str]], capacity: int) -> float:
    """Of the blocks of all requests, given the time and the last block of each."""
    queue: EvictionQueue[str] = EvictionQueue(ranking)
    hits = total = 0
    for now, name in requests:
        path = path_of(name)
        hits += next((count for count, key in enumerate(path) if key not in queue), len(path))
        total += len(path)
        for key in path:
            if key in queue:
                queue.acquire(key)
        while len(queue) + len(path) > capacity:
            queue.evict(now)
        queue.visit(path, now)
        queue.release(path, now)
    return hits / total


def _loop() -> Iterator[tuple[float, str]]:
    return ((float(number), f"{chr(1000 + number % 20)}xyz") for number in range(2000))


def _memoryless_chat(num_requests: int) -> Iterator[tuple[float, str]]:
    """Conversations that grow, go on with a chance of 0.7 and after a random time, and start one a second."""
    random = Random(0)
    due = [(float(start), chr(1000 + start)) for start in range(num_requests)]
    for _ in range(num_requests):
        now, name = heapq.heappop(due)
        name += "xyz"
        yield now, name
        if random.random() < 0.7:
            heapq.heappush(due, (now + random.expovariate(1 / 20), name))


def test_the_ranking_hears_how_many_blocks_there_are() -> None:
    """Also where a block in the middle of a path is gone, and where a request has paused."""
    told: list[tuple[int, int]] = []

    class Listening(LeastRecent[str]):
        def visit(
            self, path: Sequence[str], num_known: int, num_blocks: int, now: float, stop: FinishReason | None = None
        ) -> Visit[str]:
            told.append((num_known, num_blocks))
            return super().visit(path, num_known, num_blocks, now)

    queue: EvictionQueue[str] = EvictionQueue(Listening())
    use(queue, "abcd")
    queue.forget("ab")
    queue.pause(path_of("xy"), 1.0)
    use(queue, "abcde")
    queue.visit(path_of("xyz"), 2.0)
    assert told == [(0, 4), (1, 7), (0, 8)], "who has paused has not used its new blocks yet"


def test_other_quotas_hold_for_the_blocks_that_are_there(queue: EvictionQueue[str]) -> None:
    use(queue, "cxyz", retention=Retention(tenant="c"))
    use(queue, "dxyz", now=1, retention=Retention(tenant="d"))
    queue.limit({"d": Quota(ceiling=1)})
    queue.check_integrity()
    assert [queue.evict_many(1, 2)[0] for _ in range(3)] == [
        (key, EvictionReason.QUOTA) for key in ("dxyz", "dxy", "dx")
    ]
    queue.limit({})
    assert queue.evict_many(1, 2) == [("cxyz", EvictionReason.FULL)]


def test_an_agent_that_waits_for_a_tool_stays_before_one_whose_turn_is_over() -> None:
    """Prompts of answers with calls come back after 9 s, the others only once in a while, and later."""
    queue: EvictionQueue[str] = EvictionQueue(Survival())
    events: list[tuple[float, str, FinishReason]] = []
    for number in range(200):
        stop = FinishReason.TOOL_CALLS if number % 2 else FinishReason.STOP
        name = chr(1000 + number) + "xyz"
        events.append((number, name, stop))
        if stop is FinishReason.TOOL_CALLS:
            events.append((number + 9, name + "w", FinishReason.STOP))
        elif number % 8 == 0:
            events.append((number + 60, name + "w", FinishReason.STOP))
    for now, name, stop in sorted(events):
        use(queue, name, now, stop=stop)
    while len(queue):
        queue.evict(300.0)

    use(queue, "cxyz", 300.0, stop=FinishReason.TOOL_CALLS)
    use(queue, "txyz", 301.0, stop=FinishReason.STOP)
    assert [queue.evict(303.0) for _ in range(4)] == ["txyz", "txy", "tx", "t"], "also where it was used later"


def test_visits_are_of_a_kind_by_the_answers_end_where_it_is_known() -> None:
    survival: Survival[str] = Survival()
    stops = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)
    kinds = [survival.visit(path_of(f"{stop}xyz"), 0, 4, 0.0, stop).kind for stop in stops]
    assert kinds[1] == kinds[2] and len(set(kinds)) == 3 and max(kinds) == NUM_KINDS - 1
    survival.check_integrity()
