"""Families with experts in DeepSeek V3's way: GLM-4.5 and dots.llm1."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import corrected_experts, decoder, layers_from

# Values that the `config.json` of these families may leave out.
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def _glm4_moe(settings: Settings) -> ModelConfig:
    return replace(
        decoder(settings),
        attention_output_bias=False,
        qk_norm=bool(settings["use_qk_norm"]),
        experts=corrected_experts(settings, layers_from(settings, "first_k_dense_replace")),
        draft_layers=int(settings["num_nextn_predict_layers"]),
    )


# GLM-4.5 to 4.7: half of each head is rotated, in halves; the first layers are dense, the others have small experts.
GLM4_MOE = Family(
    model_type="glm4moe",
    architecture="Glm4MoeForCausalLM",
    title="GLM-4.5 to 4.7",
    sizes={"4.5 Air 106B-A12B": 106.9, "355B-A32B": 352.8},
    defaults={
        **_EXPERTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
    },
    describe=_glm4_moe,
)
