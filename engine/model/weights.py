"""A model folder's weights: checked by name and shape before a byte is read, then loaded tensor by tensor.

`Checkpoint` reads safetensors, in one file or several; `RandomTensors` stands in where only the shapes matter.
"""

import math
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.gguf_blocks import KINDS, grouped
from raydix.engine.model.packed_weights import Float8
from raydix.engine.model.sizes import BLOCKS, SCALES, as_stored, check_names, expected_shapes
from raydix.engine.model.stored_tensors import StoredTensor, read_headers
from raydix.kernels.linear import GroupedWeight

_DTYPES = ("BF16", "F16", "F32")


class TensorSource(Protocol):
    """Source of a decoder's tensors."""

    def tensor(self, name: str) -> Tensor:
        """Return the tensor with this Hugging Face name, on CPU, in its stored floating dtype."""
        ...

    def grouped(self, name: str) -> GroupedWeight | None:
        """Return the weight with this Hugging Face name as it is stored in few bits; None: it is not."""
        ...


class Checkpoint:
    """The safetensors weights of a model folder.

    Opening reads the headers only, and raises `StartupError` if the folder has no weights, or tensors are missing, of
    another shape or unknown to the decoder. Tensors are views of the memory-mapped files.
    """

    def __init__(self, folder: Path, config: ModelConfig, on_tensor: Callable[[], None] = lambda: None) -> None:
        """`on_tensor` is called before each tensor; an error that it raises ends the loading."""
        self.folder = folder
        self._on_tensor = on_tensor
        self._stored: dict[str, StoredTensor] = {}
        self._kinds: dict[str, str] = {}  # kinds of the blocks of the weights that are stored in such
        for stored_name, tensor in read_headers(folder).items():
            name, kind = kind_of(stored_name)
            self._stored[name] = tensor
            if kind:
                self._kinds[name] = kind
        self.config = as_stored(config, self._stored)
        """The description, with the names that these weights have."""
        # Shapes of the weights that are stored in several parts, packed.
        self._packed = _packed_shapes(self._stored, self.config)
        self._open_files: dict[Path, Any] = {}
        _check(self._stored, self._kinds, self._packed, self.config, folder)

    def tensor(self, name: str) -> Tensor:
        """Return the named tensor, as stored, or widened to bfloat16 if it is stored in blocks of few bits."""
        weight = self.grouped(name)
        return self._read(name) if weight is None else weight.widened().to(torch.bfloat16)

    def grouped(self, name: str) -> GroupedWeight | None:
        """Return the named weight, if it is stored in blocks of few bits."""
        if name in self._packed and (packing := self.config.packing) is not None:
            if isinstance(packing, Float8):
                return packing.read(self._read, name, self._stored)
            return packing.read(self._read, name, self._packed[name])
        kind = self._kinds.get(name)
        return None if kind is None else grouped(self._read(name), kind)

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        self._on_tensor()
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

    def grouped(self, name: str) -> GroupedWeight | None:
        """Return nothing: every weight is in bfloat16."""
        return None

    def tensor(self, name: str) -> Tensor:
        """Return a new random tensor of the named tensor's shape."""
        shape = self._shapes[name]
        if name.endswith((BLOCKS, SCALES)):  # of exponents such as weights have
            low, high = (0, 256) if name.endswith(BLOCKS) else (118, 122)
            return torch.randint(low, high, shape, generator=self._generator, device=self._generator.device).byte()
        values = torch.randn(shape, generator=self._generator, device=self._generator.device, dtype=torch.bfloat16)
        return values.mul_(shape[-1] ** -0.5) if len(shape) > 1 else values.mul_(0.1).add_(1.0)


def kind_of(name: str) -> tuple[str, str]:
    """The name of a weight, and the kind of its blocks; the kind is empty where it is not stored in such."""
    stem, _, kind = name.rpartition(".")
    return (stem, kind) if kind in KINDS else (name, "")


def _packed_shapes(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Each weight that is packed, with its shape.

    Raises:
        StartupError: a part is missing, or has another shape or dtype than the configuration calls for.
    """
    packed: dict[str, tuple[int, ...]] = {}
    if config.packing is None:
        return packed
    names = config.packing.weights({name: tensor.dtype for name, tensor in stored.items()})
    for name, shape in expected_shapes(config).items():
        if name not in names:
            continue
        for part, (shapes, dtypes) in config.packing.parts(name, shape, stored).items():
            found = stored.get(part)
            if found is None or found.shape not in shapes or found.dtype not in dtypes:
                has = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
                wanted = " or ".join(str(list(of)) for of in shapes)
                raise StartupError(f"{part} {has}; it should be {' or '.join(dtypes)} {wanted}")
        packed[name] = shape
    return packed


def _check(
    stored: Mapping[str, StoredTensor],
    kinds: Mapping[str, str],
    packed: Container[str],
    config: ModelConfig,
    folder: Path,
) -> None:
    check_names(stored, config, str(folder))
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name in packed:
            continue  # in several parts, whose shapes have been checked
        tensor = stored[name]
        if kind := KINDS.get(kinds.get(name, "")):
            shape = (*shape[:-1], shape[-1] // kind.num_weights * kind.num_bytes)
        if tensor.shape != shape:
            raise StartupError(
                f"{name} in {tensor.file} has the shape {list(tensor.shape)}, config.json calls for {list(shape)}"
            )

        has_blocks = kind is not None or name.endswith((BLOCKS, SCALES))
        width = 1 if has_blocks else 4 if tensor.dtype == "F32" else 2
        if tensor.dtype not in (("U8",) if has_blocks else _DTYPES):
            raise StartupError(
                f"{name} in {tensor.file} is stored as {tensor.dtype}; raydix reads {', '.join(_DTYPES)}"
            )

        if tensor.end - tensor.begin != width * math.prod(shape):
            raise StartupError(f"{name} in {tensor.file} does not fill its shape, download the file again")
