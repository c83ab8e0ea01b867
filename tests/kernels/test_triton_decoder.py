"""A whole engine on the Triton kernels in deterministic mode: the same bits whatever the batch, close to the CPU's."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import Assignment, DraftSource, Sampling, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.build import make_pool, make_runner
from raydix.engine.model.cuda_runner import CudaRunner, graph_rows
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.families import config_of
from raydix.engine.model.runner import ModelRunner
from raydix.engine.model.weights import RandomTensors
from tests.cuda_stand_ins import Repetition
from tests.kernels.triton_cases import DEVICE
from tests.kernels.triton_engine import take_triton_kernels

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 24, 96
LIMITS = SchedulerLimits(token_budget=96, max_requests=4)
CHEAP = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=1e-5)
CONFIG = config_of(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_LEN,
    }
)
Outputs = dict[str, list[tuple[int | None, tuple[float, ...]]]]


def make_decoder(device: torch.device | str) -> Decoder:
    return Decoder(CONFIG, RandomTensors(CONFIG), torch.bfloat16, device, deterministic=True)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A decoder on the GPU; without one, on the CPU with the kernels that a GPU would run."""
    if DEVICE.type == "cpu":
        take_triton_kernels(monkeypatch)
    return make_decoder(DEVICE)


def assignments() -> list[Assignment]:
    generator = random.Random(0)
    prompts = {"short": (5, 0.0), "block": (16, 1.0), "long": (70, 0.0)}
    return [
        Assignment(
            name,
            0,
            Stage.WHOLE,
            tuple(generator.randrange(96) for _ in range(length)),
            length,
            Sampling(max_tokens=6, temperature=temperature, seed=1, logprobs=2),
            "ingress",
        )
        for name, (length, temperature) in prompts.items()
    ]


def run(runner: ModelRunner, wanted: Iterable[Assignment], budget: int = 96, drafter: Drafter | None = None) -> Outputs:
    limits = replace(LIMITS, token_budget=budget)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    worker = Engine(runner, runner.kv_pool, pool, limits, MAX_LEN, "model", drafter=drafter)
    worker.scheduler.learn_costs(CHEAP)
    outputs: Outputs = {}
    for assignment in wanted:
        worker.submit(assignment, 0.0)
    while (step := worker.step(0.0)) is not None:
        for event in step.events:
            assert event.logprobs is not None
            said = (event.token_id, (event.logprobs.chosen, *event.logprobs.top_logprobs))
            outputs.setdefault(event.request_id, []).append(said)
    return outputs


def make(decoder: Decoder, drafts: DraftLimits | None = None) -> ModelRunner:
    pool = make_pool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device)
    if decoder.device.type == "cuda":
        return make_runner(decoder, pool, LIMITS, drafts=drafts)
    max_drafted = 0 if drafts is None else drafts.depth
    rows = graph_rows(LIMITS.max_requests, max_drafted)
    return CudaRunner(decoder, pool, rows, Repetition())


def test_the_same_bits_alone_in_chunks_and_together(decoder: Decoder) -> None:
    alone: Outputs = {}
    for assignment in assignments():
        alone |= run(make(decoder), [assignment])
    assert run(make(decoder), assignments()) == alone
    assert run(make(decoder), reversed(assignments()), budget=16) == alone


class Known(Drafter):
    """Drafts of the tokens that answers are known to have; every other draft ends with a wrong one."""

    def __init__(self, limits: DraftLimits, answers: Outputs) -> None:
        super().__init__(limits)
        self._answers = answers
        self.num_drafts = 0

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        return [self._draft_of(request) for request in scheduler.running.values() if request.num_remaining == 1]

    def _draft_of(self, request: Request) -> Draft:
        self.num_drafts += 1
        after = self._answers[request.request_id][request.num_output :]
        guess = [token_id for token_id, _ in after if token_id is not None][:3]
        if guess and self.num_drafts % 2:
            guess[-1] ^= 1
        return Draft(request.request_id, DraftSource.REQUEST, tuple(guess), (1.0,) * len(guess))


def test_the_same_bits_with_drafts(decoder: Decoder) -> None:
    limits, wanted = DraftLimits(depth=3), assignments()[:2]
    plain = run(make(decoder), wanted)
    drafter = Known(limits, plain)
    assert run(make(decoder, limits), wanted, drafter=drafter) == plain
    assert drafter.num_drafts > 0


def test_close_to_the_cpu(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = run(make(decoder), assignments())
    monkeypatch.undo()
    on_cpu = make_decoder("cpu")
    pool = make_pool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, on_cpu.device)
    theirs = run(ModelRunner(on_cpu, pool), assignments())
    for name, outputs in theirs.items():
        assert ours[name][0][0] == outputs[0][0]
        torch.testing.assert_close(torch.tensor(ours[name][0][1]), torch.tensor(outputs[0][1]), rtol=0.05, atol=0.05)
