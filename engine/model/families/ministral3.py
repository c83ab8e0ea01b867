"""Ministral 3: Mistral stretched by YaRN, whose queries grow with the logarithm of their position."""

from dataclasses import replace
from typing import Any

from raydix.engine.model.config import JsonObject, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, rope_parameters

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _describe(settings: Settings) -> ModelConfig:
    rope: JsonObject = rope_parameters(settings) or _ROPE
    plain = decoder(settings.changed(rope_parameters=rope, rope_scaling=None))
    window = settings.get("sliding_window")
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
        query_scaling=(float(beta), int(original)) if beta and original else None,
    )


MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    title="Ministral 3",
    sizes={"3B": 3.43, "8B": 8.49, "14B": 13.5},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    describe=_describe,
)
