"""Tensors of a model folder's safetensors files, as their headers describe them: no tensor is read."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import read_json

WEIGHT_INDEX = "model.safetensors.index.json"  # the file of each tensor, where there are several files


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position of one tensor in a safetensors file."""

    file: Path
    name: str
    """Name of the tensor in the file."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    end: int


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the text model in a folder's safetensors files, by the name that a text model gives to it
    (`text_names`); raises `StartupError` if there are no files."""
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        stored.update(read_tensors(path))
    names = text_names(stored)
    return {names[name]: tensor for name, tensor in stored.items() if name in names}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The names that a text model gives to its tensors, by those in a file; without the tensors of other parts.

    A model of several parts names its text part `language_model.model.layers...`, as transformers 4 did at first, or
    `model.language_model.layers...`, and its head `language_model.lm_head` or `lm_head`. Qwen's first ones have only
    the other part apart, as `visual`.
    """
    known = [name for name in names if not name.startswith("visual.")]
    if not any(name.startswith(("language_model.", "model.language_model.")) for name in known):
        return {name: name for name in known}
    found = {}
    for name in known:
        if name.startswith("language_model."):
            found[name] = name.removeprefix("language_model.")
        elif name.startswith("model.language_model."):
            found[name] = f"model.{name.removeprefix('model.language_model.')}"
        elif name.startswith("lm_head."):
            found[name] = name
    return found


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHT_INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise StartupError(f"{index} has no weight_map")
        files = [folder / name for name in sorted({str(value) for value in weight_map.values()})]
    else:
        # One file by the usual name goes before others. Adapters may lie beside it, and Mistral's own copy of the same
        # weights.
        files = [path for path in [folder / "model.safetensors"] if path.is_file()] or sorted(
            path for path in folder.glob("*.safetensors") if not path.name.startswith(("adapter", "consolidated"))
        )

    if not files:
        # Pickles can run code when they are loaded, so they are named and not read.
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        advice = "; its weights are in PyTorch's pickle format: convert them to safetensors" if others else ""
        raise StartupError(f"{folder} has no model weights (*.safetensors){advice}")

    for path in files:
        if not path.is_file():
            raise StartupError(f"{folder} is incomplete: {path.name} is named in {index.name} but is not there")

    return files


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file, by its name in the file; raises `StartupError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size
            # Compared before it is read: a torn file could name any length, up to 2^64 bytes.
            if length > size - 8:
                raise ValueError("it is cut short or not a safetensors file")
            header: Mapping[str, Any] = json.loads(file.read(length))

        start = 8 + length
        stored = {
            name: StoredTensor(
                file=path,
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                begin=start + entry["data_offsets"][0],
                end=start + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        # Said now: in a mapped file the missing bytes would be a SIGBUS at their first use.
        if max((tensor.end for tensor in stored.values()), default=0) > size:
            raise ValueError("it is cut short")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise StartupError(f"cannot read weights from {path}, download it again: {error}") from error

    return stored
