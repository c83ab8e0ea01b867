"""Rows with an adapter are what PEFT makes of them, and the same bits whatever happened around their request."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.tenants import salt_of
from raydix.engine.core.types import Adapter, Assignment, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.model.adapter_store import AdapterStore
from raydix.engine.model.adapters import identify_adapter
from raydix.engine.model.build import make_pool, make_runner
from raydix.engine.model.decoder import Decoder, ForwardBatch
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.lora import Lora, LoraRows
from raydix.engine.model.tokenizer import quiet_transformers
from tests.model.random_adapters import ATTENTION, EVERY, write_adapter
from tests.model.random_models import reference
from tests.model.test_cuda_runner import needs_gpu
from tests.model.test_exactness import BLOCK_SIZE, Output, assignment, run
from tests.skips import NO_PEFT, NO_PRODUCT

PROMPT = tuple(torch.randint(1, 200, (70,), generator=torch.Generator().manual_seed(1)).tolist())
OF_FAMILIES = {
    "llama 3": EVERY,
    "qwen 2.5": EVERY,  # biases
    "gemma 2": EVERY,  # norms behind the products
    "phi 3": EVERY,  # fused projections
    "helium": EVERY,  # heads in another order
    "glm 4": EVERY,  # both
    "command r": EVERY,  # attention and MLP side by side
    "granite": EVERY,  # multipliers
    "olmo 2": EVERY,  # norms over all heads
    "qwen 3 moe": ATTENTION,
}


def logits(decoder: Decoder, token_ids: list[int], loras: Mapping[int, Lora], chunk: int = 40) -> Tensor:
    """Logits of every position of a sequence, in chunks; `loras`: the adapter of each position that has one."""
    pool = KVPool(decoder.config, len(token_ids) // BLOCK_SIZE + 1, BLOCK_SIZE, decoder.dtype)
    parts = []
    for start in range(0, len(token_ids), chunk):
        positions = torch.arange(start, min(start + chunk, len(token_ids)))
        groups = []
        for lora in {id(lora): lora for lora in loras.values()}.values():
            rows = torch.tensor([i for i, at in enumerate(positions.tolist()) if loras.get(at) is lora])
            groups.append(LoraRows(lora, rows.long(), rows.long()))
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids)[positions],
            positions=positions,
            slot_mapping=positions,
            block_tables=torch.arange(pool.num_blocks, dtype=torch.int32)[None],
            query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
            context_lens=torch.tensor([int(positions[-1]) + 1], dtype=torch.int32),
            logits_rows=torch.arange(len(positions)),
            loras=tuple(groups),
        )
        parts.append(decoder.forward(batch, pool))
    return torch.cat(parts)


def everywhere(lora: Lora) -> dict[int, Lora]:
    return dict.fromkeys(range(len(PROMPT)), lora)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    return float(error.max())


@pytest.mark.parametrize("case", OF_FAMILIES)
def test_an_adapter_adds_its_product_to_the_weights(case: str, tmp_path: Path) -> None:
    """The same logits as those of a model whose weights were changed before it was loaded."""
    reference(case, tmp_path / "model")
    decoder = Decoder.from_folder(tmp_path / "model", torch.float32, "cpu")
    added = write_adapter(tmp_path / "adapter", decoder.config, 1, rank=3, targets=OF_FAMILIES[case])
    lora = decoder.load_lora(tmp_path / "adapter")

    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    changed = {name: weights[name] + difference for name, difference in added.items()}
    save_file({**weights, **changed}, file, metadata={"format": "pt"})
    merged = logits(Decoder.from_folder(tmp_path / "model", torch.float32, "cpu"), list(PROMPT), {})

    assert relative_error(logits(decoder, list(PROMPT), everywhere(lora)), merged) < 1e-4
    assert relative_error(logits(decoder, list(PROMPT), {}), merged) > 0.1, "it changes something"


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama 3", {"r": 8, "lora_alpha": 12}),
        ("llama 3", {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
        ("qwen 2.5", {"r": 4, "rank_pattern": {"o_proj": 6}, "alpha_pattern": {"layers.1.self_attn.k_proj": 40}}),
        ("phi 3", {"r": 5, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
        ("gemma 3", {"r": 4, "layers_to_transform": [0, 2]}),
    ],
)
def test_what_peft_writes_is_what_peft_computes(case: str, settings: dict[str, object], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    reference(case, tmp_path / "model")
    options = {"target_modules": [name for name in EVERY if name not in ("qkv_proj", "gate_up_proj")], **settings}
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=0.2)
        with torch.inference_mode():
            expected = model.eval()(torch.tensor([PROMPT])).logits[0]
            with model.disable_adapter():
                plain = model(torch.tensor([PROMPT])).logits[0]
        model.save_pretrained(tmp_path / "adapter")

    decoder = Decoder.from_folder(tmp_path / "model", torch.float32, "cpu")
    lora = decoder.load_lora(tmp_path / "adapter")
    assert relative_error(logits(decoder, list(PROMPT), everywhere(lora)), expected) < 1e-4
    assert relative_error(plain, expected) > 0.05


CUDA = [pytest.mark.gpu, needs_gpu]
FAMILIES_BY_DEVICE = [pytest.param(case, "cpu", id=case) for case in OF_FAMILIES] + [
    pytest.param(case, "cuda", id=f"cuda {case}", marks=CUDA)
    for case in OF_FAMILIES
    if case not in ("qwen 3 moe", "command r")  # experts and layer norms run on CPUs only
]


class Machine:
    """A decoder with adapters, and engines of it."""

    def __init__(self, case: str, folder: Path, num_adapters: int, device: str = "cpu") -> None:
        reference(case, folder / "model")
        self.decoder = Decoder.from_folder(folder / "model", torch.bfloat16, device, deterministic=True)
        if not self.decoder.has_independent_rows:
            pytest.skip(NO_PRODUCT)
        self.store = AdapterStore(self.decoder)
        self.adapters: list[Adapter] = []
        for number in range(num_adapters):
            at = folder / f"adapter-{number}"
            write_adapter(at, self.decoder.config, number, rank=3 + number, targets=OF_FAMILIES[case])
            self.adapters.append(self.store.load(f"adapter-{number}", str(at)))

    def engine(self, *, budget: int = 512, num_blocks: int = 100, drafter: Drafter | None = None) -> Engine:
        store = make_pool(self.decoder.config, num_blocks, BLOCK_SIZE, torch.bfloat16, self.decoder.device)
        limits = SchedulerLimits(budget, 16)
        runner = make_runner(self.decoder, store, limits, adapters=self.store)
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        return Engine(runner, store, pool, limits, 100, "model", drafter=drafter, adapters=self.store)


def ask(name: str, adapter: Adapter | None, prompt: tuple[int, ...] = PROMPT, stage: Stage = Stage.WHOLE) -> Assignment:
    salt = salt_of("tenant", None, len(prompt), adapter=b"" if adapter is None else adapter.digest)
    return replace(assignment(name, prompt, 20), salt=salt, adapter=adapter, stage=stage)


@pytest.mark.parametrize(("case", "device"), FAMILIES_BY_DEVICE)
def test_the_same_bits(case: str, tmp_path: Path, device: str) -> None:
    """Of the model alone and of each adapter: cold, from the cache, in chunks, in a batch, preempted, with drafts."""
    machine = Machine(case, tmp_path, 3, device)
    asked = {"none": None, **{adapter.name: adapter for adapter in machine.adapters}}
    cold: dict[str, Output] = {}
    for name, adapter in asked.items():
        cold |= run(machine.engine(), [ask(name, adapter)])
    assert len({str(output) for output in cold.values()}) == len(cold), "each says something else"

    every = [ask(name, adapter) for name, adapter in asked.items()]
    engine = machine.engine()
    assert run(engine, every) == cold, "in a batch"
    assert run(engine, every) == cold, "from the cache"
    assert run(machine.engine(budget=24), every) == cold, "in chunks"

    crowded = machine.engine(num_blocks=15)
    crowded.scheduler.swap_policy.costs = WorkerCosts(swap_s=0.0, swap_byte_s=0.0)
    assert run(crowded, every) == cold
    assert crowded.preemptions.num_recomputed > 0

    drafting = machine.engine(drafter=Drafter(DraftLimits()))
    run(drafting, every)
    for each in every:
        drafting.submit(each, 0.0)
    drafted: dict[str, Output] = {}
    num_drafted = 0
    while (step := drafting.step(0.0)) is not None:
        for event in step.events:
            drafted.setdefault(event.request_id, []).append((event.token_id, event.logprobs))  # type: ignore[arg-type]
        num_drafted += step.shape.num_draft_tokens
    assert drafted == cold, "with drafts"
    assert num_drafted > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_prefilled_by_one_engine_and_decoded_by_another(tmp_path: Path, device: str) -> None:
    machine = Machine("llama 3", tmp_path, 2, device)
    for adapter in machine.adapters:
        whole = ask("ours", adapter)
        cold = run(machine.engine(), [whole])["ours"]
        prefill, decode = machine.engine(budget=24), machine.engine()
        prefill.submit(replace(whole, stage=Stage.PREFILL), 0.0)
        decode.submit(replace(whole, stage=Stage.DECODE), 0.0)
        outputs: list[tuple[object, object]] = []
        while (step := prefill.step(0.0)) is not None:
            outputs += [(event.token_id, event.logprobs) for event in step.events]
            for segment in map(ExportedSegment.arrived, step.segments):
                assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
        num_computed = 0
        while (step := decode.step(0.0)) is not None:
            outputs += [(event.token_id, event.logprobs) for event in step.events]
            num_computed += step.shape.num_prefill_tokens
        assert outputs == cold
        assert num_computed == 0, "nothing of the prompt is computed twice"


def test_nothing_is_hit_that_was_computed_with_another_adapter(tmp_path: Path) -> None:
    """The prompt is public, so that all tenants and salts would share its blocks."""
    machine = Machine("llama 3", tmp_path, 2)
    engine = machine.engine()
    asked = (None, *machine.adapters)

    def num_cached(adapter: Adapter | None) -> list[int]:
        engine.submit(ask("ours", adapter), 0.0)
        events = list[TokenEvent]()
        while (step := engine.step(0.0)) is not None:
            events += step.events
        return sorted({event.cached_tokens for event in events})

    assert [num_cached(adapter) for adapter in asked] == [[0], [0], [0]]
    assert [num_cached(adapter) for adapter in asked] == [[len(PROMPT) - 1]] * 3


def test_a_request_whose_adapter_is_missing_is_not_taken(tmp_path: Path) -> None:
    machine = Machine("llama 3", tmp_path, 1)
    engine = machine.engine()
    with pytest.raises(LookupError, match="elsewhere"):
        engine.submit(ask("ours", Adapter("elsewhere", "/elsewhere", b"e" * 16)), 0.0)
    assert run(engine, [ask("none", None)])["none"], "and others go on"


def test_an_adapter_comes_and_goes_while_others_run(tmp_path: Path) -> None:
    """Loading and freeing one changes no bit of another, and the KV of one that comes again is hit."""
    machine = Machine("llama 3", tmp_path, 1)
    [resident] = machine.adapters
    write_adapter(tmp_path / "late", machine.decoder.config, 7, rank=5, targets=EVERY)
    late = identify_adapter("late", str(tmp_path / "late"), machine.decoder.config)
    asked = {"resident": ask("resident", resident), "late": ask("late", late)}
    machine.store.add(late)
    cold = {name: run(machine.engine(), [each])[name] for name, each in asked.items()}
    machine.store.drop(late.digest)
    assert late.digest not in machine.store
    num_loras = num_alive(Lora)

    engine, outputs = machine.engine(budget=24), dict[str, Output]()

    def step() -> bool:
        done = engine.step(0.0)
        for event in () if done is None else done.events:
            outputs.setdefault(event.request_id, []).append((event.token_id, event.logprobs))  # type: ignore[arg-type]
        return done is not None

    engine.submit(asked["resident"], 0.0)
    step()
    machine.store.add(late)
    engine.submit(asked["late"], 0.0)
    while step():
        is_left = engine.scheduler.requests.get("late") is not None
        assert engine.drop_adapter(late.digest, 0.0) is not is_left
    assert outputs == cold
    assert late.digest not in machine.store and num_alive(Lora) == num_loras, "its memory is free"
    assert engine.drop_adapter(resident.digest, 0.0) and resident.digest in machine.store, "it is configured"
    with pytest.raises(LookupError, match="late"):
        engine.submit(asked["late"], 0.0)

    machine.store.add(late)
    assert run(engine, [asked["late"]])["late"] == cold["late"]


def num_alive(kind: type) -> int:
    """Objects of a class that something still refers to."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def test_work_that_nobody_waits_for_holds_no_adapter(tmp_path: Path) -> None:
    machine = Machine("llama 3", tmp_path, 0)
    write_adapter(tmp_path / "late", machine.decoder.config, 7, targets=EVERY)
    late = identify_adapter("late", str(tmp_path / "late"), machine.decoder.config)
    machine.store.add(late)
    engine = machine.engine(budget=24)
    idle = ask("idle", late)
    engine.submit(replace(idle, is_idle=True, sampling=replace(idle.sampling, max_tokens=0)), 0.0)
    assert engine.drop_adapter(late.digest, 0.0) and late.digest not in machine.store
    assert engine.step(0.0) is None
    engine.scheduler.check_integrity()


