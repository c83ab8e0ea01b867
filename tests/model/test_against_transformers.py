"""Logits, log-probabilities of prompts and greedy tokens of the real model in float32 equal those of transformers."""

import random

import pytest
import torch

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import Assignment, Sampling, Stage, TokenLogprobs
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import ModelRunner
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from tests.model.logits import BLOCK_SIZE, logits_in_chunks

MAX_LEN = 2400


@pytest.fixture(scope="module")
def ours() -> Decoder:
    try:
        folder = resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))
    return Decoder.from_folder(folder, torch.float32, "cpu", MAX_LEN)


@pytest.fixture(scope="module")
def theirs(ours: Decoder) -> torch.nn.Module:
    from raydix.engine.model.tokenizer import quiet_transformers

    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(resolve_model(DEFAULT_MODEL), dtype=torch.float32)
    return model.eval()


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(49_152) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 100, 700, 2100])
def test_logits(ours: Decoder, theirs: torch.nn.Module, length: int) -> None:
    """Short, one block exactly and one more or less, several chunks, longer than 2,048."""
    token_ids = prompt(length, length)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    actual = logits_in_chunks(ours, token_ids, chunk=256)
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert error.max() < 1e-3


def test_prompt_logprobs(ours: Decoder, theirs: torch.nn.Module) -> None:
    token_ids = prompt(9, 700)
    store = KVPool(ours.config, 64, BLOCK_SIZE, torch.float32)
    limits = SchedulerLimits(token_budget=150, max_requests=8)
    engine = Engine(ModelRunner(ours, store), store, BlockPool(64, BLOCK_SIZE), limits, 1024, "model")
    sampling = Sampling(max_tokens=0, prompt_logprobs=5)
    engine.submit(Assignment("r", 0, Stage.WHOLE, tuple(token_ids), len(token_ids), sampling, "ingress"), 0.0)
    scores: list[TokenLogprobs] = []
    while (step := engine.step(0.0)) is not None:
        scores += [at for event in step.scores for at in event.logprobs]
    with torch.inference_mode():
        expected = torch.log_softmax(theirs(torch.tensor([token_ids])).logits[0, :-1], -1)
    chosen = expected.gather(1, torch.tensor(token_ids[1:])[:, None])
    torch.testing.assert_close(torch.tensor([at.chosen for at in scores]), chosen[:, 0], rtol=0, atol=1e-3)
    top = torch.tensor([at.top_logprobs for at in scores])
    torch.testing.assert_close(top, expected.topk(5).values, rtol=0, atol=1e-3)
    top_ids = torch.tensor([at.top_ids for at in scores])
    torch.testing.assert_close(top, expected.gather(1, top_ids), rtol=0, atol=1e-3)
    ranks = torch.tensor([at.rank for at in scores])
    assert ((expected > chosen + 1e-3).sum(1) < ranks).all()
    assert (ranks <= (expected >= chosen - 1e-3).sum(1)).all()


def test_greedy_tokens(ours: Decoder, theirs: torch.nn.Module) -> None:
    """32 tokens of 10 prompts, all at once through the engine."""
    prompts = [prompt(100 + index, 5 + 18 * index) for index in range(10)]
    config: ModelConfig = ours.config
    store = KVPool(config, 400, BLOCK_SIZE, torch.float32)
    limits = SchedulerLimits(token_budget=64, max_requests=20)
    engine = Engine(ModelRunner(ours, store), store, BlockPool(400, BLOCK_SIZE), limits, MAX_LEN, "model")
    for index, token_ids in enumerate(prompts):
        sampling = Sampling(max_tokens=32, temperature=0.0)
        engine.submit(
            Assignment(str(index), 0, Stage.WHOLE, tuple(token_ids), len(token_ids), sampling, "ingress"), 0.0
        )
    generated: dict[str, list[int]] = {}
    while (step := engine.step(0.0)) is not None:
        for event in step.events:
            assert event.token_id is not None
            generated.setdefault(event.request_id, []).append(event.token_id)
    for index, token_ids in enumerate(prompts):
        # One pass over prompt and answer: each token is the likeliest after those before it, so greedy decoding, which
        # begins with the same prompt, goes through the same tokens.
        answer = generated[str(index)]
        with torch.inference_mode():
            logits = theirs(torch.tensor([token_ids + answer])).logits[0]
        assert logits[len(token_ids) - 1 : -1].argmax(-1).tolist() == answer
