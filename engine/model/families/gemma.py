"""Gemma, Gemma 2 and Gemma 3."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, layer_windows, optional_float, rope_of, rope_parameters

# Values that the `config.json` of any Gemma may leave out.
GEMMA_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


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
        norms=LayerNorms(
            attention_post="post_attention_layernorm",
            mlp="pre_feedforward_layernorm",
            mlp_post="post_feedforward_layernorm",
        ),
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
