"""Sizes made of the machine: which well-known models start where, and that nothing computed exceeds the memory."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raydix.cli.machine import this_machine
from raydix.cli.serve import chosen, fitting
from raydix.cli.sizing import (
    GPU_CONTEXT_GIB,
    INGRESS_GIB,
    SERVER_GIB,
    WORKER_GIB,
    described,
    runs_on_gpu,
    size_up,
    sized,
)
from raydix.configs import Config, load_config
from raydix.configs.choose import ChosenConfiguration, Machine
from raydix.configs.settings import engine_settings
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import GIB, SchedulerLimits
from raydix.engine.model.build import pool_sizes, run_largest_step
from raydix.engine.model.config import LatentConfig, ModelConfig
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.device_memory import SHARE, measured_pool_bytes
from raydix.engine.model.families import config_of
from raydix.engine.model.host import host_memory
from raydix.engine.model.sizes import kv_block_bytes, pair_share, state_bytes, step_bytes, weight_bytes
from raydix.engine.model.weights import RandomTensors


def model(model_type: str, shape: tuple[int, ...], context: int, tied: bool, **more: Any) -> ModelConfig:
    """A published `config.json`, as far as sizes depend on it."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    settings = dict(zip((*names, *heads), shape, strict=True))
    ends = {"max_position_embeddings": context, "tie_word_embeddings": tied}
    return config_of({"model_type": model_type, **settings, **ends, **more})


GEMMA = {"query_pre_attn_scalar": 256, "sliding_window": 512}
MODELS = {
    "SmolLM2-135M": model("llama", (49_152, 576, 1536, 30, 9, 3, 64), 8192, True),
    "SmolLM2-360M": model("llama", (49_152, 960, 2560, 32, 15, 5, 64), 8192, True),
    "SmolLM2-1.7B": model("llama", (49_152, 2048, 8192, 24, 32, 32, 64), 8192, True),
    "Qwen2.5-0.5B": model("qwen2", (151_936, 896, 4864, 24, 14, 2, 64), 32_768, True),
    "Qwen2.5-1.5B": model("qwen2", (151_936, 1536, 8960, 28, 12, 2, 128), 32_768, True),
    "Qwen2.5-7B": model("qwen2", (152_064, 3584, 18_944, 28, 28, 4, 128), 32_768, False),
    "Qwen3-0.6B": model("qwen3", (151_936, 1024, 3072, 28, 16, 8, 128), 40_960, True),
    "Qwen3-1.7B": model("qwen3", (151_936, 2048, 6144, 28, 16, 8, 128), 40_960, True),
    "Qwen3-4B": model("qwen3", (151_936, 2560, 9728, 36, 32, 8, 128), 40_960, True),
    "Qwen3-8B": model("qwen3", (151_936, 4096, 12_288, 36, 32, 8, 128), 40_960, False),
    "Llama-3.2-1B": model("llama", (128_256, 2048, 8192, 16, 32, 8, 64), 131_072, True),
    "Llama-3.2-3B": model("llama", (128_256, 3072, 8192, 28, 24, 8, 128), 131_072, True),
    "Llama-3.1-8B": model("llama", (128_256, 4096, 14_336, 32, 32, 8, 128), 131_072, False),
    "Gemma-3-270m": model("gemma3", (262_144, 640, 2048, 18, 4, 1, 256), 32_768, True, **GEMMA),
    "Gemma-3-1b": model("gemma3", (262_144, 1152, 6912, 26, 4, 1, 256), 32_768, True, **GEMMA),
    "Mistral-7B": model("mistral", (32_768, 4096, 14_336, 32, 32, 8, 128), 32_768, False, sliding_window=None),
}
LARGE = ("Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B", "Mistral-7B")
"""Models of 7 and 8 billion parameters."""
MACHINES = {
    **{f"{gib} GiB": Machine(2, gib, free_gib=gib - 1) for gib in (8, 16, 24, 64)},
    "32 GiB, 8 cores": Machine(8, 32, free_gib=31),
    **{f"card of {gib} GiB": Machine(16, 128, (gib * 0.985,), free_gib=120) for gib in (24, 48, 80)},
    "two cards of 24 GiB": Machine(16, 128, (23.6, 23.6), free_gib=120),
}


