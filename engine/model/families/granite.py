"""Granite 3, the dense models: Llama with a factor each on embeddings, scores, residual sums and logits."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder


def _describe(settings: Settings) -> ModelConfig:
    return replace(
        decoder(settings),
        mlp_bias=bool(settings["mlp_bias"]),
        embedding_scale=float(settings["embedding_multiplier"]),
        attention_scale=float(settings["attention_multiplier"]),
        residual_scale=float(settings["residual_multiplier"]),
        logit_scale=1.0 / float(settings["logits_scaling"]),
    )


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    title="Granite 3, dense",
    sizes={"2B": 2.53, "8B": 8.17},
    defaults={
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    describe=_describe,
)
