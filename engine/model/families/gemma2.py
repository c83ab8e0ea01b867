"""Gemma 2: norms after attention and MLP, too; every other layer has a window; soft caps."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families import gemma
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import layer_windows, optional_float

DEFAULTS: Mapping[str, Any] = {
    **gemma.DEFAULTS,
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
        gemma.gemma(settings),
        layer_windows=layer_windows(settings, settings["sliding_window"], is_windowed),
        attention_scale=float(settings["query_pre_attn_scalar"]) ** -0.5,
        norms=LayerNorms(
            attention_post="post_attention_layernorm",
            mlp="pre_feedforward_layernorm",
            mlp_post="post_feedforward_layernorm",
        ),
    )


def _describe(settings: Settings) -> ModelConfig:
    return replace(
        with_sandwich_norm(settings, lambda index: index % 2 == 0),
        attention_soft_cap=optional_float(settings.stated.get("attn_logit_softcapping", 50.0)),  # null: none
        logit_soft_cap=optional_float(settings.stated.get("final_logit_softcapping", 30.0)),
    )


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    sizes={"2B": 2.61, "9B": 9.24, "27B": 27.2},
    gguf_name="gemma2",
    defaults=DEFAULTS,
    describe=_describe,
)
