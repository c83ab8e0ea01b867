"""Mistral: every layer has the window, and no projection a bias. Its GGUF files call themselves llama."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder


def _describe(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    window = settings.stated.get("sliding_window", 4096)  # null: none
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
    )


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    title="Mistral",
    sizes={"7B": 7.25, "Nemo 12B": 12.2, "Small 24B": 23.6},
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    describe=_describe,
)
