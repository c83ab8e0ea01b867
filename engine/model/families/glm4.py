"""GLM-4-0414 and GLM-Z1: as GLM, with norms after attention and MLP, too."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families import glm
from raydix.engine.model.families.family import Family, Settings


def _describe(settings: Settings) -> ModelConfig:
    norms = LayerNorms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm")
    return replace(glm.glm(settings), norms=norms)


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    title="GLM-4 0414",
    sizes={"9B": 9.4, "32B": 32.6},
    defaults=glm.DEFAULTS,
    describe=_describe,
)
