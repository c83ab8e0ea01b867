"""OLMo 2: norms after attention and MLP instead of before; queries and keys pass one over all heads."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
POST_NORMS = LayerNorms(
    attention=None,
    attention_post="post_attention_layernorm",
    mlp=None,
    mlp_post="post_feedforward_layernorm",
)
"""Only what is added to the residual stream is normed."""


def olmo(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as OLMo 2 and 3 are alike."""
    return replace(decoder(settings), norms=POST_NORMS, qk_norm=True, qk_norm_spans_heads=True)


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    title="OLMo 2",
    sizes={"1B": 1.48, "7B": 7.3, "13B": 13.7, "32B": 32.2},
    defaults=DEFAULTS,
    describe=olmo,
)
