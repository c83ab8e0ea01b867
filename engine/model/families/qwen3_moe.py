"""Qwen 3 with experts: 128 small ones, of which each token takes 8."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families import qwen2, qwen3
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import experts_of


def _describe(settings: Settings) -> ModelConfig:
    step, dense = int(settings["decoder_sparse_step"]), settings.get("mlp_only_layers") or []
    layers = [index for index in range(int(settings["num_hidden_layers"])) if (index + 1) % step == 0]
    return replace(
        qwen3.QWEN3.describe(settings),
        experts=experts_of(settings, layers=[index for index in layers if index not in dense]),
    )


QWEN3_MOE = Family(
    model_type="qwen3moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen 3 MoE",
    sizes={"30B-A3B": 30.5, "235B-A22B": 235.1},
    gguf_name="qwen3moe",
    defaults={
        **qwen2.DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    describe=_describe,
)
