"""StableLM, Phi 1 and 2, StarCoder 2 and GPT-NeoX: layer norms with a bias, most of them with an MLP without a gate."""

from dataclasses import replace

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import Activation, LayerNorms, ModelConfig, unsupported
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder

# Activations of MLPs without a gate.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _with_layer_norms(settings: Settings) -> ModelConfig:
    plain = decoder(settings.changed(rms_norm_eps=settings["layer_norm_eps"]))
    return replace(plain, layer_norm=True, norm_bias=True)


def _without_gates(settings: Settings, *, has_bias: bool) -> ModelConfig:
    """Describe a decoder whose MLPs are two projections; `has_bias`: all projections of layers have one."""
    name = settings["hidden_act"]
    if name not in _ACTIVATIONS:
        raise unsupported(f"the activation {name!r} of {settings.architecture}", _ACTIVATIONS)
    return replace(
        _with_layer_norms(settings.changed(hidden_act="silu")),
        activation=_ACTIVATIONS[name],
        gated_mlp=False,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=has_bias,
    )


def _stablelm(settings: Settings) -> ModelConfig:
    if settings.get("qk_layernorm"):
        raise StartupError(f"{settings.architecture} norms each query and key here (qk_layernorm), not supported")
    is_parallel = bool(settings.get("use_parallel_residual"))
    plain = _with_layer_norms(settings)
    return replace(
        plain,
        attention_bias=bool(settings.get("use_qkv_bias")),
        attention_output_bias=False,
        is_parallel=is_parallel,
        norms=LayerNorms(mlp=None) if is_parallel else plain.norms,
    )


# StableLM: Llama with layer norms, and a quarter of each head is rotated.
STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    title="StableLM",
    sizes={"2 1.6B": 1.64, "3B": 2.8},
    defaults={"max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    describe=_stablelm,
)


def _phi(settings: Settings) -> ModelConfig:
    if settings.get("qk_layernorm"):
        raise StartupError(f"{settings.architecture} norms each query and key here (qk_layernorm), not supported")
    return replace(
        _without_gates(settings, has_bias=True),
        is_parallel=True,
        norms=LayerNorms(mlp=None),
        head_bias=True,
        own_names=(
            ("self_attn.o_proj", "self_attn.dense"),
            ("mlp.up_proj", "mlp.fc1"),
            ("mlp.down_proj", "mlp.fc2"),
            ("model.norm", "model.final_layernorm"),
        ),
    )


# Phi 1, 1.5 and 2: one norm before attention and MLP, which stand side by side; everything has a bias.
PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    title="Phi 1 and 2",
    sizes={"1.5 1.4B": 1.42, "2 2.8B": 2.78},
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    },
    describe=_phi,
)


def _starcoder2(settings: Settings) -> ModelConfig:
    settings = settings.changed(layer_norm_eps=settings.get("norm_epsilon"))
    plain = _without_gates(settings, has_bias=bool(settings["use_bias"]))
    window = settings.get("sliding_window")
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        own_names=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    )


# StarCoder 2: one layer after the other, and in the large sizes every layer has a window.
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    title="StarCoder 2",
    sizes={"3B": 3.03, "7B": 7.17, "15B": 16.0},
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    describe=_starcoder2,
)


def _gpt_neox(settings: Settings) -> ModelConfig:
    settings = settings.changed(
        num_key_value_heads=settings["num_attention_heads"],
        partial_rotary_factor=settings.get("rotary_pct"),
        rope_theta=settings.get("rotary_emb_base"),
    )
    has_bias = bool(settings["attention_bias"])
    return replace(
        _without_gates(settings, has_bias=True),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        is_parallel=bool(settings["use_parallel_residual"]),
        fused_qkv=True,
        qkv_by_head=True,
        own_names=(
            ("self_attn.qkv_proj", "attention.query_key_value"),
            ("self_attn.o_proj", "attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("model.norm", "gpt_neox.final_layer_norm"),
            ("model.embed_tokens", "gpt_neox.embed_in"),
            ("model.layers", "gpt_neox.layers"),
            ("lm_head", "embed_out"),
        ),
    )


# GPT-NeoX and Pythia: attention and MLP side by side, each with a norm of its own; a quarter of each head is rotated.
GPT_NEOX = Family(
    model_type="gptneox",
    architecture="GPTNeoXForCausalLM",
    title="GPT-NeoX, Pythia",
    sizes={
        "Pythia 160M": 0.162,
        "Pythia 410M": 0.405,
        "Pythia 1.4B": 1.41,
        "Pythia 2.8B": 2.78,
        "Pythia 6.9B": 6.86,
        "Pythia 12B": 11.8,
        "20B": 20.6,
    },
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    describe=_gpt_neox,
)
