"""Gemma, Gemma 2, Gemma 3 and Gemma 4."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import ExpertsConfig, KVHeads, LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import (
    decoder,
    experts_of,
    layer_windows,
    optional_float,
    rope_of,
    rope_parameters,
)

# Values that the `config.json` of any Gemma may leave out.
GEMMA_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}

SANDWICH = LayerNorms(
    attention_post="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)


def gemma(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as all Gemmas are alike."""
    plain = decoder(settings)
    return replace(plain, norm_offset=1.0, embedding_scale=math.sqrt(plain.hidden_size))


def _gemma(settings: Settings) -> ModelConfig:
    if (settings.get("hidden_activation") or settings["hidden_act"]) == "gelu":
        # Early checkpoints say gelu and mean the approximation.
        settings = settings.changed(hidden_activation="gelu_pytorch_tanh")
    return gemma(settings)


# Gemma 1: embeddings are scaled, and the stored norm weights are one less than what they multiply by.
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    title="Gemma",
    sizes={"2B": 2.51, "7B": 8.54},
    gguf_name="gemma",
    defaults={**GEMMA_DEFAULTS, "vocab_size": 256_000},
    describe=_gemma,
)


GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **GEMMA_DEFAULTS,
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def with_sandwich_norm(settings: Settings, is_windowed: Callable[[int], bool]) -> ModelConfig:
    """Describe the decoder as far as Gemma 2 and 3 are alike; `is_windowed` as `layer_windows` takes it."""
    return replace(
        gemma(settings),
        layer_windows=layer_windows(settings, settings["sliding_window"], is_windowed),
        attention_scale=float(settings["query_pre_attn_scalar"]) ** -0.5,
        norms=SANDWICH,
    )


def _gemma2(settings: Settings) -> ModelConfig:
    return replace(
        with_sandwich_norm(settings, lambda index: index % 2 == 0),
        attention_soft_cap=optional_float(settings.stated.get("attn_logit_softcapping", 50.0)),  # null: none
        logit_soft_cap=optional_float(settings.stated.get("final_logit_softcapping", 30.0)),
    )


# Gemma 2: norms after attention and MLP, too; every other layer has a window; soft caps.
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    sizes={"2B": 2.61, "9B": 9.24, "27B": 27.2},
    gguf_name="gemma2",
    defaults=GEMMA2_DEFAULTS,
    describe=_gemma2,
)


def _gemma3(settings: Settings) -> ModelConfig:
    # transformers 5 states the rotary embedding of each kind of layer, transformers 4 that of layers without a window.
    parameters = rope_parameters(settings)
    is_by_kind = settings.get("rope_parameters") is not None
    everywhere = parameters.get("full_attention") if is_by_kind else parameters
    local = parameters.get("sliding_attention") or {} if is_by_kind else {}

    settings = settings.changed(rope_parameters=everywhere, rope_scaling=None)
    return replace(
        with_sandwich_norm(settings, lambda index: (index + 1) % int(settings["sliding_window_pattern"]) != 0),
        local_rope=rope_of(settings, local, float(settings["rope_local_base_freq"])),
        qk_norm=True,
        logit_soft_cap=optional_float(settings.get("final_logit_softcapping")),
    )


