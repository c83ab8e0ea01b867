"""Gemma 3, the text model: queries and keys pass a norm, windowed layers have a rotary embedding of their own.

It ignores `attn_logit_softcapping`.
"""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families import gemma2
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import optional_float, rope_of, rope_parameters


def _describe(settings: Settings) -> ModelConfig:
    # transformers 5 states the rotary embedding of each kind of layer, transformers 4 that of layers without a window.
    parameters = rope_parameters(settings)
    is_by_kind = settings.get("rope_parameters") is not None
    everywhere = parameters.get("full_attention") if is_by_kind else parameters
    local = parameters.get("sliding_attention") or {} if is_by_kind else {}

    settings = settings.changed(rope_parameters=everywhere, rope_scaling=None)
    return replace(
        gemma2.with_sandwich_norm(settings, lambda index: (index + 1) % int(settings["sliding_window_pattern"]) != 0),
        local_rope=rope_of(settings, local, float(settings["rope_local_base_freq"])),
        qk_norm=True,
        logit_soft_cap=optional_float(settings.get("final_logit_softcapping")),
    )


GEMMA3 = Family(
    model_type="gemma3",
    architecture="Gemma3ForCausalLM",
    title="Gemma 3",
    sizes={"270M": 0.268, "1B": 1.0, "4B": 3.88, "12B": 11.8, "27B": 27.0},
    gguf_name="gemma3",
    defaults={
        **gemma2.DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    describe=_describe,
)
