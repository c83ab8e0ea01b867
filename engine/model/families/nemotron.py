"""Nemotron-H: layers of Mamba-2, of attention, or of an MLP."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, MambaConfig, ModelConfig, unsupported
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, kinds_of_layers, mamba_layers, step_limits

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
    if "moe" in stated:
        raise unsupported(f"a layer of experts (moe) of {settings.architecture}", ("mamba", "attention", "mlp"))
    return kinds_of_layers(stated, ("mamba", "attention", "mlp"))


def _nemotron_h(settings: Settings) -> ModelConfig:
    if settings["mamba_hidden_act"] != "silu":
        raise unsupported(f"the activation {settings['mamba_hidden_act']!r} of Mamba-2 layers", ("silu",))
    kinds = _kinds(settings)
    # The number of layers that a file states is that of the pattern, or of another version of the file.
    plain = decoder(
        settings.changed(
            num_hidden_layers=len(kinds),
            hidden_act=settings["mlp_hidden_act"],
            rms_norm_eps=settings["layer_norm_epsilon"],
        )
    )
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
    numbers = range(len(kinds))
    return replace(
        plain,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=bool(settings["mlp_bias"]),
        norms=LayerNorms(attention="norm", mlp="norm"),
        layers_without_rope=tuple(numbers),
        recurrent=mamba_layers(kinds, memory, int(settings["conv_kernel"])),
        layers_of_mlp=tuple(index for index in numbers if kinds[index] == "mlp"),
        layers_without_mlp=tuple(index for index in numbers if kinds[index] != "mlp"),
        own_names=OWN_NAMES,
    )


# Nemotron-H: a layer is one of Mamba-2, attention without rotation, and an MLP without a gate.
NEMOTRON_H = Family(
    model_type="nemotronh",
    architecture="NemotronHForCausalLM",
    title="Nemotron-H and Nemotron Nano 2, dense",
    sizes={"H 4B": 4.49, "H 8B": 8.1, "Nano 2 9B": 8.89, "Nano 2 12B": 12.3, "H 47B": 46.8, "H 56B": 56.3},
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
    },
    describe=_nemotron_h,
)
