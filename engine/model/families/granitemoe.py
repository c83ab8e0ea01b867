"""Granite 3 with experts, which its files store as one tensor of all."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families import granite
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import experts_of


def _describe(settings: Settings) -> ModelConfig:
    of_all = experts_of(settings.changed(norm_topk_prob=True))
    return replace(
        granite.GRANITE.describe(settings),
        mlp_bias=False,
        experts=replace(
            of_all,
            router="block_sparse_moe.router.layer",
            gate=None,
            up="block_sparse_moe.input_linear",
            down="block_sparse_moe.output_linear",
        ),
    )


GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    title="Granite 3 MoE",
    sizes={"1B-A400M": 1.33, "3B-A800M": 3.3},
    defaults={**granite.GRANITE.defaults, "num_experts": 8, "num_experts_per_tok": 2},
    describe=_describe,
)
