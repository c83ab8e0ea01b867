"""A copy of a model with its first layers only: a draft model for every model, if not a good one."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from engine.model.config import read_json
from engine.model.stored_tensors import read_headers

LAYER = "model.layers."


def truncated_copy(model: Path, target: Path, num_layers: int) -> Path:
    """Write a model folder with the first layers of another one's; returns `target`, which must not exist."""
    target.mkdir(parents=True)
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)
    config = read_json(model / "config.json") | {"num_hidden_layers": num_layers}
    (target / "config.json").write_text(json.dumps(config))

    tensors = {}
    for name, stored in read_headers(model).items():
        if not name.startswith(LAYER) or int(name.removeprefix(LAYER).partition(".")[0]) < num_layers:
            with safe_open(stored.file, framework="pt", device="cpu") as file:
                tensors[name] = file.get_tensor(name)
    save_file(tensors, target / "model.safetensors")
    return target
