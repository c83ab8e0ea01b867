"""The first layers of the default model, with its tokenizer, its chat template and its shapes: a part of its cost.

What a cluster does with requests, blocks and processes does not depend on the number of layers, while most of the
processor time of its tests was the computing of thirty. The model says nothing sensible.
"""

import json
from pathlib import Path
from typing import Any

from raydix.engine.model.sources import DEFAULT_MODEL, model_name, resolve_model

NUM_LAYERS = 4
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_thin_model(parent: Path) -> Path:
    """Write the model into a folder of the default model's name; returns the folder."""
    whole, folder = resolve_model(DEFAULT_MODEL), parent / model_name(DEFAULT_MODEL)
    folder.mkdir()
    for file in whole.iterdir():
        if file.name not in (CONFIG, WEIGHTS):
            (folder / file.name).symlink_to(file)
    config = json.loads((whole / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}), encoding="utf-8")
    _copy_first_layers(whole / WEIGHTS, folder / WEIGHTS)
    return folder


def _copy_first_layers(source: Path, target: Path) -> None:
    """Both files have the length of a header in eight bytes, the header in JSON, and the tensors' bytes end to end.

    Without the library of the format, which imports torch: tests of a cluster compute nothing in their own process.
    """
    with source.open("rb") as whole, target.open("wb") as thin:
        described: dict[str, Any] = json.loads(whole.read(int.from_bytes(whole.read(8), "little")))
        start = whole.tell()
        kept, num_bytes = {}, 0
        for name, tensor in described.items():
            if name != "__metadata__" and _layer_of(name) < NUM_LAYERS:
                first, end = tensor["data_offsets"]
                kept[name] = {**tensor, "data_offsets": [num_bytes, num_bytes + end - first]}
                num_bytes += end - first
        header = json.dumps(kept).encode()
        thin.write(len(header).to_bytes(8, "little") + header)
        for name in kept:
            first, end = described[name]["data_offsets"]
            whole.seek(start + first)
            thin.write(whole.read(end - first))


def _layer_of(name: str) -> int:
    """The layer of a tensor; 0 for those beside the layers."""
    _, _, rest = name.partition("model.layers.")
    return int(rest.partition(".")[0]) if rest else 0
