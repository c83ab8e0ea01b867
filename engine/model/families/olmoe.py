"""OLMoE: 64 experts, of which each token takes 8; queries and keys pass a norm over all heads."""

from dataclasses import replace

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of


def _describe(settings: Settings) -> ModelConfig:
    if settings.get("clip_qkv") is not None:
        raise StartupError("OlmoeForCausalLM clips queries, keys and values here (clip_qkv), which is not supported")
    return replace(decoder(settings), qk_norm=True, qk_norm_spans_heads=True, experts=experts_of(settings))


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    sizes={"1B-7B": 6.92},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    describe=_describe,
)
