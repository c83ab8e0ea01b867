"""Parts of a description that families share."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import (
    Activation,
    ExpertsConfig,
    JsonObject,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
    unsupported,
)
from raydix.engine.model.families.family import Settings
from raydix.kernels.routing import Routing

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_TYPES = ("linear", "llama3", "yarn", "longrope", "proportional")
# Dynamic scaling begins beyond max_position, which is never served; in text all sections of mrope count alike.
_UNSCALED = ("default", "dynamic", "mrope")


def decoder(settings: Settings) -> ModelConfig:
    """Describe a plain decoder: full attention in every layer, biases of attention as `attention_bias` says."""
    num_heads = int(settings["num_attention_heads"])
    hidden_size = int(settings["hidden_size"])
    head_dim = int(settings.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(settings.get("num_key_value_heads") or num_heads)
    num_layers = int(settings["num_hidden_layers"])
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")

    rope = rope_of(settings, rope_parameters(settings), float(settings["rope_theta"]))
    has_bias = bool(settings["attention_bias"])

    return ModelConfig(
        architecture=settings.architecture,
        vocab_size=int(settings["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(settings["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_max_position(settings, rope),
        rms_norm_eps=float(settings["rms_norm_eps"]),
        rope=rope,
        layer_windows=(None,) * num_layers,
        attention_scale=float(head_dim) ** -0.5,
        activation=_activation(settings),
        tie_word_embeddings=bool(settings["tie_word_embeddings"]),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
    )


def experts_of(settings: Settings, layers: Iterable[int] | None = None) -> ExpertsConfig:
    """Describe the experts of the named layers, None: of all, in the words of Qwen 3's configuration."""
    # Some versions of transformers write one name for the other, and some families have names of their own.
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    num_experts = int(next(filter(None, map(settings.stated.get, names)), settings["num_experts"]))
    routing = Routing(
        per_token=int(settings.stated.get("moe_k") or settings["num_experts_per_tok"]),
        normalised=bool(settings["norm_topk_prob"]),
    )
    routing.check(num_experts)
    every = range(int(settings["num_hidden_layers"]))
    shared_size = int(settings.get("shared_expert_intermediate_size") or 0)
    return ExpertsConfig(
        num_experts=num_experts,
        intermediate_size=int(settings.get("moe_intermediate_size") or settings["intermediate_size"]),
        routing=routing,
        layers=tuple(every if layers is None else layers),
        shared_size=shared_size,
        shared_gate="mlp.shared_expert_gate" if shared_size else None,
    )


def corrected_experts(settings: Settings, layers: Iterable[int] | None = None) -> ExpertsConfig:
    """Describe the experts of the named layers, None: of all, as DeepSeek V3 has them: chosen by sigmoids with a
    correction, from the best groups, and beside them experts for every token."""
    of_all = experts_of(settings, layers)
    routing = replace(
        of_all.routing,
        score="sigmoid",
        num_groups=int(settings["n_group"]),
        top_groups=int(settings["topk_group"]),
        group_best=2,
        scale=float(settings["routed_scaling_factor"]),
    )
    routing.check(of_all.num_experts)
    return replace(
        of_all,
        routing=routing,
        shared_size=of_all.intermediate_size * int(settings.get("n_shared_experts") or 0),
        shared="mlp.shared_experts",
        float_router=True,
        correction="mlp.gate.e_score_correction_bias",
    )


def layers_from(settings: Settings, key: str) -> range:
    """The layers behind the first ones, of which the configuration has the number under `key`: these are dense."""
    return range(int(settings[key]), int(settings["num_hidden_layers"]))


