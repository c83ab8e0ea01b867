"""Requests that a step of the real model raises for end alone: the others get the bits that they get without them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import TokenEvent, TokenLogprobs
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.rows import Row
from raydix.engine.core.worker.step import SampledToken, ScheduledChunk
from raydix.engine.model.build import make_pool
from raydix.engine.model.cuda import CudaGraphs
from raydix.engine.model.cuda_runner import CudaRunner, graph_rows
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammars import StepMasks
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import ModelRunner
from raydix.engine.model.sampler import sample_requests
from tests.cuda_stand_ins import Repetition
from tests.model.test_cuda_runner import CONFIG as SMALL
from tests.model.test_cuda_runner import make_decoder as make_small_decoder
from tests.model.test_cuda_runner import needs_gpu
from tests.model.test_exactness import BLOCK_SIZE, assignment, load_decoder

Token = tuple[int | None, TokenLogprobs | None]

MAX_LEN = 256
NUM_STREAMS = 8
NUM_TOKENS = 20
POISON = 7
"""The first token of the prompts that make a step raise, from their fifth token of the answer on."""
Place = str


@dataclass(frozen=True)
class Case:
    """A decoder and what runs it."""

    decoder: Decoder
    runner: Callable[[Decoder, KVPool], ModelRunner]
    vocab: int


@pytest.fixture(scope="module", params=["cpu", "graphs", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def case(request: pytest.FixtureRequest) -> Case:
    rows = graph_rows(NUM_STREAMS)
    if request.param == "cpu":
        return Case(load_decoder(), ModelRunner, 40_000)
    if request.param == "graphs":
        small = make_small_decoder("cpu")
        return Case(small, lambda decoder, pool: CudaRunner(decoder, pool, rows, Repetition()), SMALL.vocab_size)
    small = make_small_decoder("cuda", deterministic=True)
    graphs = CudaGraphs(small.device)
    return Case(small, lambda decoder, pool: CudaRunner(decoder, pool, rows, graphs), SMALL.vocab_size)


def is_due(request: Row) -> bool:
    return request.token_ids[0] == POISON and request.num_output >= 5


def raise_if_due(requests: Sequence[Row]) -> None:
    if any(is_due(request) for request in requests):
        raise RuntimeError("poison")


def poison(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, place: Place) -> None:
    """Have the runner raise for some requests: before it computes, after, or when it samples."""
    compute = runner.hidden

    def hidden(chunks: Sequence[ScheduledChunk]) -> Tensor:
        requests = [chunk.request for chunk in chunks]
        if place == "before":
            raise_if_due(requests)
        result = compute(chunks)
        if place == "after":
            raise_if_due(requests)
        return result

    def sample(logits: Tensor, requests: Sequence[Row], masks: StepMasks | None = None) -> list[SampledToken]:
        if place == "sampling":
            raise_if_due(requests)
        return sample_requests(logits, requests, masks)

    monkeypatch.setattr(runner, "hidden", hidden)
    monkeypatch.setattr("raydix.engine.model.runner.sample_requests", sample)


def answers(
    case: Case, ill: Sequence[int], spoil: Callable[[ModelRunner], None]
) -> tuple[dict[str, list[Token]], set[str]]:
    """Tokens with log-probabilities by stream, and who failed; half of the streams are sampled."""
    pool = make_pool(case.decoder.config, 200, BLOCK_SIZE, torch.bfloat16, case.decoder.device)
    runner = case.runner(case.decoder, pool)
    spoil(runner)
    limits = SchedulerLimits(token_budget=64, max_requests=NUM_STREAMS)
    engine = Engine(runner, pool, BlockPool(200, BLOCK_SIZE), limits, MAX_LEN, "model")
    for index in range(NUM_STREAMS):
        first = POISON if index in ill else 100 + index
        prompt = [first, *((index * 31 + position * 7) % case.vocab for position in range(10 + 5 * index))]
        engine.submit(assignment(str(index), prompt, NUM_TOKENS, seed=index if index % 2 else None), 0.0)
    events: list[TokenEvent] = []
    failed: set[str] = set()
    while (step := engine.step(0.0)) is not None:
        events += step.events
        failed |= {failure.request_id for failure in step.failures}
        engine.scheduler.check_integrity()
    assert engine.pool.num_available == engine.pool.num_blocks
    outputs: dict[str, list[Token]] = {}
    for event in events:
        outputs.setdefault(event.request_id, []).append((event.token_id, event.logprobs))
    return outputs, failed


@pytest.mark.parametrize("place", ["before", "after", "sampling"])
def test_two_poisoned_streams_among_eight_end_alone(case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, nobody = answers(case, (2, 5), lambda runner: None)
    assert not nobody and all(len(answer) == NUM_TOKENS for answer in expected.values())
    got, failed = answers(case, (2, 5), lambda runner: poison(monkeypatch, runner, place))
    assert failed == {"2", "5"}
    for name, answer in expected.items():
        assert got[name] == (answer[:5] if name in failed else answer), f"stream {name} is another one"


def test_a_device_that_fails_from_now_on_is_told_from_a_poisoned_request(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(case.decoder.config, 20, BLOCK_SIZE, torch.bfloat16, case.decoder.device)
    before = pool.data.clone()
    runner = case.runner(case.decoder, pool)
    engine = Engine(runner, pool, BlockPool(20, BLOCK_SIZE), SchedulerLimits(64, 8), MAX_LEN, "model")
    assert engine.still_runs()
    assert torch.equal(pool.data, before), "finding out stores nothing"

    def fail(*args: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "hidden", fail)
    engine.submit(assignment("a", [1, 2, 3]), 0.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step(0.0)
    assert not engine.still_runs() and len(engine.scheduler.requests) == 1
