"""An adapter's weights, and the rows of a step that are computed with adapters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydix.engine.core.errors import StartupError
from raydix.engine.model.adapters import Factors, read_adapter
from raydix.engine.model.config import ModelConfig
from raydix.kernels.linear import pack_weight
from raydix.kernels.lora import PackedLora, add_lora


@dataclass(frozen=True, slots=True)
class LayerLora:
    """An adapter's additions to the products of one layer, as the decoder fuses them; None: the product has none."""

    qkv: PackedLora | None
    output: PackedLora | None
    gate_up: PackedLora | None
    down: PackedLora | None


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter's weights, ready to be computed with."""

    layers: tuple[LayerLora, ...]


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows of a batch that one adapter computes."""

    lora: Lora
    rows: Tensor
    """[num_rows] int64: tokens of the batch."""
    wanted: Tensor
    """[num_wanted] int64: places among the batch's `logits_rows`."""


class LoraLoader:
    """Loads adapters for one decoder. `qkv_order`: the rows of a layer's q, k and v projections in the order of the
    decoder's product; None: they are as in the file."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
        qkv_order: Callable[[int], Tensor | None],
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._deterministic = deterministic
        self._qkv_order = qkv_order

    @torch.inference_mode()
    def load(self, folder: Path) -> Lora:
        """Load the adapter in a folder. Raises `StartupError` as `read_adapter`, and for numbers that are none."""
        from safetensors import safe_open

        factors = read_adapter(folder, self._config)
        file = next(iter(factors.values())).down.file
        with safe_open(file, framework="pt", device="cpu") as tensors:
            return Lora(tuple(self._layer(index, factors, tensors) for index in range(self._config.num_layers)))

    def _layer(self, index: int, factors: Mapping[str, Factors], tensors: Any) -> LayerLora:
        config, prefix = self._config, f"model.layers.{index}."
        heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": heads[0], "k_proj": heads[1], "v_proj": heads[1]}
        if config.fused_qkv:
            qkv = {"qkv_proj": heads[0] + 2 * heads[1]}
        inner = config.intermediate_size
        gate_up = {"gate_up_proj": 2 * inner} if config.fused_gate_up else {"gate_proj": inner, "up_proj": inner}

        def packed(place: str, parts: Mapping[str, int], order: Tensor | None = None) -> PackedLora | None:
            sizes = {f"{prefix}{place}.{part}": size for part, size in parts.items()}
            return self._packed(sizes, factors, tensors, order)

        return LayerLora(
            qkv=packed("self_attn", qkv, self._qkv_order(index)),
            output=packed("self_attn", {"o_proj": config.hidden_size}),
            gate_up=packed("mlp", gate_up),
            down=packed("mlp", {"down_proj": config.hidden_size}),
        )

    def _packed(
        self, sizes: Mapping[str, int], factors: Mapping[str, Factors], tensors: Any, order: Tensor | None
    ) -> PackedLora | None:
        """The additions to projections that are one product; None where none of them has one. `sizes`: the rows of each
        projection's weight.

        The first factors stand one below the other. The second factor has zeros where a projection's rows meet another
        one's columns, and a product that is zero changes no sum.
        """
        found = [factors[module] for module in sizes if module in factors]
        if not found:
            return None
        # The product on CPUs takes pairs of columns.
        rank = sum(each.rank for each in found)
        down = torch.zeros(rank + rank % 2, found[0].down.shape[1])
        up = torch.zeros(sum(sizes.values()), down.shape[0])
        row = column = 0
        for module, size in sizes.items():
            if module in factors:
                each = factors[module]
                columns = slice(column, column + each.rank)
                down[columns] = _finite(tensors, each.down.name)
                # Scaled before it is rounded to the model's dtype, so that it is rounded once.
                up[row : row + size, columns] = _finite(tensors, each.up.name) * each.scale
                column += each.rank
            row += size
        return PackedLora(self._pack(down), self._pack(up if order is None else up[order]))

    def _pack(self, weight: Tensor) -> Any:
        weight = weight.to(device=self._device, dtype=self._dtype)
        return pack_weight(weight, deterministic=self._deterministic)


def _finite(tensors: Any, name: str) -> Tensor:
    """A tensor in float32. Raises `StartupError` where it has a value that is no number: beside another projection's
    zeros it would reach every row."""
    tensor: Tensor = tensors.get_tensor(name).float()
    if not bool(tensor.isfinite().all()):
        raise StartupError(f"{name} has values that are infinite or no numbers")
    return tensor


def add_loras(out: Tensor, x: Tensor, groups: Sequence[LoraRows], layer: int, product: str, *, wanted: bool) -> None:
    """Add each group's part to a product's result, in place (`add_lora`). `product`: of `LayerLora`. `wanted`: the rows
    are those of the batch's `logits_rows`."""
    for group in groups:
        lora: PackedLora | None = getattr(group.lora.layers[layer], product)
        if lora is not None:
            add_lora(out, x, group.wanted if wanted else group.rows, lora)
