"""The runner of a GPU: that graphs and padding change nothing, and that no step waits for the device in between.

On a CPU a graph is its work done again; with a GPU the real ones are compared.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import Assignment, DraftSource, Sampling, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import RunnerOutput, SchedulerOutput
from raydix.engine.model.build import make_pool
from raydix.engine.model.cuda import CudaGraphs, Graphs
from raydix.engine.model.cuda_kv_pool import PIECE_BYTES, CudaKVPool
from raydix.engine.model.cuda_runner import CudaRunner, graph_rows
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.families import config_of
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import ModelRunner, made_up_step
from raydix.engine.model.weights import RandomTensors
from tests.cuda_stand_ins import Repetition
from tests.skips import NO_GPU, NO_PRODUCT

BLOCK_SIZE = 16
MAX_LEN = 1500
NUM_BLOCKS = 400
CONFIG = config_of(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_LEN,
    }
)
CHEAP = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=1e-5)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


def make_decoder(device: str, *, deterministic: bool = False) -> Decoder:
    return Decoder(CONFIG, RandomTensors(CONFIG), torch.bfloat16, device, deterministic=deterministic)


def assignments() -> Iterator[Assignment]:
    """Short and long, greedy and sampled, with and without penalties, bias, log-probabilities and scores."""
    generator = random.Random(0)
    for index, length in enumerate((1, 15, 16, 17, 40, 300, 1100)):
        sampling = Sampling(
            max_tokens=24 + index,
            temperature=float(index % 2),
            top_p=0.9 if index % 3 else 1.0,
            seed=index,
            logprobs=3 if index % 3 == 0 else None,
            presence_penalty=0.5 if index == 4 else 0.0,
            logit_bias=((7, 2.0),) if index == 5 else (),
            prompt_logprobs=1 if index == 3 else None,
        )
        prompt = tuple(generator.randrange(512) for _ in range(length))
        yield Assignment(f"r{index}", 0, Stage.WHOLE, prompt, length, sampling, "ingress")


def answers(runner: ModelRunner, drafter: Drafter | None = None) -> list[TokenEvent]:
    """Everything that the engine says, in order."""
    limits = SchedulerLimits(token_budget=256, max_requests=5)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(runner, runner.kv_pool, pool, limits, MAX_LEN, "model", drafter=drafter)
    engine.scheduler.learn_costs(CHEAP)
    for assignment in assignments():
        engine.submit(assignment, 0.0)
    events: list[TokenEvent] = []
    while (step := engine.step(0.0)) is not None:
        events += step.events
    return events


def test_steps_with_and_without_graphs_answer_alike() -> None:
    decoder = make_decoder("cpu")
    pools = [KVPool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16) for _ in range(2)]
    graphs = Repetition()
    runner = CudaRunner(decoder, pools[0], graph_rows(5), graphs)
    assert answers(runner) == answers(ModelRunner(decoder, pools[1]))
    assert graphs.num_replays > 20
    assert torch.equal(pools[0].data, pools[1].data), "padding stores nothing"
    runner.warm_up(10_000)
    assert torch.equal(pools[0].data, pools[1].data)


def test_a_larger_budget_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16)
    runner = CudaRunner(make_decoder("cpu"), pool, (), Repetition())
    sizes: list[int] = []

    def run(output: SchedulerOutput) -> RunnerOutput:
        sizes.append(sum(chunk.num_tokens for chunk in output.chunks))
        return RunnerOutput()

    monkeypatch.setattr(runner, "run", run)
    largest: list[int | None] = []
    for budget in (64, 32, 256, 64, 256, 10_000, 20_000):
        sizes.clear()
        runner.warm_up(budget)
        largest.append(max(sizes, default=None))
    assert largest == [64, None, min(256, MAX_LEN), None, None, MAX_LEN, None]


class Known(Drafter):
    """Drafts of what the answers are known to be, every third of them wrong from somewhere on."""

    def __init__(self, events: list[TokenEvent]) -> None:
        super().__init__(DraftLimits())
        self._answers: dict[str, list[int]] = {}
        for event in events:
            if event.token_id is not None:
                self._answers.setdefault(event.request_id, []).append(event.token_id)
        self._chance = random.Random(7)

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        return [self._draft_of(request) for request in scheduler.running.values()]

    def _draft_of(self, request: Request) -> Draft:
        guess = self._answers[request.request_id][request.num_output :][: self._chance.randint(0, 6)]
        if guess and self._chance.random() < 1 / 3:
            guess[self._chance.randrange(len(guess))] ^= 1
        return Draft(request.request_id, DraftSource.REQUEST, tuple(guess), (1.0,) * len(guess))


def by_request(events: list[TokenEvent]) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities, whatever the steps were."""
    return sorted((each.request_id, each.position, each.token_id, each.logprobs, each.finish) for each in events)


