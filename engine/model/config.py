"""What a decoder looks like, read from a Hugging Face `config.json`.

One decoder covers every supported family; what sets the families apart is data: a `ModelConfig`. The defaults in
`_FAMILIES` are the ones a `config.json` may leave out because its publisher's configuration class supplies them.
This module knows nothing of tensors.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from engine.core.errors import StartupError

JsonObject: TypeAlias = Mapping[str, Any]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, and how it is stretched beyond the context it was trained with."""

    theta: float
    scaling: Mapping[str, Any] | None = None
    """Hugging Face's rope dictionary with its `rope_type` (linear, llama3 or yarn); None: not stretched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-like decoder: attention over grouped heads and a gated MLP, each behind an RMS norm."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Context length in tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    """Per layer: how many positions a token attends to, itself included; None: all before it."""
    attention_scale: float
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """The q, k and v projections have a bias."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys pass an RMS norm per head before they are rotated."""
    sandwich_norm: bool = False
    """Attention and MLP also pass a norm after, before they join the residual stream (Gemma 2 and 3)."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores w and multiplies by 1 + w)."""
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    local_rope: RopeConfig | None = None
    """The rotary embedding of the layers with a window, where it is another one (Gemma 3)."""

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read `config.json` in a model folder; raises `StartupError` as `from_hf` does."""
        return cls.from_hf(read_json(folder / "config.json"))

    @classmethod
    def from_hf(cls, config: JsonObject) -> "ModelConfig":
        """Describe the decoder of a Hugging Face configuration, of transformers 4 or 5.

        Raises `StartupError` for an architecture, or a variation of one, that the decoder does not cover.
        """
        architecture = _architecture(config)
        if config.get("quantization_config"):
            raise StartupError(
                f"the model's weights are quantised ({config['quantization_config'].get('quant_method', 'unknown')}); "
                "raydix reads bfloat16, float16 and float32 weights: use an unquantised checkpoint or a GGUF file"
            )
        known = {key: value for key, value in config.items() if value is not None}
        fields = {**_DEFAULTS, **_FAMILIES[architecture], **known}
        try:
            return _build(architecture, fields, config)
        except KeyError as error:
            raise StartupError(f"config.json of {architecture} lacks the key {error}") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise StartupError(f"config.json of {architecture} has an unusable value: {error}") from error

    @property
    def rope_of_layer(self) -> tuple[RopeConfig, ...]:
        """Each layer's rotary embedding."""
        local = self.local_rope or self.rope
        return tuple(self.rope if window is None else local for window in self.layer_windows)


