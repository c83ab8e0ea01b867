"""DeepSeek V2 and V3, and families of their form: attention through a latent, and many small experts."""

import math
from dataclasses import replace

from raydix.engine.model.config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig, unsupported
from raydix.engine.model.families.corrected import CORRECTED_EXPERTS
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import corrected_experts, decoder, interleaved, layers_from


def _latent(settings: Settings, experts: ExpertsConfig) -> ModelConfig:
    """Describe a decoder with attention through a latent."""
    # Null says that queries have no rank of their own, and is not the default.
    query_rank = settings.stated.get("q_lora_rank", settings.defaults["q_lora_rank"])
    latent = LatentConfig(
        rank=int(settings["kv_lora_rank"]),
        rope_dim=int(settings["qk_rope_head_dim"]),
        nope_dim=int(settings["qk_nope_head_dim"]),
        value_dim=int(settings["v_head_dim"]),
        query_rank=None if query_rank is None else int(query_rank),
    )
    has_bias = bool(settings["attention_bias"])
    if has_bias and latent.query_rank is None:
        raise unsupported(f"attention_bias of {settings.architecture} without q_lora_rank", ["either alone"])
    plain = decoder(settings.changed(head_dim=latent.rope_dim))
    if settings["rope_interleave"]:
        plain = interleaved(plain)
    return replace(
        plain,
        num_kv_heads=1,
        head_dim=latent.row_dim,
        attention_scale=float(latent.query_dim) ** -0.5 * _stretched(plain.rope),
        latent=latent,
        experts=experts,
        draft_layers=int(settings.get("num_nextn_predict_layers") or 0),
    )


def _stretched(rope: RopeConfig) -> float:
    """The factor on scores of a rotation that YaRN stretches: the square of the one on queries and keys."""
    scaling = rope.scaling or {}
    weight, factor = scaling.get("mscale_all_dim"), float(scaling.get("factor", 1.0))
    return 1.0 if not weight or factor <= 1.0 else (0.1 * float(weight) * math.log(factor) + 1.0) ** 2


def _deepseek_v2(settings: Settings) -> ModelConfig:
    method = settings["topk_method"]
    if method not in ("greedy", "group_limited_greedy") or settings["norm_topk_prob"]:
        raise unsupported(
            f"the routing of {settings.architecture} here (topk_method, norm_topk_prob)", ["published ones"]
        )
    grouped = method == "group_limited_greedy"
    plain = corrected_experts(
        settings.changed(
            n_group=settings["n_group"] if grouped else 1, topk_group=settings["topk_group"] if grouped else 1
        ),
        layers_from(settings, "first_k_dense_replace"),
    )
    routing = replace(plain.routing, score="softmax", group_best=1)
    return _latent(settings, replace(plain, routing=routing, correction=None))


_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}

# DeepSeek V2: experts chosen by the softmax over all, of the best groups or of all.
DEEPSEEK_V2 = Family(
    model_type="deepseekv2",
    architecture="DeepseekV2ForCausalLM",
    title="DeepSeek V2",
    sizes={"Lite 16B-A2.4B": 15.7, "236B-A21B": 235.7},
    defaults={
        **CORRECTED_EXPERTS,
        **_LATENT,
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
    },
    describe=_deepseek_v2,
)


def _deepseek_v3(settings: Settings) -> ModelConfig:
    return _latent(settings, corrected_experts(settings, layers_from(settings, "first_k_dense_replace")))


# DeepSeek V3 and R1, and Kimi K2, which has more experts and fewer heads.
DEEPSEEK_V3 = Family(
    model_type="deepseekv3",
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek V3 and R1, Kimi K2",
    sizes={"V3 671B-A37B": 671.0, "K2 1T-A32B": 1026.4},
    also=("kimik2",),
    defaults={
        **CORRECTED_EXPERTS,
        **_LATENT,
        "max_position_embeddings": 4096,
        "num_experts": 256,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    describe=_deepseek_v3,
)


def _glm4_moe_lite(settings: Settings) -> ModelConfig:
    kinds = settings.get("mlp_layer_types")
    layers = layers_from(settings, "first_k_dense_replace")
    sparse = layers if kinds is None else [index for index, kind in enumerate(kinds) if kind == "sparse"]
    return _latent(settings, corrected_experts(settings, sparse))


# GLM-4.7 Flash: DeepSeek V3's layers, with wider values.
GLM4_MOE_LITE = Family(
    model_type="glm4moelite",
    architecture="Glm4MoeLiteForCausalLM",
    title="GLM-4.7 Flash",
    sizes={"30B-A3B": 29.9},
    defaults={
        **CORRECTED_EXPERTS,
        **_LATENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    describe=_glm4_moe_lite,
)
