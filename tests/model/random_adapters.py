"""Adapters with random weights, in the form in which PEFT writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.sizes import expected_shapes

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def write_adapter(
    folder: Path,
    config: ModelConfig,
    seed: int,
    *,
    rank: int = 4,
    targets: Sequence[str] = EVERY,
    size: float = 0.3,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Write an adapter of a model's projections of these names; returns what its rows add to the weights, by the names
    of the weights. `size`: of the numbers in both factors; `settings`: others than those of a plain adapter."""
    generator = torch.Generator().manual_seed(seed)
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "lora_dropout": 0.05,
        "bias": "none",
        "use_rslora": False,
        **(settings or {}),
    }
    tensors, added = {}, {}
    for name, shape in expected_shapes(config).items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in targets and ".layers." in module:
            down = torch.randn(rank, shape[1], generator=generator) * size / shape[1] ** 0.5
            up = torch.randn(shape[0], rank, generator=generator) * size
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            scale = described["lora_alpha"] / (rank**0.5 if described["use_rslora"] else rank)
            added[name] = up @ down * scale
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added
