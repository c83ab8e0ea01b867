"""Llama, and families that differ from it in some points."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.olmo import POST_NORMS
from raydix.engine.model.families.parts import decoder, interleaved, layer_windows, rope_parameters


def _llama(settings: Settings) -> ModelConfig:
    return replace(decoder(settings), mlp_bias=bool(settings["mlp_bias"]))


# Llama 1 to 3, and the many models of their architecture.
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    title="Llama 2 and 3, SmolLM 2, and others of their form",
    sizes={
        "SmolLM2 135M": 0.135,
        "Llama 3.2 1B": 1.24,
        "SmolLM2 1.7B": 1.71,
        "Llama 3.2 3B": 3.21,
        "Llama 3.1 8B": 8.03,
        "Llama 3.3 70B": 70.6,
    },
    gguf_name="llama",
    defaults={"max_position_embeddings": 2048},
    describe=_llama,
)


def _smollm3(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    interval = int(settings["no_rope_layer_interval"])
    # One for a layer that is rotated, zero for one that is not.
    rotated = settings.get("no_rope_layers") or [(index + 1) % interval for index in range(plain.num_layers)]
    window = settings.get("sliding_window") if settings.get("use_sliding_window") else None
    return replace(
        plain,
        mlp_bias=bool(settings["mlp_bias"]),
        layers_without_rope=tuple(index for index in range(plain.num_layers) if not rotated[index]),
        layer_windows=layer_windows(settings, window, lambda index: not rotated[index]),
    )


# SmolLM 3: every fourth layer is not rotated, so its attention knows no positions.
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    title="SmolLM 3",
    sizes={"3B": 3.08},
    gguf_name="smollm3",
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    describe=_smollm3,
)


def _seed_oss(settings: Settings) -> ModelConfig:
    output_bias = bool(settings.get("attention_out_bias"))
    return replace(decoder(settings), attention_output_bias=output_bias, mlp_bias=bool(settings["mlp_bias"]))


# Seed-OSS: Llama whose queries, keys and values have a bias, by default without one of the output.
SEED_OSS = Family(
    model_type="seedoss",
    architecture="SeedOssForCausalLM",
    title="Seed-OSS",
    sizes={"36B": 36.2},
    defaults={
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    describe=_seed_oss,
)


def _phi3(settings: Settings) -> ModelConfig:
    rope = dict(rope_parameters(settings))
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("su", "yarn"):  # names of LongRoPE in early checkpoints
        rope |= {"rope_type": "longrope"}
    plain = decoder(settings.changed(rope_parameters=rope, rope_scaling=None))
    window = settings.get("sliding_window")
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
        fused_qkv=True,
        fused_gate_up=True,
    )


# Phi-3, 3.5 and 4: fused projections, every layer has the window, and LongRoPE stretches the long ones. Phi-4-mini
# rotates three quarters of each head.
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    title="Phi 3 and 4",
    sizes={"mini 3.8B": 3.82, "4 mini 3.8B": 3.84, "medium 14B": 14.0, "4 14B": 14.7},
    gguf_name="phi3",
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    describe=_phi3,
)


def _helium(settings: Settings) -> ModelConfig:
    plain = interleaved(decoder(settings))
    return replace(plain, attention_output_bias=False, mlp_bias=bool(settings["mlp_bias"]))


# Helium: Llama with heads rotated in neighbouring pairs.
HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    title="Helium",
    sizes={"2B": 2.02},
    defaults={
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
    },
    describe=_helium,
)


def _ernie4_5(settings: Settings) -> ModelConfig:
    has_bias = bool(settings.get("use_bias"))
    plain = interleaved(decoder(settings))
    return replace(plain, attention_bias=has_bias, attention_output_bias=has_bias, mlp_bias=has_bias)


# ERNIE 4.5, the dense models: Llama with heads rotated in neighbouring pairs, and one switch for all biases.
ERNIE4_5 = Family(
    model_type="ernie45",
    architecture="Ernie4_5ForCausalLM",
    title="ERNIE 4.5, dense",
    sizes={"0.3B": 0.36},
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    describe=_ernie4_5,
)


def _exaone4(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    window = settings.stated.get("sliding_window", 4096)  # null: none
    pattern = settings["sliding_window_pattern"]
    if isinstance(pattern, str):  # LLLG: each letter is a layer, G one without a window
        pattern = len(pattern)
    windows = layer_windows(settings, window, lambda index: window is not None and (index + 1) % pattern != 0)
    unrotated = () if window is None else (index for index, each in enumerate(windows) if each is None)
    return replace(
        plain,
        norms=POST_NORMS,
        qk_norm=True,
        attention_bias=False,
        attention_output_bias=False,
        layer_windows=windows,
        layers_without_rope=tuple(unrotated),
    )


# EXAONE 4: norms as OLMo 2, but of each query and key head; with windows only windowed layers are rotated.
EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    title="EXAONE 4",
    sizes={"1.2B": 1.28, "32B": 32.0},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window_pattern": 4},
    describe=_exaone4,
)


GLM_DEFAULTS = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def glm(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as all of these GLMs are alike."""
    return replace(interleaved(decoder(settings)), attention_output_bias=False, fused_gate_up=True)


# GLM-4 of the first form (`glm-4-9b-hf`): half of each head is rotated, in neighbouring pairs; fused gate and up.
GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    title="GLM-4",
    sizes={"9B": 9.4},
    defaults=GLM_DEFAULTS,
    describe=glm,
)


def _glm4(settings: Settings) -> ModelConfig:
    norms = LayerNorms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm")
    return replace(glm(settings), norms=norms)


# GLM-4-0414 and GLM-Z1: as GLM, with norms after attention and MLP, too.
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    title="GLM-4 0414",
    sizes={"9B": 9.4, "32B": 32.6},
    defaults=GLM_DEFAULTS,
    describe=_glm4,
)