def plan(name: str, machine: Machine, **overrides: Any) -> tuple[ChosenConfiguration, Config, int]:
    """What the start would take, with its longest request."""
    choice, config = chosen((), overrides, machine, options=_no_options())
    choice, config, sizes = fitting(choice, config, MODELS[name], machine)
    assert described(config, sizes, MODELS[name], machine)
    return choice, sized(config, sizes), sizes.max_model_len


def _no_options() -> Any:
    import argparse

    return argparse.Namespace()


def starts(name: str, machine: Machine, **overrides: Any) -> bool:
    try:
        plan(name, machine, **overrides)
    except StartupError:
        return False
    return True


def test_a_pool_in_eight_bits_holds_almost_twice_as_many_tokens() -> None:
    machine, pool = Machine(4, 64), {"pool_gib": 1}
    lengths = [plan("Qwen3-8B", machine, cache={**pool, "dtype": dtype})[2] for dtype in ("auto", "int8")]
    assert 1.9 < lengths[1] / lengths[0] < 2.0


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_what_starts_fits_into_the_memory(name: str, where: str) -> None:
    machine, found = MACHINES[where], MODELS[name]
    try:
        _, config, longest = plan(name, machine)
    except StartupError as error:
        assert "GiB for its weights" in str(error) and ("fit" in str(error) or "smaller model" in str(error))
        return
    assert 1024 <= longest <= found.max_position
    block_bytes = kv_block_bytes(found, config.cache.block_size, config.model.dtype)
    used = SERVER_GIB + config.ingress.replicas * INGRESS_GIB + config.stored_gib
    for section in config.workers.sections.values():
        on_gpu = runs_on_gpu(config, section, machine)
        own = weight_bytes(found, "bfloat16", None, on_gpu=on_gpu)
        own += step_bytes(found, section.token_budget, section.max_requests)
        if on_gpu:  # the worker measures its pool, and the longest request fits into the least that it will find
            assert own + block_bytes * longest / 16 < (min(machine.gpu_gib) * SHARE - GPU_CONTEXT_GIB) * GIB
            continue
        assert config.cache.pool_gib is not None
        assert config.cache.pool_gib * GIB >= -(-longest // 16) * block_bytes, "one request fits"
        used += WORKER_GIB + own / GIB + config.cache.pool_gib
    assert machine.free_gib is not None and used <= machine.free_gib


def test_which_models_start_where() -> None:
    """With less than their context where the memory is small; int8 halves the weights."""
    assert all(starts(name, MACHINES["64 GiB"]) for name in MODELS)
    assert all(starts(name, MACHINES["24 GiB"]) for name in MODELS)
    int8 = {"model": {"quantization": "int8"}}
    for where in ("card of 24 GiB", "card of 48 GiB", "card of 80 GiB", "two cards of 24 GiB"):
        assert all(starts(name, MACHINES[where]) for name in MODELS), where
    assert not any(starts(name, MACHINES["16 GiB"]) for name in LARGE)
    assert starts("Qwen3-4B", MACHINES["16 GiB"], **int8) and starts("Qwen3-1.7B", MACHINES["16 GiB"])
    assert starts("SmolLM2-135M", MACHINES["8 GiB"])


QWEN3_5 = model("qwen35", (248_320, 1024, 3584, 24, 8, 2, 256), 262_144, True, linear_num_value_heads=16)
"""In the shape of the 0.8B."""


def test_a_pool_with_recurrent_states_has_room_for_both() -> None:
    config, choice = load_config("cpu_mixed"), MACHINES["16 GiB"]
    sizes = size_up(config, QWEN3_5, choice)
    assert sizes.pool_gib is not None and described(config, sizes, QWEN3_5, choice)
    [section] = sized(config, sizes).workers.sections.values()
    settings = engine_settings(sized(config, sizes), section)
    num_blocks, num_slots = pool_sizes(QWEN3_5, settings, lambda: 0)
    used = num_blocks * kv_block_bytes(QWEN3_5, 16, "bfloat16") + num_slots * state_bytes(QWEN3_5)
    assert num_blocks * 16 >= sizes.max_model_len and num_slots >= 2
    assert used <= sizes.pool_gib * GIB
    assert state_bytes(QWEN3_5) == 18 * 4 * (16 * 128 * 128 + 3 * (2 * 16 * 128 + 16 * 128))


@pytest.mark.parametrize("num_blocks", [1, 64, 10_000])
def test_configured_blocks_have_recurrent_states_beside_them(num_blocks: int) -> None:
    config = load_config("cpu_mixed")
    [section] = config.workers.sections.values()
    settings = replace(engine_settings(config, section), num_blocks=num_blocks, max_model_len=16 * num_blocks)
    found, num_slots = pool_sizes(QWEN3_5, settings, lambda: 0)
    assert found == num_blocks and num_slots >= 2


def test_a_gpu_is_refused_for_recurrent_layers() -> None:
    config = load_config("cpu_mixed", {"workers": {"mixed": {"device": "cuda"}}})
    with pytest.raises(StartupError, match="Qwen3_5ForCausalLM has recurrent layers, which run on CPUs only"):
        size_up(config, QWEN3_5, MACHINES["64 GiB"])


@pytest.mark.parametrize(
    ("name", "has"), [("gemma4", "layers of different shapes"), ("stablelm", "layer norms"), ("cohere", "layer norms")]
)
def test_a_gpu_is_refused_for_layers_that_it_does_not_know(name: str, has: str) -> None:
    config = load_config("cpu_mixed", {"workers": {"mixed": {"device": "cuda"}}})
    small = model(name, (1000, 256, 256, 6, 4, 2, 64), 1024, True)
    with pytest.raises(StartupError, match=f"ForCausalLM has {has}, which run on CPUs only"):
        size_up(config, small, MACHINES["64 GiB"])


def test_published_gemma_4_has_its_size() -> None:
    """The text part of E2B: over half of its weights are embeddings of layers, and 15 of 35 layers have KV."""
    e2b = config_of(
        {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        }
    )
    tables = 2 * 262_144 * 1536 + 262_144 * 35 * 256  # one more of the head, in its own layout
    assert 1.8e9 < weight_bytes(e2b, "bfloat16", None, on_gpu=False) / 2 - tables < 2.1e9
    assert kv_block_bytes(e2b, 16, "bfloat16") == 16 * 2 * 2 * (12 * 256 + 3 * 512)
    assert pair_share(e2b) > 0


def test_experts_in_mxfp4_fit_where_they_are_kept() -> None:
    gpt_oss = config_of(
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 201_088,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    )
    machine = Machine(2, 32, free_gib=28)
    _, wide = chosen((), {}, machine, options=_no_options())
    with pytest.raises(StartupError, match=r"with model\.quantization stored requests of up to \d+ tokens fit"):
        size_up(wide, gpt_oss, machine)
    kept = wide.model_copy(update={"model": wide.model.model_copy(update={"quantization": "stored"})})
    sizes = size_up(kept, gpt_oss, machine)
    assert sizes.max_model_len > 1024 and 12 < sizes.weights_gib < 13.2


def test_adapters_are_refused_for_recurrent_layers() -> None:
    config = load_config("cpu_mixed", {"model": {"adapters": {"name": "/folder"}}})
    with pytest.raises(StartupError, match="Qwen3_5ForCausalLM has recurrent layers, which take no adapters"):
        size_up(config, QWEN3_5, MACHINES["64 GiB"])


def test_a_model_with_states_runs_on_prefill_and_decode_workers() -> None:
    machine = MACHINES["32 GiB, 8 cores"]
    choice, config = chosen((), {}, machine, options=_no_options())
    _, config, sizes = fitting(choice, config, QWEN3_5, machine)
    assert [*config.workers.sections] == ["prefill", "decode"] and sizes.max_model_len == QWEN3_5.max_position


def test_experts_count_with_all_their_weights_and_run_on_cpus_only() -> None:
    moe = model("qwen3moe", (151_936, 2048, 6144, 48, 32, 4, 128), 40_960, False)
    assert 30.4e9 < weight_bytes(moe, "bfloat16", None, on_gpu=False) / 2 < 30.7e9
    assert 15.4e9 < weight_bytes(moe, "bfloat16", "int8", on_gpu=False) / 2 < 15.6e9
    _, on_gpu = chosen((), {}, MACHINES["card of 80 GiB"], options=_no_options())
    with pytest.raises(StartupError, match="Qwen3MoeForCausalLM has experts, which run on CPUs only"):
        size_up(on_gpu, moe, MACHINES["card of 80 GiB"])
    large = Machine(16, 512, free_gib=500)
    _, on_cpu = chosen((), {}, large, options=_no_options())
    assert size_up(on_cpu, moe, large).max_model_len == 40_960


def test_experts_for_every_token_count_too_and_layers_that_only_draft_do_not() -> None:
    """The published GLM-4.5 Air."""
    moe = model(
        "glm4_moe", (151_552, 4096, 10_944, 46, 96, 8, 128), 131_072, False, attention_bias=True, n_routed_experts=128
    )
    assert 106.8e9 < weight_bytes(moe, "bfloat16", None, on_gpu=False) / 2 < 107.1e9
    assert moe.draft_layers == 1


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536, "first_k_dense_replace": 3}
DEEPSEEK_V3 = model("deepseek_v3", (129_280, 7168, 18_432, 61, 128, 128, 64), 163_840, False, **LATENT)


