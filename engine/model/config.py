"""Description of a decoder: what its configuration says, in the terms of the one decoder that runs every family.

`engine/model/families` reads it from a Hugging Face `config.json`. This module knows nothing of tensors.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from raydix.engine.core.errors import StartupError

JsonObject: TypeAlias = Mapping[str, Any]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, and its stretching beyond the context of training."""

    theta: float
    scaling: JsonObject | None = None
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
    """Queries and keys pass an RMS norm per head before rotation."""
    sandwich_norm: bool = False
    """Attention and MLP also pass a norm after, before they join the residual stream (Gemma 2 and 3)."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores w and multiplies by 1 + w)."""
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    local_rope: RopeConfig | None = None
    """The rotary embedding of the layers with a window, where it is another one (Gemma 3)."""

    @property
    def rope_of_layer(self) -> tuple[RopeConfig, ...]:
        """Each layer's rotary embedding."""
        local = self.local_rope or self.rope
        return tuple(self.rope if window is None else local for window in self.layer_windows)


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


def unsupported(what: str, supported: Iterable[str]) -> StartupError:
    """Refusal of a model that the decoder does not cover."""
    return StartupError(f"{what} is not supported; raydix runs: {', '.join(supported)}")