_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
    "GemmaForCausalLM": {**_GEMMA, "vocab_size": 256_000},
    "Gemma2ForCausalLM": {
        **_GEMMA,
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "Gemma3ForCausalLM": {
        **_GEMMA,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; raises `StartupError` if it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StartupError(f"{path.parent} is not a model folder: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"cannot read {path}: it is not a JSON object")
    return value


def unsupported(what: str, supported: tuple[str, ...]) -> StartupError:
    """The refusal of a model that the decoder does not cover."""
    return StartupError(f"{what} is not supported; raydix runs: {', '.join(supported)}")


def _architecture(config: JsonObject) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return str(name)
    if names:
        raise unsupported(f"the model architecture {names[0]}", SUPPORTED_ARCHITECTURES)
    model_type = str(config.get("model_type", "unknown")).removesuffix("_text").replace("_", "").lower()
    for name in _FAMILIES:
        if name.removesuffix("ForCausalLM").lower() == model_type:
            return name
    raise unsupported(f"the model type {config.get('model_type')!r}", SUPPORTED_ARCHITECTURES)


def _build(architecture: str, fields: dict[str, Any], config: JsonObject) -> ModelConfig:
    num_heads = int(fields["num_attention_heads"])
    hidden_size = int(fields["hidden_size"])
    head_dim = int(fields.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(fields.get("num_key_value_heads") or num_heads)
    num_layers = int(fields["num_hidden_layers"])
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    gemma = architecture.startswith("Gemma")
    sandwich = architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
    llama_bias = bool(fields["attention_bias"]) and architecture != "MistralForCausalLM"
    max_position = int(fields["max_position_embeddings"])
    rope, local_rope = _ropes(architecture, fields, max_position)
    if rope.scaling is not None and rope.scaling["rope_type"] == "yarn":
        # Checkpoints that are stretched by YaRN often state the length before stretching.
        stretched = rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"]
        max_position = max(max_position, int(stretched))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(fields["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=float(fields["rms_norm_eps"]),
        rope=rope,
        local_rope=local_rope,
        layer_windows=_layer_windows(architecture, fields, config, num_layers),
        attention_scale=float(fields["query_pre_attn_scalar"] if sandwich else head_dim) ** -0.5,
        activation=_activation(architecture, fields),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        attention_bias=llama_bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=llama_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(fields["mlp_bias"]) and architecture == "LlamaForCausalLM",
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        sandwich_norm=sandwich,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        attention_soft_cap=_soft_cap("attn_logit_softcapping", architecture, config, default=50.0),
        logit_soft_cap=_soft_cap("final_logit_softcapping", architecture, config, default=30.0),
    )


def _soft_cap(key: str, architecture: str, config: JsonObject, *, default: float) -> float | None:
    """Gemma 2 has soft caps unless its configuration says null. (Gemma 3's attention ignores its key.)"""
    if architecture == "Gemma3ForCausalLM" and key == "final_logit_softcapping":
        value = config.get(key)
    elif architecture == "Gemma2ForCausalLM":
        value = config.get(key, default)
    else:
        value = None
    return None if value is None else float(value)


def _activation(architecture: str, fields: dict[str, Any]) -> Activation:
    key = "hidden_activation" if fields.get("hidden_activation") else "hidden_act"
    name = fields[key]
    if name == "gelu" and architecture == "GemmaForCausalLM":
        name = "gelu_pytorch_tanh"  # early Gemma checkpoints say gelu and mean the approximation
    if name not in _ACTIVATIONS:
        raise unsupported(f"the activation {name!r} of {architecture}", tuple(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _layer_windows(
    architecture: str, fields: dict[str, Any], config: JsonObject, num_layers: int
) -> tuple[int | None, ...]:
    window = fields.get("sliding_window")
    if architecture == "MistralForCausalLM":
        window = config.get("sliding_window", 4096)
        return (None if window is None else int(window),) * num_layers
    if architecture.startswith("Qwen"):
        if not fields.get("use_sliding_window"):
            return (None,) * num_layers
        window = config.get("sliding_window", 4096)
    elif architecture not in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        return (None,) * num_layers
    kinds = fields.get("layer_types") or _layer_kinds(architecture, fields, num_layers)
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {num_layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}")
    return tuple(int(window) if kind == "sliding_attention" and window is not None else None for kind in kinds)


def _layer_kinds(architecture: str, fields: dict[str, Any], num_layers: int) -> list[str]:
    """Which layers have a window, in configurations older than `layer_types`."""
    if architecture == "Gemma2ForCausalLM":
        windowed = [index % 2 == 0 for index in range(num_layers)]
    elif architecture == "Gemma3ForCausalLM":
        pattern = int(fields.get("sliding_window_pattern", 6))
        windowed = [(index + 1) % pattern != 0 for index in range(num_layers)]
    else:
        first = int(fields.get("max_window_layers", 28))
        windowed = [index >= first for index in range(num_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def _ropes(architecture: str, fields: dict[str, Any], max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of all layers, and that of the layers with a window where it is another."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(fields["rope_theta"])
    if architecture != "Gemma3ForCausalLM":
        return _rope(parameters, theta, max_position), None
    everywhere = parameters.get("full_attention") or {} if "rope_parameters" in fields else parameters
    local = parameters.get("sliding_attention") or {} if "rope_parameters" in fields else {}
    return (
        _rope(everywhere, theta, max_position),
        _rope(local, float(fields["rope_local_base_freq"]), max_position),
    )


def _rope(parameters: JsonObject, theta: float, max_position: int) -> RopeConfig:
    theta = float(parameters.get("rope_theta", theta))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise StartupError("the model rotates only a part of each head (partial_rotary_factor), which is not supported")
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond max_position, which is never served
        return RopeConfig(theta)
    if kind not in _ROPE_TYPES:
        raise unsupported(f"the rope type {kind!r}", ("default", "dynamic", *_ROPE_TYPES))
    scaling = {key: value for key, value in parameters.items() if key not in ("type", "rope_theta")}
    scaling["rope_type"] = kind
    scaling["factor"] = float(scaling["factor"])
    if kind != "linear":
        scaling.setdefault("original_max_position_embeddings", max_position)
    return RopeConfig(theta, scaling)
