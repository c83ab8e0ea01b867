"""Qwen 2 and 3, Qwen 3 Next, and Qwen 3.5, each with and without experts."""

from dataclasses import replace

from raydix.engine.model.config import DeltaConfig, ExpertsConfig, ModelConfig, RecurrentConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of, layer_windows

QWEN2_DEFAULTS = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "max_window_layers": 28}


def qwen(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as Qwen 2 and 3 are alike."""
    plain = decoder(settings)
    if not settings.get("use_sliding_window"):
        return plain
    window = settings.stated.get("sliding_window", 4096)  # null: none
    windows = layer_windows(settings, window, lambda index: index >= int(settings["max_window_layers"]))
    return replace(plain, layer_windows=windows)


def _qwen2(settings: Settings) -> ModelConfig:
    return replace(qwen(settings), attention_bias=True, attention_output_bias=False)


# Qwen 2 and 2.5: queries, keys and values have a bias; layers have a window only if `use_sliding_window` says so.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    title="Qwen 2 and 2.5",
    sizes={"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.8, "32B": 32.8, "72B": 72.7},
    also=("qwen2vl", "qwen25vl", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    gguf_name="qwen2",
    defaults=QWEN2_DEFAULTS,
    describe=_qwen2,
)


def _qwen3(settings: Settings) -> ModelConfig:
    return replace(qwen(settings), qk_norm=True)


# Qwen 3: queries and keys pass a norm.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    title="Qwen 3",
    sizes={"0.6B": 0.6, "1.7B": 1.72, "4B": 4.02, "8B": 8.19, "14B": 14.8, "32B": 32.8},
    also=("qwen3vl",),
    gguf_name="qwen3",
    defaults={**QWEN2_DEFAULTS, "head_dim": 128},
    describe=_qwen3,
)


def _experts(settings: Settings) -> ExpertsConfig:
    """The experts of all layers but those that the configuration leaves out."""
    step, dense = int(settings["decoder_sparse_step"]), settings.get("mlp_only_layers") or []
    layers = [index for index in range(int(settings["num_hidden_layers"])) if (index + 1) % step == 0]
    return experts_of(settings, layers=[index for index in layers if index not in dense])


def _qwen2_moe(settings: Settings) -> ModelConfig:
    return replace(_qwen2(settings), attention_bias=bool(settings["qkv_bias"]), experts=_experts(settings))


# Qwen 2 with experts: beside those of its router a token goes through one that is everybody's, behind a gate.
QWEN2_MOE = Family(
    model_type="qwen2moe",
    architecture="Qwen2MoeForCausalLM",
    title="Qwen 1.5 and 2 MoE",
    sizes={"A2.7B": 14.3, "57B-A14B": 57.4},
    gguf_name="qwen2moe",
    defaults={
        **QWEN2_DEFAULTS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    describe=_qwen2_moe,
)


def _qwen3_moe(settings: Settings) -> ModelConfig:
    return replace(QWEN3.describe(settings), experts=_experts(settings))


# Qwen 3 with experts: 128 small ones, of which each token takes 8.
QWEN3_MOE = Family(
    model_type="qwen3moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen 3 MoE",
    sizes={"30B-A3B": 30.5, "235B-A22B": 235.1},
    gguf_name="qwen3moe",
    defaults={
        **QWEN2_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    describe=_qwen3_moe,
)


def recurrent_layers(settings: Settings) -> tuple[int, ...]:
    """Indices of the layers that `layer_types` calls linear attention; without this key all but every fourth one, or
    another one by `full_attention_interval`."""
    num_layers, interval = int(settings["num_hidden_layers"]), int(settings["full_attention_interval"])
    kinds = settings.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {num_layers}")
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}")
    return tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention")


def _hybrid(settings: Settings, *, is_fused: bool = False) -> ModelConfig:
    """Describe the decoder as far as Qwen 3 Next and 3.5 are alike. `is_fused`: as `DeltaConfig.is_fused`."""
    layers = recurrent_layers(settings)
    num_key_heads, num_value_heads = (int(settings[f"linear_num_{each}_heads"]) for each in ("key", "value"))
    if num_value_heads % num_key_heads:
        raise ValueError(f"{num_value_heads} heads of values cannot share {num_key_heads} of keys")
    delta = DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=int(settings["linear_key_head_dim"]),
        value_dim=int(settings["linear_value_head_dim"]),
        is_fused=is_fused,
    )
    recurrent = RecurrentConfig(
        layers=layers,
        kernel_size=int(settings["linear_conv_kernel_dim"]),
        channels=delta.channels,
        memory=delta,
    )
    return replace(
        decoder(settings),
        qk_norm=True,
        norm_offset=1.0,
        attention_gate=True,
        recurrent=recurrent if layers else None,
    )


# Values that the `config.json` of Qwen 3 Next or 3.5 may leave out.
HYBRID_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

# Qwen 3.5: of four layers three have a recurrent state (gated DeltaNet), the others attention behind a gate. Norms
# store one less than what they multiply by, except the one behind the recurrence.
QWEN3_5 = Family(
    model_type="qwen35",
    architecture="Qwen3_5ForCausalLM",
    title="Qwen 3.5, dense",
    sizes={"0.8B": 0.8, "2B": 2.0, "4B": 4.0, "9B": 9.0, "27B": 27.0},
    also=("Qwen3_5ForConditionalGeneration",),
    defaults={**HYBRID_DEFAULTS, "num_key_value_heads": 4},
    describe=_hybrid,
)

HYBRID_EXPERTS = {
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_key_value_heads": 2,
}


def _qwen3_next(settings: Settings) -> ModelConfig:
    return replace(_hybrid(settings, is_fused=True), experts=_experts(settings))


# Qwen 3 Next: layers as Qwen 3.5's, 512 small experts, and one that is everybody's.
QWEN3_NEXT = Family(
    model_type="qwen3next",
    architecture="Qwen3NextForCausalLM",
    title="Qwen 3 Next",
    sizes={"80B-A3B": 80.0},
    defaults={**HYBRID_DEFAULTS, **HYBRID_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
    describe=_qwen3_next,
)


def _qwen3_5_moe(settings: Settings) -> ModelConfig:
    return replace(_hybrid(settings), experts=_experts(settings))


# Qwen 3.5 with experts, 256 small ones, and one that is everybody's.
QWEN3_5_MOE = Family(
    model_type="qwen35moe",
    architecture="Qwen3_5MoeForCausalLM",
    title="Qwen 3.5 and 3.6 MoE",
    sizes={"35B-A3B": 35.0, "122B-A10B": 122.0, "397B-A17B": 397.0},
    also=("Qwen3_5MoeForConditionalGeneration",),
    defaults={**HYBRID_DEFAULTS, **HYBRID_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
    describe=_qwen3_5_moe,
)