def test_latents_are_all_that_is_kept_of_a_position() -> None:
    """The published DeepSeek V3: 512 numbers and a rotated key of 64 in each layer, for 128 heads."""
    assert 670.9e9 < weight_bytes(DEEPSEEK_V3, "bfloat16", None, on_gpu=False) / 2 < 671.3e9
    assert kv_block_bytes(DEEPSEEK_V3, 16, "bfloat16") == 16 * 61 * 576 * 2
    assert kv_block_bytes(DEEPSEEK_V3, 16, "int8") == 16 * 61 * (576 + 4)


def test_latents_run_on_cpus_and_take_no_adapters() -> None:
    latents = replace(DEEPSEEK_V3, experts=None)
    _, on_gpu = chosen((), {}, MACHINES["card of 80 GiB"], options=_no_options())
    with pytest.raises(StartupError, match="has latents in the place of KV, which run on CPUs only"):
        size_up(on_gpu, latents, MACHINES["card of 80 GiB"])
    with pytest.raises(StartupError, match="attention through latents, which takes no adapters"):
        latents.check_takes_adapters()


def test_what_a_latent_costs_by_the_model_s_arithmetic() -> None:
    latent = LatentConfig(rank=32, rope_dim=16, nope_dim=24, value_dim=20, query_rank=None)
    plain = replace(model("llama", (100, 64, 128, 2, 4, 1, 48), 1024, True), latent=latent)
    inputs = (4 * (24 + 16) + 32 + 16) * 64
    token = inputs + 4 * 32 * (24 + 20) + 4 * 20 * 64 + 3 * 128 * 64
    assert pair_share(plain) == pytest.approx(4 * (32 + 16 + 32) / token)