def test_an_activated_adapter_is_what_peft_computes(tmp_path: Path) -> None:
    """From the last place of its invocation on; without one the model alone."""
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    reference("llama 3", tmp_path / "model")
    invocation = [199, 198]
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        targets = [name for name in EVERY if name not in ("qkv_proj", "gate_up_proj")]
        options = peft.LoraConfig(
            r=4, target_modules=targets, alora_invocation_tokens=invocation, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, options)
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(tmp_path / "adapter")
        model.eval()

    decoder = Decoder.from_folder(tmp_path / "model", torch.float32, "cpu")
    lora = decoder.load_lora(tmp_path / "adapter")
    adapter = identify_adapter("a", str(tmp_path / "adapter"), decoder.config)
    assert adapter.invocation == tuple(invocation)
    for prompt in ([*PROMPT[:20], *invocation, *PROMPT[20:45], *invocation, *PROMPT[45:]], list(PROMPT)):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        begins_at = adapter.begins_at(prompt)
        assert begins_at == (47 if len(prompt) > len(PROMPT) else None)
        rows = range(len(prompt) if begins_at is None else begins_at, len(prompt))
        actual = logits(decoder, prompt, dict.fromkeys(rows, lora))
        assert relative_error(actual, expected) < 1e-4
        if begins_at is not None:
            assert relative_error(logits(decoder, prompt, {}), expected) > 0.05


