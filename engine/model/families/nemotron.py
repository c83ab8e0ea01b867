"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers of Mamba-2, of attention, of an MLP, or of experts."""

from dataclasses import replace

from raydix.engine.model.config import ExpertsConfig, LayerNorms, MambaConfig, ModelConfig, unsupported
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import corrected_experts, decoder, kinds_of_layers, mamba_layers, step_limits

OWN_NAMES = (
    ("model.embed_tokens", "backbone.embeddings"),
    ("model.layers", "backbone.layers"),
    ("model.norm", "backbone.norm_f"),
    ("self_attn", "mixer"),
    ("mamba", "mixer"),
    ("mlp", "mixer"),
)
# The letters of `hybrid_override_pattern`, one for each layer.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _kinds(settings: Settings) -> list[str]:
    """The kind of each layer, as transformers 5 names them or in the letters of the published files."""
    stated = settings.get("layers_block_type") or settings.get("layer_types")
    if stated is None:
        pattern = str(settings["hybrid_override_pattern"])
        if unknown := set(pattern) - set(_LETTERS):
            raise ValueError(f"hybrid_override_pattern has {sorted(unknown)[0]!r}")
        stated = [_LETTERS[letter] for letter in pattern]
    return kinds_of_layers(stated, ("mamba", "attention", "mlp", "moe"))


def _experts(settings: Settings, layers: tuple[int, ...]) -> ExpertsConfig:
    """The experts of some layers: MLPs without a gate, and one such for every token."""
    if settings.get("moe_latent_size") is not None:
        raise unsupported("a latent of experts' inputs (moe_latent_size)", ("experts of the whole input",))
    of_all = corrected_experts(settings.changed(num_experts=settings["n_routed_experts"]), layers)
    shared_size = int(settings["moe_shared_expert_intermediate_size"])
    return replace(of_all, gate=None, shared_size=shared_size if of_all.shared_size else 0)


def _nemotron_h(settings: Settings) -> ModelConfig:
    if settings["mamba_hidden_act"] != "silu":
        raise unsupported(f"the activation {settings['mamba_hidden_act']!r} of Mamba-2 layers", ("silu",))
    kinds = _kinds(settings)
    numbers = range(len(kinds))
    of_experts = tuple(index for index in numbers if kinds[index] == "moe")
    # The number of layers that a file states is that of the pattern, or of another version of the file.
    settings = settings.changed(num_hidden_layers=len(kinds), rms_norm_eps=settings["layer_norm_epsilon"])
    if settings["mlp_hidden_act"] != "relu2":
        raise unsupported(f"the activation {settings['mlp_hidden_act']!r} of {settings.architecture}", ("relu2",))
    plain = decoder(settings)
    memory = MambaConfig(
        num_heads=int(settings["mamba_num_heads"]),
        head_dim=int(settings["mamba_head_dim"]),
        num_groups=int(settings["n_groups"]),
        state_size=int(settings["ssm_state_size"]),
        # As the model's makers limit steps. transformers has `time_step_min` as the least one, which training began
        # with, and of a prompt only.
        step_limits=step_limits(settings),
        conv_bias=bool(settings["use_conv_bias"]),
        projection_bias=bool(settings["use_bias"]),
    )
    return replace(
        plain,
        activation="relu2",
        gated_mlp=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=bool(settings["mlp_bias"]),
        norms=LayerNorms(attention="norm", mlp="norm"),
        layers_without_rope=tuple(numbers),
        recurrent=mamba_layers(kinds, memory, int(settings["conv_kernel"])),
        layers_of_mlp=tuple(index for index in numbers if kinds[index] in ("mlp", "moe")),
        layers_without_mlp=tuple(index for index in numbers if kinds[index] in ("mamba", "attention")),
        experts=_experts(settings, of_experts) if of_experts else None,
        own_names=OWN_NAMES,
    )


# Nemotron-H: a layer is one of Mamba-2, attention without rotation, and an MLP without a gate, or in Nemotron 3 many of
# which each token takes a few.
NEMOTRON_H = Family(
    model_type="nemotronh",
    architecture="NemotronHForCausalLM",
    title="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
    sizes={
        "H 4B": 4.49,
        "H 8B": 8.1,
        "Nano 2 9B": 8.89,
        "Nano 2 12B": 12.3,
        "3 Nano 30B-A3B": 31.6,
        "H 47B": 46.8,
        "H 56B": 56.3,
    },
    defaults={
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    describe=_nemotron_h,
)
