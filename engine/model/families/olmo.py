"""OLMo 2 and 3, and OLMoE."""

from dataclasses import replace

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of, layer_windows, rope_of, rope_parameters

OLMO2_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
# Only what is added to the residual stream is normed.
POST_NORMS = LayerNorms(
    attention=None,
    attention_post="post_attention_layernorm",
    mlp=None,
    mlp_post="post_feedforward_layernorm",
)


def olmo(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as OLMo 2 and 3 are alike."""
    return replace(decoder(settings), norms=POST_NORMS, qk_norm=True, qk_norm_spans_heads=True)


# OLMo 2: norms after attention and MLP instead of before; queries and keys pass one over all heads.
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    title="OLMo 2",
    sizes={"1B": 1.48, "7B": 7.3, "13B": 13.7, "32B": 32.2},
    gguf_name="olmo2",
    defaults=OLMO2_DEFAULTS,
    describe=olmo,
)


def _olmo3(settings: Settings) -> ModelConfig:
    # transformers 5 states the rotary embedding of each kind of layer, transformers 4 that of layers without a window.
    parameters = rope_parameters(settings)
    is_by_kind = "full_attention" in parameters
    everywhere = parameters["full_attention"] if is_by_kind else parameters
    local = parameters.get("sliding_attention") or {} if is_by_kind else {}

    settings = settings.changed(rope_parameters=everywhere, rope_scaling=None)
    return replace(
        olmo(settings),
        local_rope=rope_of(settings, local, float(settings["rope_theta"])),
        layer_windows=layer_windows(settings, settings["sliding_window"], lambda index: (index + 1) % 4 != 0),
    )


# OLMo 3: as OLMo 2; three of four layers have a window, and their rotary embedding is never stretched.
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    title="OLMo 3",
    sizes={"7B": 7.3, "32B": 32.2},
    gguf_name="olmo2",
    defaults={**OLMO2_DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096},
    describe=_olmo3,
)


def _olmoe(settings: Settings) -> ModelConfig:
    if settings.get("clip_qkv") is not None:
        raise StartupError("OlmoeForCausalLM clips queries, keys and values here (clip_qkv), which is not supported")
    return replace(decoder(settings), qk_norm=True, qk_norm_spans_heads=True, experts=experts_of(settings))


# OLMoE: 64 experts, of which each token takes 8; queries and keys pass a norm over all heads.
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    sizes={"1B-7B": 6.92},
    gguf_name="olmoe",
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    describe=_olmoe,
)
