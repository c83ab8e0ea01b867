"""A model folder's weights: checked by name and shape before a byte is read, then loaded tensor by tensor.

`Checkpoint` reads safetensors, in one file or several; `RandomTensors` stands in where only the shapes matter.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.core.errors import StartupError
from engine.model.config import ModelConfig
from engine.model.stored_tensors import StoredTensor, read_headers

_DTYPES = ("BF16", "F16", "F32")
_MAX_NAMED = 4


class TensorSource(Protocol):
    """Source of a decoder's tensors."""

    def tensor(self, name: str) -> Tensor:
        """Return the tensor with this Hugging Face name, on CPU, in its stored floating dtype."""
        ...


class Checkpoint:
    """The safetensors weights of a model folder.

    Opening reads the headers only, and raises `StartupError` if the folder has no weights, or tensors are missing, of
    another shape or unknown to the decoder. Tensors are views of the memory-mapped files.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder = folder
        self._stored = read_headers(folder)
        self._open_files: dict[Path, Any] = {}
        _check(self._stored, expected_shapes(config), folder)

    def tensor(self, name: str) -> Tensor:
        """Return the named tensor, as stored."""
        from safetensors import safe_open

        stored = self._stored[name]
        path = stored.file
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._open_files[path].get_tensor(stored.name)
        return tensor


class RandomTensors:
    """Reproducible random weights in the shapes of a configuration, for benchmarks of models that are not at hand."""

    def __init__(self, config: ModelConfig, seed: int = 0, device: str = "cpu") -> None:
        self._shapes = expected_shapes(config)
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str) -> Tensor:
        """Return a new random tensor of the named tensor's shape."""
        shape = self._shapes[name]
        values = torch.randn(shape, generator=self._generator, device=self._generator.device, dtype=torch.bfloat16)
        return values.mul_(shape[-1] ** -0.5) if len(shape) > 1 else values.mul_(0.1).add_(1.0)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Yield the name and shape of every tensor of a decoder of this configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)

    projections = {
        "self_attn.q_proj": (query_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query_size, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.sandwich_norm:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}

    for prefix in (f"model.layers.{layer}." for layer in range(config.num_layers)):
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)

    return shapes


def _check(stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    if missing := [name for name in expected if name not in stored]:
        raise StartupError(f"the weights in {folder} lack {_named(missing)}")

    if unexpected := [name for name in stored if name not in expected and not _is_redundant(name)]:
        raise StartupError(
            f"the weights in {folder} have tensors that config.json does not call for: {_named(unexpected)}"
        )

    for name, shape in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise StartupError(
                f"{name} in {tensor.file} has the shape {list(tensor.shape)}, config.json calls for {list(shape)}"
            )

        width = 4 if tensor.dtype == "F32" else 2
        if tensor.dtype not in _DTYPES:
            raise StartupError(
                f"{name} in {tensor.file} is stored as {tensor.dtype}; raydix reads {', '.join(_DTYPES)}"
            )

        if tensor.end - tensor.begin != width * math.prod(shape):
            raise StartupError(f"{name} in {tensor.file} does not fill its shape, download the file again")


def _is_redundant(name: str) -> bool:
    """Tensors that old or tied checkpoints carry and that follow from others."""
    return name == "lm_head.weight" or name.endswith(("rotary_emb.inv_freq", "self_attn.masked_bias"))


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more
