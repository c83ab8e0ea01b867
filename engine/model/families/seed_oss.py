"""Seed-OSS: Llama whose queries, keys and values have a bias, by default without one of the output."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder


def _describe(settings: Settings) -> ModelConfig:
    output_bias = bool(settings.get("attention_out_bias"))
    return replace(decoder(settings), attention_output_bias=output_bias, mlp_bias=bool(settings["mlp_bias"]))


SEED_OSS = Family(
    model_type="seedoss",
    architecture="SeedOssForCausalLM",
    title="Seed-OSS",
    sizes={"36B": 36.2},
    defaults={
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    describe=_describe,
)
