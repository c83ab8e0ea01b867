"""Qwen 3: queries and keys pass a norm."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families import qwen2
from raydix.engine.model.families.family import Family, Settings


def _describe(settings: Settings) -> ModelConfig:
    return replace(qwen2.qwen(settings), qk_norm=True)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    title="Qwen 3",
    sizes={"0.6B": 0.6, "1.7B": 1.72, "4B": 4.02, "8B": 8.19, "14B": 14.8, "32B": 32.8},
    also=("qwen3vl",),
    gguf_name="qwen3",
    defaults={**qwen2.DEFAULTS, "head_dim": 128},
    describe=_describe,
)