@pytest.mark.parametrize("case", ["llama 3", "qwen 3 moe"])
def test_an_activated_adapter_has_the_same_bits_behind_the_models_own_kv(case: str, tmp_path: Path) -> None:
    machine = Machine(case, tmp_path, 1)
    invocation = [199, 198]
    settings = {"alora_invocation_tokens": invocation}
    write_adapter(tmp_path / "a", machine.decoder.config, 5, targets=OF_FAMILIES[case], settings=settings)
    activated = machine.store.load("activated", str(tmp_path / "a"))
    [other] = machine.adapters
    prompt = (*PROMPT[:60], *invocation, *PROMPT[60:])

    def invoked(name: str) -> Assignment:
        salt = salt_of("tenant", None, len(prompt), adapter=activated.digest, num_plain_tokens=60)
        return replace(ask(name, activated, prompt), salt=salt)

    every = [invoked("activated"), ask("plain", None, prompt), ask("other", other, prompt)]
    cold: dict[str, Output] = {}
    for each in every:
        cold |= run(machine.engine(), [each])
    assert len({str(output) for output in cold.values()}) == 3, "each says something else"
    assert run(machine.engine(), every) == cold, "in a batch"
    for budget in (7, 24, 61):
        assert run(machine.engine(budget=budget), every) == cold, "in chunks"

    def num_cached(engine: Engine, each: Assignment) -> int:
        engine.submit(each, 0.0)
        events = list[TokenEvent]()
        while (step := engine.step(0.0)) is not None:
            events += step.events
        assert [(event.token_id, event.logprobs) for event in events] == cold[each.request_id]
        return events[0].cached_tokens

    shared = 60 // BLOCK_SIZE * BLOCK_SIZE
    engine = machine.engine()
    assert [num_cached(engine, each) for each in every] == [0, shared, 0], "the model has its beginning"
    engine = machine.engine()
    assert [num_cached(engine, each) for each in every[1:]] == [0, 0]
    assert num_cached(engine, every[0]) == shared, "and it has the model's"
    assert num_cached(engine, every[0]) == len(prompt) - 1

    prefill, decode = machine.engine(budget=24), machine.engine()
    prefill.submit(replace(every[0], stage=Stage.PREFILL), 0.0)
    decode.submit(replace(every[0], stage=Stage.DECODE), 0.0)
    outputs: list[tuple[object, object]] = []
    while (step := prefill.step(0.0)) is not None:
        outputs += [(event.token_id, event.logprobs) for event in step.events]
        for segment in map(ExportedSegment.arrived, step.segments):
            assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    while (step := decode.step(0.0)) is not None:
        outputs += [(event.token_id, event.logprobs) for event in step.events]
        assert step.shape.num_prefill_tokens == 0
    assert outputs == cold["activated"], "handed over"
