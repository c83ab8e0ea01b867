"""The hand-over that benchmarks.stack measures, with a model whose KV says what it is of."""

from collections.abc import Callable

import pytest

from benchmarks.stack import move_blocks
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.engine import Engine
from raydix.engine.model.segments import Bytes
from tests.unit.builders import FINGERPRINT, FakeModel, hashes_of, make_assignment

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3)


@pytest.mark.parametrize(("get", "num_copies"), [(lambda stored: stored[:], 3), (lambda stored: stored.copy(), 4)])
def test_copies_are_counted(get: Callable[[Bytes], Bytes], num_copies: int) -> None:
    pool = BlockPool(16, 4)
    model = FakeModel(pool)
    engine = Engine(model, model, pool, SchedulerLimits(64, 8), 64, FINGERPRINT)
    engine.submit(make_assignment(prompt=PROMPT, max_tokens=1), 0.0)
    while engine.step(0.0) is not None:
        pass
    assert move_blocks(engine, lambda payload: payload.copy(), get)[1] == num_copies
    assert engine.exchange.store is model and pool.hashes() == hashes_of(PROMPT)
    engine.submit(make_assignment("b", (*PROMPT, 1), max_tokens=1), 0.0)
    assert engine.step(0.0) is not None, "the model attends to what was moved"
    engine.scheduler.check_integrity()
