"""Helium: Llama with heads rotated in neighbouring pairs."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, interleaved


def _describe(settings: Settings) -> ModelConfig:
    plain = interleaved(decoder(settings))
    return replace(plain, attention_output_bias=False, mlp_bias=bool(settings["mlp_bias"]))


HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    title="Helium",
    sizes={"2B": 2.02},
    defaults={
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
    },
    describe=_describe,
)
