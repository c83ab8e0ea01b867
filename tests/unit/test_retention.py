"""What requests and tenants may wish of eviction, through the scheduler. The pool has 32 blocks of four tokens."""

from collections.abc import Sequence

import pytest

from raydix.engine.core.eviction.policies import EvictionPolicy, make_queue
from raydix.engine.core.eviction.queue import EvictionQueue, Quota
from raydix.engine.core.eviction.ranking import LeastRecent, Visit
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import BlockHash, CacheHints, CacheMark, FinishReason, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.scheduler import Scheduler
from tests.unit.builders import FakeModel, chain_of, hashes_of, import_blocks, keys_of, make_assignment, run_all, submit

KEPT = (3, 1, 2, 3, 0, 1, 1, 2, 3, 2, 0, 0)
NUM_BLOCKS = 32


class Worker:
    """A scheduler and its model, asked one request after the other."""

    def __init__(self, policy: EvictionPolicy, quotas: dict[str, Quota] | None = None) -> None:
        pool = BlockPool(NUM_BLOCKS, 4, make_queue(policy, quotas))
        self.scheduler = Scheduler(pool, SchedulerLimits(64, 8), NUM_BLOCKS * 4)
        self.model = FakeModel(pool)
        self.num_asked = 0

    def ask(self, prompt: tuple[int, ...], hints: CacheHints, now: float = 0.0) -> None:
        self.num_asked += 1
        submit(self.scheduler, make_assignment(str(self.num_asked), prompt, max_tokens=1, cache=hints), now)
        run_all(self.scheduler, self.model, now)
        self.scheduler.check_integrity()

    def flood(self, hints: CacheHints, num_blocks: int, now: float = 1.0) -> None:
        """Prompts of three blocks that nobody has asked before, with `num_blocks` blocks in all."""
        for number in range(num_blocks // 3):
            self.ask((number, *range(100, 111)), hints, now)

    def num_kept(self, prompt: tuple[int, ...]) -> int:
        return len(self.scheduler.pool.match(hashes_of(prompt)))


@pytest.fixture(params=EvictionPolicy)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    policy: EvictionPolicy = request.param
    return policy


def test_without_a_wish_a_flood_takes_everything() -> None:
    worker = Worker(EvictionPolicy.LRU)
    worker.ask(KEPT, CacheHints())
    worker.flood(CacheHints(), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 0


def test_one_tenant_cannot_flush_another_below_its_floor(policy: EvictionPolicy) -> None:
    worker = Worker(policy, {"a": Quota(floor=3)})
    worker.ask(KEPT, CacheHints("a"))
    worker.flood(CacheHints("b", priority=10), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 3


def test_a_tenant_above_its_ceiling_pays_with_its_own_blocks(policy: EvictionPolicy) -> None:
    worker = Worker(policy, {"b": Quota(ceiling=9)})
    worker.ask(KEPT, CacheHints("a"))
    worker.flood(CacheHints("b", priority=10), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 3


def test_a_higher_priority_survives_a_flood(policy: EvictionPolicy) -> None:
    worker = Worker(policy)
    worker.ask(KEPT, CacheHints(priority=1))
    worker.flood(CacheHints(), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 3
    worker.flood(CacheHints(priority=2), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 0


def test_what_has_expired_goes_first(policy: EvictionPolicy) -> None:
    worker = Worker(policy)
    worker.flood(CacheHints(), 27, now=0.0)
    worker.ask(KEPT, CacheHints(priority=10, ttl_s=5.0), now=1.0)
    worker.ask((7, *KEPT[1:]), CacheHints(), now=5.9)
    assert worker.num_kept(KEPT) == 3, "not expired yet"
    worker.ask((8, *KEPT[1:]), CacheHints(), now=6.0)
    assert worker.num_kept(KEPT) == 0
    assert worker.num_kept((7, *KEPT[1:])) == 3


def test_what_was_imported_belongs_to_the_tenant_that_uses_it_first(policy: EvictionPolicy) -> None:
    worker = Worker(policy, {"a": Quota(floor=3)})
    keys = keys_of(chain_of(), KEPT)
    import_blocks(worker.scheduler, worker.model, hashes_of(KEPT), [keys[:4], keys[4:8], keys[8:]])
    worker.ask(KEPT, CacheHints("a"))
    worker.flood(CacheHints("b"), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 3


def test_the_blocks_before_a_mark_survive_a_flood_and_the_rest_does_not(policy: EvictionPolicy) -> None:
    worker = Worker(policy)
    worker.ask(KEPT, CacheHints(marks=(CacheMark(2, 1, 300.0),)))
    worker.flood(CacheHints(), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 2
    worker.flood(CacheHints(priority=2), 3 * NUM_BLOCKS)
    assert worker.num_kept(KEPT) == 0


def test_the_blocks_before_a_mark_expire_as_the_longest_mark_says(policy: EvictionPolicy) -> None:
    def kept_at(now: float) -> int:
        worker = Worker(policy)
        worker.flood(CacheHints(), 27, now=0.0)
        worker.ask(KEPT, CacheHints(marks=(CacheMark(2, 1, 60.0), CacheMark(3, 1, 5.0))), now=1.0)
        worker.ask((7, *KEPT[1:]), CacheHints(), now=now)
        worker.ask((8, *KEPT[1:]), CacheHints(), now=now)
        return worker.num_kept(KEPT)

    assert (kept_at(5.9), kept_at(6.1), kept_at(61.1)) == (3, 2, 0)


def test_another_request_renews_a_mark() -> None:
    worker = Worker(EvictionPolicy.LRU)
    marked = CacheHints(marks=(CacheMark(3, 1, 5.0),))
    worker.flood(CacheHints(), 27, now=0.0)
    worker.ask(KEPT, marked, now=1.0)
    worker.ask(KEPT, marked, now=4.0)
    worker.ask((7, *KEPT[1:]), CacheHints(), now=8.9)
    worker.ask((8, *KEPT[1:]), CacheHints(), now=8.9)
    assert worker.num_kept(KEPT) == 3
    worker.ask((9, *KEPT[1:]), CacheHints(), now=9.0)
    assert worker.num_kept(KEPT) == 0


def test_eviction_hears_whether_an_answer_has_calls() -> None:
    """Eviction hears it where a token tells, and not from a worker that generates only the answer's first token."""
    told: list[FinishReason | None] = []

    class Listening(LeastRecent[BlockHash]):
        def visit(
            self,
            path: Sequence[BlockHash],
            num_known: int,
            num_blocks: int,
            now: float,
            stop: FinishReason | None = None,
        ) -> Visit[BlockHash]:
            told.append(stop)
            return super().visit(path, num_known, num_blocks, now, stop)

    pool = BlockPool(NUM_BLOCKS, 4, EvictionQueue(Listening()))
    scheduler, model = Scheduler(pool, SchedulerLimits(64, 8), NUM_BLOCKS * 4), FakeModel(pool)

    def ask(hints: CacheHints, stage: Stage = Stage.WHOLE) -> list[int | None]:
        submit(scheduler, make_assignment("a", KEPT, max_tokens=3, stage=stage, cache=hints))
        return [event.token_id for event in run_all(scheduler, model)["a"]]

    _, token, _ = ask(CacheHints())
    assert token is not None
    ask(CacheHints(call_token=token))
    ask(CacheHints(call_token=1 << 20))
    ask(CacheHints(call_token=token), Stage.PREFILL)
    assert told == [None, FinishReason.TOOL_CALLS, FinishReason.STOP, None]