# Gemma 3, the text model: queries and keys pass a norm, windowed layers have a rotary embedding of their own. It
# ignores `attn_logit_softcapping`.
GEMMA3 = Family(
    model_type="gemma3",
    architecture="Gemma3ForCausalLM",
    title="Gemma 3",
    sizes={"270M": 0.268, "1B": 1.0, "4B": 3.88, "12B": 11.8, "27B": 27.0},
    gguf_name="gemma3",
    defaults={
        **GEMMA2_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    describe=_gemma3,
)


# Names below a layer of two tensors with all its experts.
_STACKED = ("experts.gate_up_proj", "experts.down_proj")


def _gemma4(settings: Settings) -> ModelConfig:
    if settings.get("use_bidirectional_attention") == "all":
        raise StartupError(f"{settings.architecture} attends in both directions here, which is not supported")
    num_layers, vocab_size = int(settings["num_hidden_layers"]), int(settings["vocab_size"])
    windows = layer_windows(settings, settings["sliding_window"], lambda index: (index + 1) % 6 != 0)
    windows = (*windows[:-1], None)  # whatever is stated of the last layer
    own_size = int(settings["hidden_size_per_layer_input"])
    if own_size and int(settings.get("vocab_size_per_layer_input") or vocab_size) != vocab_size:
        raise StartupError(f"{settings.architecture} embeds other tokens in its layers than at its start")
    num_shared = int(settings["num_kv_shared_layers"])
    if num_shared < 0 or set(windows) != set(windows[: num_layers - num_shared]):
        raise ValueError(f"no layer has keys and values for the last {num_shared}")

    ropes = rope_parameters(settings)
    settings = settings.changed(rope_parameters=None, hidden_act=settings["hidden_activation"])
    plain = decoder(settings)
    return replace(
        plain,
        layer_windows=windows,
        rope=rope_of(settings, ropes["full_attention"], 1e6),
        local_rope=rope_of(settings, ropes.get("sliding_attention") or {}, 1e4),
        attention_scale=1.0,
        embedding_scale=math.sqrt(plain.hidden_size),
        norms=SANDWICH,
        qk_norm=True,
        value_norm=True,
        unlimited_heads=_unlimited_heads(settings, windows),
        keys_as_values=bool(settings["attention_k_eq_v"]),
        num_shared_kv_layers=num_shared,
        shared_kv_scale=2 if settings["use_double_wide_mlp"] else 1,
        layer_input_size=own_size,
        layer_scalars=True,
        experts=_gemma4_experts(settings) if settings.get("enable_moe_block") else None,
        own_names=tuple((f"{name}.weight", name) for name in _STACKED),
        logit_soft_cap=optional_float(settings.get("final_logit_softcapping")),
    )


def _gemma4_experts(settings: Settings) -> ExpertsConfig:
    experts = experts_of(settings.changed(num_experts_per_tok=settings.get("top_k_experts"), norm_topk_prob=True))
    up, down = _STACKED
    return replace(experts, beside_mlp=True, router="router.proj", gate=None, up=up, down=down)


def _unlimited_heads(settings: Settings, windows: Sequence[int | None]) -> KVHeads:
    """The heads of layers without a window, as published, or as transformers writes them: for each layer."""
    num, dim = settings["num_key_value_heads"], settings["global_head_dim"]
    if settings["attention_k_eq_v"]:
        num = settings.get("num_global_key_value_heads") or num
    by_layer = settings.get("per_layer_config") or {}
    stated = [by_layer[str(index)] for index, window in enumerate(windows) if window is None and by_layer]
    found = {KVHeads(int(each.get("num_key_value_heads", num)), int(each.get("head_dim", dim))) for each in stated}
    if len(found) > 1:
        raise ValueError("the layers without a window have different heads")
    return found.pop() if found else KVHeads(int(num), int(dim))


_GEMMA4_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}

# Gemma 4, the text model: layers without a window have heads of their own and turn a part of them; values pass a norm;
# in the small sizes each layer has its own embedding of a token, and the last layers attend to other layers' KV; one
# size has experts beside each MLP.
GEMMA4 = Family(
    model_type="gemma4",
    architecture="Gemma4ForCausalLM",
    title="Gemma 4",
    sizes={"E2B": 4.63, "E4B": 7.46, "26B-A4B": 25.2, "31B": 30.7},
    also=("Gemma4ForConditionalGeneration",),
    defaults=_GEMMA4_DEFAULTS,
    describe=_gemma4,
)

# Gemma 4 whose images and sound are projected like tokens: the same text model, without embeddings in layers.
GEMMA4_UNIFIED = Family(
    model_type="gemma4unified",
    architecture="Gemma4UnifiedForCausalLM",
    title="Gemma 4 Unified",
    sizes={"12B": 11.9},
    also=("Gemma4UnifiedForConditionalGeneration",),
    defaults={
        **_GEMMA4_DEFAULTS,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    describe=_gemma4,
)
