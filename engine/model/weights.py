"""A model folder's weights: checked by name and shape before a byte is read, then loaded tensor by tensor.

`Checkpoint` reads safetensors, in one file or several; `RandomTensors` stands in where only the shapes matter.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.core.errors import StartupError
from engine.model.config import ModelConfig, read_json

_DTYPES = ("BF16", "F16", "F32")
_SAMPLE_BYTES = 4096
_MAX_NAMED = 4


class TensorSource(Protocol):
    """Where a decoder's tensors come from."""

    def tensor(self, name: str) -> Tensor:
        """The tensor with that Hugging Face name, on CPU, in whatever floating dtype it is stored."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a safetensors file holds one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    end: int


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
        """The tensor of that name, as stored."""
        from safetensors import safe_open

        path = self._stored[name].file
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._open_files[path].get_tensor(name)
        return tensor


class RandomTensors:
    """Reproducible random weights in the shapes of a configuration, for benchmarks of models that are not at hand."""

    def __init__(self, config: ModelConfig, seed: int = 0, device: str = "cpu") -> None:
        self._shapes = expected_shapes(config)
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str) -> Tensor:
        """A new random tensor of the shape that belongs to the name."""
        shape = self._shapes[name]
        values = torch.randn(shape, generator=self._generator, device=self._generator.device, dtype=torch.bfloat16)
        return values.mul_(shape[-1] ** -0.5) if len(shape) > 1 else values.mul_(0.1).add_(1.0)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a decoder of this configuration has."""
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


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in a folder's safetensors files, by name; raises `StartupError` if there are none."""
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        stored.update(_read_header(path))
    return stored


def fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """A digest of everything that a KV cache computed with this model depends on: 32 hexadecimal digits.

    Two folders with the same model have the same fingerprint, wherever and whenever they were written. It covers the
    decoder's description, the dtype it computes in, each tensor's name, shape and dtype, and of each tensor's bytes
    the first, middle and last 4 KiB. Training, even of a few projections merged into their base, changes numbers all
    over the tensors it touches, so samples tell checkpoints apart without reading gigabytes at each start; an edit by
    hand of a few bytes elsewhere is not seen.
    """
    digest = hashlib.blake2b(digest_size=16)
    description = asdict(ModelConfig.from_folder(folder))
    digest.update(json.dumps([description, str(dtype)], sort_keys=True, default=repr).encode())
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    stored = read_headers(folder)
    for name in sorted(stored):
        by_file.setdefault(stored[name].file, []).append((name, stored[name]))
    samples: dict[str, bytes] = {}
    for path, tensors in by_file.items():
        with path.open("rb") as file:
            for name, tensor in tensors:
                samples[name] = b"".join(_sample(file, tensor.begin, tensor.end))
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {len(samples[name])}\n".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _sample(file: Any, begin: int, end: int) -> Iterator[bytes]:
    middle = (begin + end) // 2
    for start in sorted({begin, max(begin, middle), max(begin, end - _SAMPLE_BYTES)}):
        file.seek(start)
        yield file.read(min(_SAMPLE_BYTES, end - start))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise StartupError(f"{index} has no weight_map")
        files = [folder / name for name in sorted({str(value) for value in weight_map.values()})]
    else:
        files = [path for path in [folder / "model.safetensors"] if path.is_file()] or sorted(
            path for path in folder.glob("*.safetensors") if not path.name.startswith(("adapter", "consolidated"))
        )
    if not files:
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        advice = "; its weights are in PyTorch's pickle format: convert them to safetensors" if others else ""
        raise StartupError(f"{folder} has no model weights (*.safetensors){advice}")
    for path in files:
        if not path.is_file():
            raise StartupError(f"{folder} is incomplete: {path.name} is named in {index.name} but is not there")
    return files


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size
            if length > size - 8:
                raise ValueError("it is cut short or not a safetensors file")
            header: Mapping[str, Any] = json.loads(file.read(length))
        start = 8 + length
        stored = {
            name: StoredTensor(
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                start + entry["data_offsets"][0],
                start + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if max((tensor.end for tensor in stored.values()), default=0) > size:
            raise ValueError("it is cut short")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise StartupError(f"cannot read weights from {path}, download it again: {error}") from error
    return stored


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
    """Tensors that old or tied checkpoints carry and that follow from the rest."""
    return name == "lm_head.weight" or name.endswith(("rotary_emb.inv_freq", "self_attn.masked_bias"))


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more
