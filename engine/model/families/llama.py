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
    gguf_name="llama",
    defaults={"max_position_embeddings": 2048},
    describe=_describe,
)