def test_what_a_context_costs_by_the_model_s_arithmetic() -> None:
    plain = model("llama", (100, 64, 128, 2, 4, 2, 16), 1024, True)
    pair, token = 2 * 4 * 16, 2 * (4 * 16 + 2 * 16) * 64 + 3 * 128 * 64
    assert pair_share(plain) == pytest.approx(pair / token)
    windowed = replace(plain, layer_windows=(None, 64))
    assert pair_share(windowed) == pytest.approx(pair / token / 2), "half of the layers look at all that is before"


def test_the_context_is_lowered_to_what_fits() -> None:
    small = plan("Qwen3-8B", MACHINES["card of 24 GiB"])[2]
    assert 8192 <= small < 40_960
    assert plan("Qwen3-8B", MACHINES["card of 80 GiB"])[2] == 40_960
    assert plan("Qwen3-0.6B", MACHINES["24 GiB"])[2] == 40_960
    assert plan("Llama-3.2-1B", MACHINES["64 GiB"])[2] == 131_072
    assert plan("Llama-3.2-1B", MACHINES["24 GiB"])[2] == 131_072, "more than half of the memory where it needs more"


def test_one_worker_where_two_have_no_room() -> None:
    choice, config, _ = plan("Qwen2.5-7B", Machine(8, 32, free_gib=30))
    assert choice.config == "cpu_mixed" and "two workers" in choice.reason
    assert tuple(config.workers.sections) == ("mixed",)
    assert plan("SmolLM2-135M", MACHINES["32 GiB, 8 cores"])[0].config == "cpu"


