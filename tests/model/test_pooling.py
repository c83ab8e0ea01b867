"""Pooled hidden states: those of transformers in float32, and in bfloat16 on CPU the same bits, whatever happened
around them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import Assignment, Pooling, Sampling, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.states import States
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import ModelRunner
from raydix.engine.model.state_pool import StatePool
from raydix.engine.model.tokenizer import quiet_transformers
from tests.model.logits import BLOCK_SIZE
from tests.model.random_models import CASES, reference
from tests.model.test_exactness import assignment, make_engine

LENGTHS = (1, 2, 15, 16, 17, 300)
State = bytes


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1, 200) for _ in range(length)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A small random one in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    reference("qwen 3", folder)
    return Decoder.from_folder(folder, torch.bfloat16, "cpu")


def pooling(token_ids: Sequence[int], kind: Pooling = Pooling.MEAN, name: str = "r") -> Assignment:
    sampling = Sampling(max_tokens=0, pooling=kind)
    return Assignment(name, 0, Stage.WHOLE, tuple(token_ids), len(token_ids), sampling, "ingress")


def states_of(engine: Engine, *assignments: Assignment) -> dict[str, State]:
    """The pooled states of some requests, submitted at once."""
    for each in assignments:
        engine.submit(each, 0.0)
    states: dict[str, State] = {}
    while (step := engine.step(0.0)) is not None:
        assert not step.failures
        states |= {event.request_id: event.pooled for event in step.events if event.pooled is not None}
    engine.scheduler.check_integrity()
    assert engine.pool.num_available == engine.pool.num_blocks
    return states


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_transformers(case: str, tmp_path: Path) -> None:
    token_ids, _ = reference(case, tmp_path)
    with quiet_transformers():
        import transformers

        theirs = getattr(transformers, f"{CASES[case][0]}ForCausalLM").from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs.eval().base_model(torch.tensor([token_ids])).last_hidden_state[0].double()

    ours = Decoder.from_folder(tmp_path, torch.float32, "cpu")
    store = KVPool(ours.config, 16, BLOCK_SIZE, torch.float32)
    limits = SchedulerLimits(token_budget=40, max_requests=8)
    is_recurrent = ours.config.recurrent is not None
    runner = ModelRunner(ours, store, states=StatePool(ours.config, 8) if is_recurrent else None)
    pool = BlockPool(16, BLOCK_SIZE, states=States(8) if is_recurrent else None)
    engine = Engine(runner, store, pool, limits, 256, "model")
    for kind, state in ((Pooling.MEAN, expected.mean(0)), (Pooling.LAST, expected[-1])):
        actual = torch.frombuffer(bytearray(states_of(engine, pooling(token_ids, kind))["r"]), dtype=torch.float32)
        assert actual.shape == (ours.config.hidden_size,)
        assert torch.linalg.vector_norm(actual - state) < 1e-3 * torch.linalg.vector_norm(state)


@pytest.fixture(scope="module", params=Pooling)
def kind(request: pytest.FixtureRequest) -> Pooling:
    return Pooling(request.param)


@pytest.fixture(scope="module")
def cold(decoder: Decoder, kind: Pooling) -> dict[int, State]:
    """Each prompt alone in a fresh engine: what everything below must equal."""
    return {length: states_of(make_engine(decoder), pooling(prompt(length, length), kind))["r"] for length in LENGTHS}


def test_states_are_numbers_and_differ(cold: dict[int, State]) -> None:
    arrays = [np.frombuffer(state, "<f4") for state in cold.values()]
    assert all(np.isfinite(array).all() and array.std() > 0 for array in arrays)
    assert len(set(cold.values())) == len(cold)


@pytest.mark.parametrize("budget", [7, 16, 64, 1024])
def test_chunk_sizes(decoder: Decoder, kind: Pooling, cold: dict[int, State], budget: int) -> None:
    for length in LENGTHS:
        engine = make_engine(decoder, budget, max_requests=min(budget, 16))
        assert states_of(engine, pooling(prompt(length, length), kind))["r"] == cold[length]


def test_with_cached_blocks_and_with_pooled_ones(decoder: Decoder, kind: Pooling, cold: dict[int, State]) -> None:
    for length in LENGTHS:
        engine = make_engine(decoder)
        pooled = pooling(prompt(length, length), kind)
        states_of(engine, replace(pooled, sampling=Sampling(1)))
        assert states_of(engine, pooled)["r"] == cold[length], "its KV was cached"
        assert states_of(engine, pooled)["r"] == cold[length], "its sums were kept, too"
        engine.pool.reset()
        assert states_of(engine, pooled)["r"] == cold[length], "its sums were kept, its KV was not"


def test_a_shared_prefix(decoder: Decoder, kind: Pooling) -> None:
    engine = make_engine(decoder)
    shared = prompt(1, 200)
    states_of(engine, pooling(shared + prompt(2, 50), kind))
    for seed in (3, 4):
        token_ids = shared + prompt(seed, 60)
        alone = states_of(make_engine(decoder), pooling(token_ids, kind))
        assert states_of(engine, pooling(token_ids, kind)) == alone


def test_among_others(decoder: Decoder, kind: Pooling, cold: dict[int, State]) -> None:
    """Among pooled prompts of both kinds, a scored one, and some that are answered."""
    engine = make_engine(decoder, budget=200, num_blocks=300)
    ours = [pooling(prompt(length, length), kind, f"ours {length}") for length in LENGTHS]
    others = [
        pooling(prompt(1000 + index, 5 + 9 * index), Pooling(each), f"{each} {index}")
        for index in range(8)
        for each in Pooling
    ]
    scored = replace(pooling(prompt(1, 90), name="scored"), sampling=Sampling(0, prompt_logprobs=2))
    answered = [assignment(f"answered {index}", prompt(50 + index, 20)) for index in range(4)]
    together = states_of(engine, *others[:8], *answered, *ours, scored, *others[8:])
    assert {length: together[f"ours {length}"] for length in LENGTHS} == cold


def test_preempted(decoder: Decoder, kind: Pooling, cold: dict[int, State]) -> None:
    engine = make_engine(decoder, budget=8, max_requests=8, num_blocks=24)
    answered = assignment("answered", prompt(9, 60), num_tokens=150)
    states = states_of(engine, answered, pooling(prompt(300, 300), kind))
    assert engine.preemptions.num_recomputed > 0
    assert states["r"] == cold[300]
