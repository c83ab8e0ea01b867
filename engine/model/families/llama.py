"""Llama 1 to 3, and the many models of their architecture."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder


def _describe(settings: Settings) -> ModelConfig:
    return replace(decoder(settings), mlp_bias=bool(settings["mlp_bias"]))


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
    describe=_describe,
)
