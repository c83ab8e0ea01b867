"""No kernel is compiled while a request waits: made traffic launches nothing that the start has not launched.

Nothing runs here: launches are recorded with what a GPU would say of itself, and each sampled token is 0.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import raydix.engine.model.sampler
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import Assignment, Sampling, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.model.build import make_pool
from raydix.engine.model.cuda_runner import CudaRunner, graph_rows
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.families import config_of
from raydix.engine.model.weights import RandomTensors
from raydix.kernels.sample import SampleOutput
from tests.cuda_stand_ins import Repetition
from tests.kernels.ahead_of_time import Launch, recorded, variant
from tests.kernels.interpreter import INTERPRETING
from tests.kernels.triton_engine import sample_on_device, take_triton_kernels

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 1200, 4096
LIMITS = SchedulerLimits(token_budget=1024, max_requests=32)
DRAFTS = DraftLimits()
NUM_MULTIPROCESSORS = 4
"""So few that the small model's products take every shape of tile."""
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_LEN,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "smollm": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "gemma2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 1024},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "smollm": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    *({"logprobs": count} for count in (0, 1, 5, 16, 20)),
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.2},
    {"logit_bias": ((3, 1.0),)},
    {"allowed_token_ids": (0, 1)},
    {"prompt_logprobs": 3},
)
LENGTHS = (1, 3, 17, 60, 65, 100, 130, 300, 700, 1500, 3000)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    def sample(*arguments: Any, **given: Any) -> SampleOutput:
        output = sample_on_device(*arguments, **given)
        output.token_ids.zero_()
        return output

    take_triton_kernels(monkeypatch)
    monkeypatch.setattr(raydix.engine.model.sampler, "sample", sample)
    # What no kernel has written is 0: a token that is looked up in the same call, for one.
    monkeypatch.setattr("raydix.kernels.sample.triton.torch.empty", torch.zeros)
    with recorded(90, NUM_MULTIPROCESSORS) as found:
        yield found


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_traffic_takes_no_kernel_that_the_start_did_not_take(
    model: str, deterministic: bool, launches: list[Launch]
) -> None:
    config = config_of({"architectures": [ARCHITECTURES[model]], **SHAPE, **MODELS[model]})
    decoder = Decoder(config, RandomTensors(config), torch.bfloat16, "cpu", deterministic=True)
    decoder.deterministic = deterministic  # of attention; products of the fast mode are not Triton's
    pool = make_pool(config, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device)
    rows = graph_rows(LIMITS.max_requests, LIMITS.max_requests * DRAFTS.depth)
    runner = CudaRunner(decoder, pool, rows, Repetition())
    runner.warm_up(LIMITS.token_budget)
    known = set(map(variant, launches))
    assert len({name for name, *_ in known}) > 10

    engine = Engine(runner, pool, BlockPool(NUM_BLOCKS, BLOCK_SIZE), LIMITS, MAX_LEN, "model", drafter=Drafter(DRAFTS))
    chance = random.Random(0)
    for crowd in (1, 2, 5, 20, 32):
        launches.clear()
        for number in range(crowd):
            prompt = tuple(chance.randrange(512) for _ in range(chance.choice(LENGTHS)))
            sampling = Sampling(max_tokens=chance.choice((1, 3, 9)), seed=number, **chance.choice(WISHES))
            engine.submit(
                Assignment(f"{crowd}-{number}", 0, Stage.WHOLE, prompt, len(prompt), sampling, "ingress"), 0.0
            )
        num_steps = 0
        while (step := engine.step(0.0)) is not None:
            assert not step.failures
            num_steps += 1
        assert num_steps and launches
        assert set(map(variant, launches)) <= known
