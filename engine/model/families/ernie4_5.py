"""ERNIE 4.5, the dense models: Llama with heads rotated in neighbouring pairs, and one switch for all biases."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, interleaved


def _describe(settings: Settings) -> ModelConfig:
    has_bias = bool(settings.get("use_bias"))
    plain = interleaved(decoder(settings))
    return replace(plain, attention_bias=has_bias, attention_output_bias=has_bias, mlp_bias=has_bias)


ERNIE4_5 = Family(
    model_type="ernie45",
    architecture="Ernie4_5ForCausalLM",
    title="ERNIE 4.5, dense",
    sizes={"0.3B": 0.36},
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    describe=_describe,
)
