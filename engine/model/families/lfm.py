"""LFM 2: short convolutions between gates, and attention."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, ModelConfig, RecurrentConfig, unsupported
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of, layers_from

OWN_NAMES = (
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("model.norm", "model.embedding_norm"),
)


def _layers(settings: Settings) -> tuple[int, ...]:
    """Indices of the layers with a convolution, by `layer_types` or by those that have attention."""
    num_layers = int(settings["num_hidden_layers"])
    if (kinds := settings.get("layer_types")) is None:
        with_attention = settings.get("full_attn_idxs")
        kinds = [
            "full_attention" if with_attention is None or index in with_attention else "conv"
            for index in range(num_layers)
        ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {num_layers}")
    if unknown := set(kinds) - {"full_attention", "conv"}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}")
    return tuple(index for index, kind in enumerate(kinds) if kind == "conv")


def _inner_size(settings: Settings) -> int:
    """Size of the MLP's intermediate state: stated, or two thirds of that and rounded up."""
    size = int(settings.get("block_ff_dim") or settings["intermediate_size"])
    if not settings["block_auto_adjust_ff_dim"]:
        return size
    size = int(float(settings["block_ffn_dim_multiplier"]) * int(2 * size / 3))
    unit = int(settings["block_multiple_of"])
    return -(-size // unit) * unit


def _lfm2(settings: Settings) -> ModelConfig:
    if settings["conv_bias"]:
        raise unsupported("a bias of convolutions (conv_bias)", ["convolutions without one"])
    tied = settings.get("tie_embedding")
    settings = settings.changed(
        rms_norm_eps=settings["norm_eps"],
        intermediate_size=_inner_size(settings),
        tie_word_embeddings=settings["tie_word_embeddings"] if tied is None else tied,
    )
    plain, layers = decoder(settings), _layers(settings)
    recurrent = RecurrentConfig(layers=layers, kernel_size=int(settings["conv_L_cache"]), channels=plain.hidden_size)
    return replace(
        plain,
        qk_norm=True,
        norms=LayerNorms(attention="operator_norm", mlp="ffn_norm"),
        recurrent=recurrent if layers else None,
        own_names=OWN_NAMES,
    )


# LFM 2: most layers have a convolution over three positions between two gates, the others attention.
LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    title="LFM 2, dense",
    sizes={"350M": 0.354, "700M": 0.742, "1.2B": 1.17, "2.6B": 2.57},
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    describe=_lfm2,
)


def _lfm2_moe(settings: Settings) -> ModelConfig:
    of_all = experts_of(settings, layers_from(settings, "num_dense_layers"))
    routing = replace(
        of_all.routing,
        score="sigmoid",
        scale=float(settings["routed_scaling_factor"]),
        sum_offset=1e-6,
    )
    return replace(
        LFM2.describe(settings.changed(block_auto_adjust_ff_dim=False)),
        experts=replace(
            of_all,
            routing=routing,
            router="feed_forward.gate",
            gate="feed_forward.experts.{}.w1",
            up="feed_forward.experts.{}.w3",
            down="feed_forward.experts.{}.w2",
            correction="feed_forward.expert_bias" if settings["use_expert_bias"] else None,
        ),
    )


# LFM 2 with experts, chosen by corrected sigmoids, in all layers but the first ones.
LFM2_MOE = Family(
    model_type="lfm2moe",
    architecture="Lfm2MoeForCausalLM",
    title="LFM 2 MoE",
    sizes={"8B-A1B": 8.34},
    defaults={
        **LFM2.defaults,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    describe=_lfm2_moe,
)
