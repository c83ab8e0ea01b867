"""GLM and GLM 4."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, interleaved

GLM_DEFAULTS = {
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
    model_type="glm",
    architecture="GlmForCausalLM",
    title="GLM-4",
    sizes={"9B": 9.4},
    defaults=GLM_DEFAULTS,
    describe=glm,
)
"""GLM-4 of the first form (`glm-4-9b-hf`): half of each head is rotated, in neighbouring pairs; fused gate and up."""


def _glm4(settings: Settings) -> ModelConfig:
    norms = LayerNorms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm")
    return replace(glm(settings), norms=norms)


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    title="GLM-4 0414",
    sizes={"9B": 9.4, "32B": 32.6},
    defaults=GLM_DEFAULTS,
    describe=_glm4,
)
"""GLM-4-0414 and GLM-Z1: as GLM, with norms after attention and MLP, too."""
