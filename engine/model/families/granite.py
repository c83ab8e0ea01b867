"""Granite 3, Granite 3 with experts, Granite 4, and Bamba before it."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, MambaConfig, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of, kinds_of_layers, mamba_layers, step_limits


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
    gguf_name="granite",
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


# Values that the `config.json` of Granite 4 or Bamba may leave out.
_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def _memory(settings: Settings) -> MambaConfig:
    """Describe the heads of a Mamba-2 layer."""
    heads, head_dim = int(settings["mamba_n_heads"]), settings["mamba_d_head"]
    inner = int(settings["mamba_expand"]) * int(settings["hidden_size"])
    memory = MambaConfig(
        num_heads=heads,
        head_dim=inner // heads if head_dim == "auto" else int(head_dim),
        num_groups=int(settings["mamba_n_groups"]),
        state_size=int(settings["mamba_d_state"]),
        step_limits=step_limits(settings),
        conv_bias=bool(settings["mamba_conv_bias"]),
        projection_bias=bool(settings["mamba_proj_bias"]),
    )
    if memory.values != inner:
        raise ValueError(f"{heads} heads of {memory.head_dim} are not the {inner} channels that mamba_expand calls for")
    return memory


def _granite_hybrid(settings: Settings) -> ModelConfig:
    num_layers, shared_size = int(settings["num_hidden_layers"]), int(settings["shared_intermediate_size"])
    stated = settings.get("layer_types") or settings.get("layers_block_type") or ["mamba"] * num_layers
    if len(stated) != num_layers:
        raise ValueError(f"layer_types names {len(stated)} layers of {num_layers}")
    kinds = kinds_of_layers(stated, ("mamba", "attention"))

    # Without experts the layers have that MLP alone which stands beside experts otherwise.
    has_experts = int(settings["num_local_experts"]) > 0
    shared = "mlp.shared_expert" if has_experts else "mlp"
    plain = (GRANITE_MOE if has_experts else GRANITE).describe(settings)
    experts = plain.experts
    if experts is not None:
        experts = replace(experts, shared_size=shared_size)
    return replace(
        plain,
        mlp_bias=False,
        fused_gate_up=True,
        intermediate_size=plain.intermediate_size if has_experts else shared_size,
        experts=experts,
        layers_without_rope=() if settings.get("position_embedding_type") == "rope" else tuple(range(num_layers)),
        recurrent=mamba_layers(kinds, _memory(settings), int(settings["mamba_d_conv"])),
        own_names=(
            (f"{shared}.gate_up_proj", "shared_mlp.input_linear"),
            (f"{shared}.down_proj", "shared_mlp.output_linear"),
        ),
    )


# Granite 4: most layers have Mamba-2, the others attention without rotation, all an MLP, and some models experts beside
# it. Some models have attention, with rotation, and an MLP in every layer.
GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    title="Granite 4",
    sizes={
        "H 350M": 0.34,
        "350M": 0.35,
        "H 1B": 1.46,
        "1B": 1.63,
        "H Micro 3B": 3.19,
        "Micro 3B": 3.4,
        "H Tiny 7B-A1B": 6.94,
        "H Small 32B-A9B": 32.2,
    },
    defaults={
        **GRANITE_MOE.defaults,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
        **_MAMBA,
    },
    describe=_granite_hybrid,
)


def _bamba(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    with_attention = settings.get("attn_layer_indices") or ()
    kinds = ["attention" if index in with_attention else "mamba" for index in range(plain.num_layers)]
    return replace(
        plain,
        mlp_bias=bool(settings["mlp_bias"]),
        norms=LayerNorms(mlp="pre_ff_layernorm"),
        recurrent=mamba_layers(kinds, _memory(settings), int(settings["mamba_d_conv"])),
        own_names=(("mlp", "feed_forward"), ("model.norm", "model.final_layernorm")),
    )


# Bamba: Mamba-2 in most layers, and attention that rotates half of each head.
BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    title="Bamba",
    sizes={"9B": 9.78},
    defaults={
        **_MAMBA,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
    },
    describe=_bamba,
)
