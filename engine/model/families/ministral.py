"""Ministral (8B): Mistral whose layers have a window or none, as `layer_types` says."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, layer_windows


def _describe(settings: Settings) -> ModelConfig:
    window = settings.stated.get("sliding_window", 4096)  # null: none
    return replace(
        decoder(settings),
        layer_windows=layer_windows(settings, window, lambda _: True),
        attention_bias=False,
        attention_output_bias=False,
    )


MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    title="Ministral",
    sizes={"8B": 8.02},
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    describe=_describe,
)
