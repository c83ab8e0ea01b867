"""In bfloat16 every family's tokens and log-probabilities are the same bits, whatever happened around a request."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import Assignment
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.states import States
from raydix.engine.model.build import make_pool, make_runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.state_pool import StatePool
from tests.model.logits import logits_in_chunks
from tests.model.random_models import CASES, reference
from tests.model.test_exactness import BLOCK_SIZE, assignment, run
from tests.skips import NO_PRODUCT

PROMPT = tuple(torch.randint(1, 200, (70,), generator=torch.Generator().manual_seed(1)).tolist())
OTHERS = {"alike": PROMPT[:50] + PROMPT[:9], **{f"other {at}": PROMPT[at : at + 20] for at in range(1, 5)}}
NUM_TOKENS = 20
NUM_STATES = 20
"""Of a model with recurrent layers: for all requests below, and some to keep."""


def make_engine(
    decoder: Decoder,
    *,
    budget: int = 512,
    num_blocks: int = 100,
    drafter: Drafter | None = None,
    max_len: int = 100,
    swap_bytes: int = 0,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Engine:
    store = make_pool(decoder.config, num_blocks, BLOCK_SIZE, kv_dtype, decoder.device)
    limits = SchedulerLimits(budget, 16)
    is_recurrent = decoder.config.recurrent is not None
    states = StatePool(decoder.config, NUM_STATES) if is_recurrent else None
    runner = make_runner(decoder, store, limits, states=states)
    pool = BlockPool(num_blocks, BLOCK_SIZE, states=States(NUM_STATES) if is_recurrent else None)
    return Engine(runner, store, pool, limits, max_len, "model", swap_bytes=swap_bytes, drafter=drafter, states=states)


def ask(name: str, prompt: Sequence[int] = PROMPT) -> Assignment:
    return assignment(name, prompt, NUM_TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str, tmp_path: Path) -> None:
    """Cold, from the cache, in chunks, in a batch, preempted, swapped, and with drafts."""
    reference(case, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu")
    if not decoder.has_independent_rows:
        pytest.skip(NO_PRODUCT)
    engine = make_engine(decoder)
    cold = run(engine, [ask("ours")])
    assert run(engine, [ask("ours")]) == cold, "from the cache"
    assert run(make_engine(decoder, budget=16), [ask("ours")]) == cold, "in chunks"

    every = [ask("ours"), *(ask(name, ids) for name, ids in OTHERS.items())]
    together = run(make_engine(decoder), every)
    assert together["ours"] == cold["ours"], "in a batch"

    crowded = make_engine(decoder, num_blocks=15)
    crowded.scheduler.swap_policy.costs = WorkerCosts(swap_s=0.0, swap_byte_s=0.0)
    assert run(crowded, every) == together
    assert crowded.preemptions.num_recomputed > 0

    swapping = make_engine(decoder, num_blocks=15, swap_bytes=1 << 30)
    swapping.scheduler.swap_policy.costs = WorkerCosts(swap_s=0.0, swap_byte_s=0.0)
    assert run(swapping, every) == together, "swapped"
    assert swapping.preemptions.num_swapped > 0

    # Its own first answer is the best of drafts for the second one.
    drafting = make_engine(decoder, drafter=Drafter(DraftLimits()))
    run(drafting, [ask("ours")])
    drafting.submit(ask("ours"), 0.0)
    drafted, num_drafted = [], 0
    while (step := drafting.step(0.0)) is not None:
        drafted += [(event.token_id, event.logprobs) for event in step.events]
        num_drafted += step.shape.num_draft_tokens
    assert drafted == cold["ours"], "with drafts"
    assert num_drafted > 0


@pytest.mark.parametrize("case", ["qwen 3 moe", "gpt-oss"])
def test_threads_that_are_late_read_the_products_of_their_own_layer(case: str, tmp_path: Path) -> None:
    """Of more threads than processors some come to a layer's experts when the others have left it."""
    reference(case, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu")
    if not decoder.has_independent_rows:
        pytest.skip(NO_PRODUCT)
    alone = logits_in_chunks(decoder, list(PROMPT), 7)
    torch.set_num_threads(4 * (os.cpu_count() or 1))
    try:
        for _ in range(50):
            assert torch.equal(logits_in_chunks(decoder, list(PROMPT), 7), alone)
    finally:
        torch.set_num_threads(1)
