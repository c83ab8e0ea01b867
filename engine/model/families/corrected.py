"""Families whose experts are chosen by corrected scores, as DeepSeek V3's are: GLM-4.5, dots.llm1, MiniMax M2 and ERNIE
4.5 MoE."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig, unsupported
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.llama import ERNIE4_5
from raydix.engine.model.families.mistral import MIXTRAL
from raydix.engine.model.families.parts import (
    corrected_experts,
    decoder,
    experts_of,
    layer_windows,
    layers_from,
)

# Values that the `config.json` of those families may leave out.
CORRECTED_EXPERTS = {
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
        **CORRECTED_EXPERTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
    },
    describe=_glm4_moe,
)


def _dots1(settings: Settings) -> ModelConfig:
    plain, window = decoder(settings), settings.get("sliding_window")
    is_windowed = range(int(settings["max_window_layers"]), plain.num_layers)
    return replace(
        plain,
        qk_norm=True,
        layer_windows=layer_windows(settings, window, lambda index: index in is_windowed),
        experts=corrected_experts(settings, layers_from(settings, "first_k_dense_replace")),
    )


# dots.llm1: Qwen 3's attention, and DeepSeek V3's experts.
DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    title="dots.llm1",
    sizes={"142B-A14B": 142.8},
    defaults={
        **CORRECTED_EXPERTS,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    },
    describe=_dots1,
)


def _minimax_m2(settings: Settings) -> ModelConfig:
    if (rotated := settings.get("rotary_dim")) is not None:
        settings = settings.changed(partial_rotary_factor=float(rotated) / int(settings["head_dim"]))
    mixtral = MIXTRAL.describe(settings)
    assert mixtral.experts is not None
    return replace(
        mixtral,
        layer_windows=(None,) * mixtral.num_layers,
        qk_norm=True,
        qk_norm_spans_heads=True,
        experts=replace(
            mixtral.experts,
            routing=replace(mixtral.experts.routing, score="sigmoid"),
            float_router=True,
            correction="block_sparse_moe.e_score_correction_bias",
        ),
    )


# MiniMax M2: Mixtral with many small experts, chosen by corrected sigmoids; a norm over all heads of queries and one of
# keys, and half of each head rotated.
MINIMAX_M2 = Family(
    model_type="minimaxm2",
    architecture="MiniMaxM2ForCausalLM",
    title="MiniMax M2",
    sizes={"230B-A10B": 228.7},
    defaults={
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    describe=_minimax_m2,
)


def _ernie4_5_moe(settings: Settings) -> ModelConfig:
    if settings.get("use_bias"):
        raise unsupported(f"a bias of {settings.architecture} (use_bias)", ["the dense models with one"])
    num_layers, start = int(settings["num_hidden_layers"]), int(settings["moe_layer_start_index"])
    end, interval = int(settings["moe_layer_end_index"]), int(settings["moe_layer_interval"])
    last = num_layers - 1 if end == -1 else end
    layers = [index for index in range(start, min(last + 1, num_layers)) if (index + 1) % interval == 0]
    of_all = experts_of(settings, layers)
    return replace(
        ERNIE4_5.describe(settings),
        experts=replace(
            of_all,
            shared_size=of_all.intermediate_size * int(settings["moe_num_shared_experts"]),
            shared="mlp.shared_experts",
            float_router=True,
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_is_row=True,
        ),
    )


# ERNIE 4.5 with experts: chosen by the softmax over all with a correction, beside experts for every token.
ERNIE4_5_MOE = Family(
    model_type="ernie45moe",
    architecture="Ernie4_5_MoeForCausalLM",
    title="ERNIE 4.5 MoE",
    sizes={"21B-A3B": 21.8, "300B-A47B": 299.5},
    defaults={
        **{key: value for key, value in ERNIE4_5.defaults.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "norm_topk_prob": True,
    },
    describe=_ernie4_5_moe,
)