def check_drafts(device: str, graphs: Graphs) -> None:
    """Steps with drafts take graphs, too, and give the bits of steps without drafts or graphs."""
    decoder = make_decoder(device, deterministic=True)
    if not decoder.has_independent_rows:
        pytest.skip(NO_PRODUCT)
    pools = [make_pool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device) for _ in range(2)]
    plain = answers(ModelRunner(decoder, pools[0]))
    runner = CudaRunner(decoder, pools[1], graph_rows(5, max_drafted=30), graphs)
    drafted = answers(runner, Known(plain))
    assert by_request(drafted) == by_request(plain)
    assert sum(event.num_accepted for event in drafted) > 40


def test_steps_with_drafts_take_graphs_and_change_no_bit() -> None:
    graphs = Repetition()
    check_drafts("cpu", graphs)
    assert graphs.num_replays > 10


@pytest.mark.gpu
@needs_gpu
def test_steps_with_drafts_change_no_bit_on_a_gpu() -> None:
    check_drafts("cuda", CudaGraphs(torch.device("cuda")))


@pytest.mark.gpu
@needs_gpu
def test_graphs_give_the_bits_of_their_work() -> None:
    """Whatever the mode: the same kernels on the same memory."""
    decoder = make_decoder("cuda")
    pool = CudaKVPool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device)
    pool.data.normal_()
    runner = CudaRunner(decoder, pool, graph_rows(64), CudaGraphs(decoder.device))
    chance = random.Random(0)
    for rows in runner.rows:
        contexts = [chance.randrange(1, MAX_LEN) for _ in range(rows)]
        chunks = [made_up_step([1], BLOCK_SIZE, start=context - 1).chunks[0] for context in contexts]
        used = runner._inputs[rows].fill(chunks, BLOCK_SIZE)
        runner._input[:used].copy_(runner._inputs[rows].host[:used])
        expected = runner._decode(rows).clone()
        assert torch.isfinite(expected).all()
        for _ in range(2):
            assert torch.equal(runner._replays[rows](), expected), rows


@pytest.mark.gpu
@needs_gpu
def test_deterministic_steps_with_and_without_graphs_answer_alike() -> None:
    decoder = make_decoder("cuda", deterministic=True)
    pools = [CudaKVPool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device) for _ in range(2)]
    rows = graph_rows(5)
    assert answers(CudaRunner(decoder, pools[0], rows, CudaGraphs(decoder.device))) == answers(
        ModelRunner(decoder, pools[1])
    )
    assert torch.equal(pools[0].data, pools[1].data)


@pytest.mark.gpu
@needs_gpu
def test_no_step_waits_for_the_device_in_between() -> None:
    """torch raises where it would wait; the one wait at the end of a step is asked for by name."""
    decoder = make_decoder("cuda")
    pool = CudaKVPool(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device)
    runner = CudaRunner(decoder, pool, graph_rows(5), CudaGraphs(decoder.device))
    answers(runner)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert answers(runner)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
def test_blocks_travel_through_pinned_memory_and_back() -> None:
    device = torch.device("cuda")
    pool = CudaKVPool(CONFIG, 8192, BLOCK_SIZE, torch.bfloat16, device)
    pool.data.normal_()
    ids = torch.randperm(8192)
    for count in (1, 3, PIECE_BYTES // pool.block_bytes, 2000):
        source, target = ids[:count].tolist(), ids[-count:].tolist()
        expected = pool.data[source].clone()
        arriving = pool.start_export(source)
        pool.data[source] = 0
        payload = arriving()
        assert torch.equal(torch.from_numpy(payload), expected.view(-1).view(torch.uint8).cpu())
        pool.import_blocks(payload, target)
        payload[:] = 0
        assert torch.equal(pool.data[target], expected)
        pool.data[source] = expected
