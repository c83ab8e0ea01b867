"""The benchmark of the cache's price: that both engines do what their names say."""

from benchmarks.zero_hits import ANSWER, NUM_BLOCKS, PROMPT, NoStore, _compared, _engine, _run, bookkeeping
from raydix.engine.core.eviction.policies import EvictionPolicy
from raydix.engine.model.runner import NullRunner


def test_every_new_block_evicts_one_with_the_cache_and_none_is_kept_without() -> None:
    prompts = [tuple(range(number, number + PROMPT)) for number in (100, 5000)]
    for policy in (*EvictionPolicy, None):
        engine = _engine(NullRunner(), NoStore(), NUM_BLOCKS, policy)
        seconds = _run(engine, prompts, ANSWER)
        assert seconds["prefill"] > 0 and seconds["decode"] > 0
        assert engine.pool.num_available == NUM_BLOCKS
        assert (engine.pool.num_cached == 0) == (policy is None)
        assert policy is None or engine.pool.num_cached > NUM_BLOCKS - 10
        engine.scheduler.check_integrity()


def test_what_is_reported() -> None:
    costs = bookkeeping(rounds=1, prompts=8)
    assert costs.keys() == {"cache, adaptive", "cache, lru", "the rest of the engine"}
    assert _compared([2.0, 1.1], [2.0, 1.0])["time_over_off"] == 1.05