def test_constants_stand() -> None:
    machine = MACHINES["24 GiB"]
    config = plan("Qwen3-0.6B", machine, cache={"pool_gib": 2.0})[1]
    assert config.cache.pool_gib == 2.0 and config.model.max_model_len == 2 * GIB // (16 * 114_688) * 16
    assert plan("Qwen3-0.6B", machine, model={"max_model_len": 5000})[2] == 5000
    assert plan("Qwen3-0.6B", machine, cache={"num_blocks": 100})[2] == 1600
    with pytest.raises(StartupError, match=r"holds 1600 tokens, but one request may have 5000: raise cache\.pool_gib"):
        plan("Qwen3-0.6B", machine, cache={"num_blocks": 100}, model={"max_model_len": 5000})
    for text in ("auto", None):
        given = load_config("cpu", {"model": {"max_model_len": text}, "cache": {"pool_gib": text}})
        assert (given.model.max_model_len, given.cache.pool_gib) == (None, None)


@pytest.mark.parametrize(
    ("name", "gib", "model", "says"),
    [
        ("Qwen3-8B", 20, {}, "with model.quantization int8 requests of up to"),
        ("Qwen3-8B", 9, {}, "take a smaller model, or a machine with more memory"),
        ("Llama-3.2-1B", 12, {"max_model_len": 131_072}, "model.max_model_len of at most"),
    ],
)
def test_a_refusal_says_what_would_run(name: str, gib: float, model: dict[str, Any], says: str) -> None:
    machine = Machine(2, gib + 1, free_gib=gib)
    with pytest.raises(StartupError, match=says) as caught:
        plan(name, machine, model=model)
    words = str(caught.value).split()
    if "at most" in says:  # what it says is true
        assert starts(name, machine, model={"max_model_len": int(words[words.index("most") + 1])})
    if "int8" in says:
        assert starts(name, machine, model={"quantization": "int8"})


def test_a_worker_that_nobody_sized_says_what_would_fit() -> None:
    """As under `raydix deploy` and KubeRay, which size nothing: what the refusal names starts."""
    config, described_model = load_config("cpu_mixed"), MODELS["Qwen3-0.6B"]
    [section] = config.workers.sections.values()
    settings = replace(engine_settings(config, section), pool_gib=None, num_blocks=None, max_model_len=None)
    with pytest.raises(StartupError, match=r"it needs a pool of 4\.38 GiB, or set model\.max_model_len to 9360$"):
        pool_sizes(described_model, settings, lambda: GIB)
    assert pool_sizes(described_model, replace(settings, max_model_len=9360), lambda: GIB)[0] == 9360 // 16
    assert pool_sizes(described_model, settings, lambda: int(4.38 * GIB))[0] * 16 >= 40_960
    with pytest.raises(StartupError, match=r"holds 0 tokens, .* it needs a pool of 4\.38 GiB$"):
        pool_sizes(described_model, settings, lambda: 0)