def layer_windows(settings: Settings, window: int | None, is_windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Give `window` to the layers that `layer_types` names, or without this key to those of which `is_windowed` holds.

    `is_windowed` takes a layer's index, from 0.
    """
    num_layers = int(settings["num_hidden_layers"])
    kinds = settings.get("layer_types") or [
        "sliding_attention" if is_windowed(index) else "full_attention" for index in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {num_layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}")

    return tuple(int(window) if kind == "sliding_attention" and window is not None else None for kind in kinds)


# Names of a layer's kind, of transformers 5 and before.
KINDS = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def mamba_layers(kinds: Sequence[str], memory: MambaConfig, kernel_size: int) -> RecurrentConfig | None:
    """The layers of a hybrid of Mamba-2, of the names that `KINDS` gives to its layers; None: there are none such."""
    if memory.num_heads % memory.num_groups:
        raise ValueError(f"{memory.num_heads} heads cannot share the states of {memory.num_groups} groups")
    layers = tuple(index for index, kind in enumerate(kinds) if kind == "mamba")
    described = RecurrentConfig(layers=layers, kernel_size=kernel_size, channels=memory.channels, memory=memory)
    return described if layers else None


def kinds_of_layers(stated: Sequence[str], known: Collection[str]) -> list[str]:
    """The kind of each layer in the words of `KINDS`. Raises `ValueError` for one that is not among `known`."""
    if unknown := [kind for kind in stated if KINDS.get(kind) not in known]:
        raise ValueError(f"a layer of the kind {unknown[0]!r}")
    return [KINDS[kind] for kind in stated]


def step_limits(settings: Settings) -> tuple[float, float]:
    """Least and greatest length of a step. transformers 5 writes infinity as an object, JSON having no such number."""
    limits = settings.get("time_step_limit") or (0.0, math.inf)
    least, most = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in limits)
    return least, most


def optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def rope_parameters(settings: Settings) -> JsonObject:
    """Return the rope dictionary of transformers 5, or the one of transformers 4; empty if there is none."""
    parameters: JsonObject = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    return parameters


def rope_of(settings: Settings, parameters: JsonObject, theta: float) -> RopeConfig:
    """Describe the rotary embedding of a rope dictionary; `theta` is its base if the dictionary has none."""
    theta = float(parameters.get("rope_theta", theta))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    share = float(parameters.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and kind != "proportional" and "partial_rotary_factor" not in settings.defaults:
        raise StartupError(
            f"{settings.architecture} rotates only a part of each head here (partial_rotary_factor), which is not "
            "supported"
        )
    if kind in _UNSCALED:
        return RopeConfig(theta, share=share)
    if kind == "proportional":  # the share of pairs that turn, of frequencies counted over the whole head
        turning = float(parameters.get("partial_rotary_factor") or 1.0)
        factor = float(parameters.get("factor") or 1.0)
        return RopeConfig(theta, {"rope_type": kind, "partial_rotary_factor": turning, "factor": factor})
    if kind not in _ROPE_TYPES:
        raise unsupported(f"the rope type {kind!r}", (*_UNSCALED, *_ROPE_TYPES))

    # What is rotated is the description's to say, once.
    known = ("type", "rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in parameters.items() if key not in known}
    scaling["rope_type"] = kind
    max_position = int(settings["max_position_embeddings"])
    if kind != "linear":
        original = settings.get("original_max_position_embeddings") or max_position
        scaling.setdefault("original_max_position_embeddings", int(original))
    if kind == "longrope" and scaling.get("factor") is None:
        scaling["factor"] = max_position / scaling["original_max_position_embeddings"]
    scaling["factor"] = float(scaling["factor"])
    return RopeConfig(theta, scaling, share)


def interleaved(config: ModelConfig) -> ModelConfig:
    """The decoder with dimensions 2i and 2i + 1 of a head turning together."""
    return replace(config, rope=replace(config.rope, interleaved=True))


def _activation(settings: Settings) -> Activation:
    name = settings.get("hidden_activation") or settings["hidden_act"]
    if name not in _ACTIVATIONS:
        raise unsupported(f"the activation {name!r} of {settings.architecture}", _ACTIVATIONS)
    return _ACTIVATIONS[name]


def _max_position(settings: Settings, rope: RopeConfig) -> int:
    max_position = int(settings["max_position_embeddings"])
    if rope.scaling is None or rope.scaling["rope_type"] != "yarn":
        return max_position
    # Checkpoints that are stretched by YaRN often state the length before stretching.
    return max(max_position, int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"]))
