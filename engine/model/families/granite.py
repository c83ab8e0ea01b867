"""Granite, and Granite with experts."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of


def _granite(settings: Settings) -> ModelConfig:
    return replace(
        decoder(settings),
        mlp_bias=bool(settings["mlp_bias"]),
        embedding_scale=float(settings["embedding_multiplier"]),
        attention_scale=float(settings["attention_multiplier"]),
        residual_scale=float(settings["residual_multiplier"]),
        logit_scale=1.0 / float(settings["logits_scaling"]),
    )


# Granite 3, the dense models: Llama with a factor each on embeddings, scores, residual sums and logits.
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
    describe=_granite,
)


def _granitemoe(settings: Settings) -> ModelConfig:
    of_all = experts_of(settings.changed(norm_topk_prob=True))
    return replace(
        GRANITE.describe(settings),
        mlp_bias=False,
        experts=replace(
            of_all,
            router="block_sparse_moe.router.layer",
            gate=None,
            up="block_sparse_moe.input_linear",
            down="block_sparse_moe.output_linear",
        ),
    )


# Granite 3 with experts, which its files store as one tensor of all.
GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    title="Granite 3 MoE",
    sizes={"1B-A400M": 1.33, "3B-A800M": 3.3},
    defaults={**GRANITE.defaults, "num_experts": 8, "num_experts_per_tok": 2},
    describe=_granitemoe,
)