def test_more_than_the_context_is_refused() -> None:
    with pytest.raises(StartupError, match="the model's context has 8192"):
        plan("SmolLM2-135M", MACHINES["64 GiB"], model={"max_model_len": 9000})


# Measured by a worker


@dataclass
class Device:
    """A GPU in numbers: `others` is CUDA's context and other processes."""

    capacity: int
    others: int
    held: int = 0
    highest: int = 0
    kept: int = 0
    """Taken by this process for tensors, and not given back."""
    calls: list[str] = field(default_factory=list)

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.highest, self.kept = max(self.highest, self.held), max(self.kept, self.held)
        assert self.others + self.kept <= self.capacity, "out of memory"

    def total(self) -> int:
        return self.capacity

    def free(self) -> int:
        return self.capacity - self.others - self.kept

    def reserved(self) -> int:
        return self.kept

    def peak(self) -> int:
        return self.highest

    def begin(self) -> None:
        self.kept = self.highest = self.held

    def release(self) -> None:
        self.kept = self.held


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(("weights", "trial", "activations", "others"), [(15, 1, 2, 1), (30, 0, 3, 0), (5, 2, 1, 4)])
def test_a_gpu_s_pool_has_what_is_left(weights: int, trial: int, activations: int, others: int, share: float) -> None:
    device = Device(80 * GIB, others * GIB)
    device.take(weights * GIB)

    def step() -> int:
        device.take((trial + activations) * GIB)
        device.held -= (trial + activations) * GIB
        return trial * GIB

    pool = measured_pool_bytes(device, step, share)
    assert pool == int(SHARE * share * 80 * GIB) - (weights + activations + others) * GIB
    if pool > 0:
        device.take(pool + activations * GIB)
        assert device.free() >= int((1 - SHARE) * 80 * GIB) - 1


def test_the_largest_step_runs_over_a_pool_that_is_told() -> None:
    """The real runner and decoder, on a CPU: 100 tokens are 7 blocks."""
    tiny = model("qwen3", (300, 64, 64, 2, 2, 1, 32), 512, True)
    decoder = Decoder(tiny, RandomTensors(tiny), torch.float32)
    config = load_config("cpu_mixed", {"model": {"dtype": "float32"}})
    assert config.workers.mixed is not None
    settings = replace(engine_settings(config, config.workers.mixed), limits=SchedulerLimits(100, 16))
    assert run_largest_step(decoder, settings) == 7 * kv_block_bytes(tiny, 16, "float32")


# Of a container


def test_a_limit_of_a_container_counts_as_the_machine_s_memory(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/pods/mine\n5:cpu,memory:/pods/mine\n")
    second, first = tmp_path / "two", tmp_path / "one"
    whole = host_memory(tmp_path / "none", own)
    (second / "pods" / "mine").mkdir(parents=True)
    (second / "pods" / "memory.max").write_text(f"{GIB}\n")
    (second / "pods" / "memory.current").write_text(f"{GIB // 2}\n")
    (second / "pods" / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 4}\n")
    (second / "pods" / "mine" / "memory.max").write_text("max\n")
    assert host_memory(second, own) == (GIB, GIB - GIB // 4), "the cache of files can be dropped"

    folder = first / "memory" / "pods" / "mine"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    assert host_memory(first, own) == (2 * GIB, GIB)
    machine = this_machine(first, own)
    assert (machine.memory_gib, machine.free_gib) == (2, 1)

    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none, as version 1 says it
    assert host_memory(first, own).total == whole.total


def test_sizes_of_a_null_model_need_nothing() -> None:
    config = load_config("cpu_mixed", {"cache": {"num_blocks": 4}, "model": {"max_model_len": 64}})
    assert size_up(config, MODELS["SmolLM2-135M"], MACHINES["24 GiB"]).max_model_len == 64
