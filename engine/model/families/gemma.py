"""Gemma 1: embeddings are scaled, and the stored norm weights are one less than what they multiply by."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
"""Values that the `config.json` of any Gemma may leave out."""


def gemma(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as all Gemmas are alike."""
    plain = decoder(settings)
    return replace(plain, norm_offset=1.0, embedding_scale=math.sqrt(plain.hidden_size))


def _describe(settings: Settings) -> ModelConfig:
    if (settings.get("hidden_activation") or settings["hidden_act"]) == "gelu":
        # Early checkpoints say gelu and mean the approximation.
        settings = settings.changed(hidden_activation="gelu_pytorch_tanh")
    return gemma(settings)


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    title="Gemma",
    sizes={"2B": 2.51, "7B": 8.54},
    gguf_name="gemma",
    defaults={**DEFAULTS, "vocab_size": 256_000},
    describe=_describe,
)
