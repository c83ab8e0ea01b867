"""GLM-4 of the first form (`glm-4-9b-hf`): half of each head is rotated, in neighbouring pairs; fused gate and up."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, interleaved

DEFAULTS = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def glm(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as all of these GLMs are alike."""
    return replace(interleaved(decoder(settings)), attention_output_bias=False, fused_gate_up=True)


GLM = Family(
    model_type="glm", architecture="GlmForCausalLM", title="GLM-4", sizes={"9B": 9.4}, defaults=DEFAULTS, describe=glm
)
