"""Experts in MXFP4, widened or kept in their four bits, without rounding: as transformers does it, and with the bits of
a model stored in bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raydix.engine.core.errors import StartupError
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.packed_weights import mxfp4
from raydix.engine.model.sizes import BLOCKS, SCALES, weight_bytes
from raydix.kernels.cpp import cpu_ops
from raydix.kernels.experts import PackedExperts
from tests.model.logits import logits_in_chunks
from tests.model.random_models import reference


def made_up(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of `shape`, and the exponents of their blocks."""
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    return blocks, torch.randint(118, 124, shape[:-1], dtype=torch.uint8)


def widened(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights of all experts in bfloat16, [num_experts, rows, columns]."""
    return torch.stack([mxfp4(*pair, "weight").widened().bfloat16() for pair in zip(blocks, scales, strict=True)])


def test_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = made_up(2, 6, 3, 16)
    scales[0, 0] = torch.tensor([0, 127, 247])
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone())  # [num_experts, columns, rows]
    assert torch.equal(widened(blocks, scales), expected.transpose(1, 2))
    assert widened(blocks, scales).shape == (2, 6, 96)


def test_an_exponent_that_is_no_number_is_refused() -> None:
    blocks, scales = made_up(6, 3, 16)
    scales[4, 1] = 255
    with pytest.raises(StartupError, match=r"layer\.up_proj has an exponent of 255"):
        mxfp4(blocks, scales, "layer.up_proj")


def test_a_model_in_mxfp4_gives_the_bits_of_the_one_that_it_is_widened_to(tmp_path: Path) -> None:
    token_ids, _ = reference("gpt-oss", tmp_path)
    path = tmp_path / "model.safetensors"
    wide, packed = load_file(path), dict[str, torch.Tensor]()
    for name in list(wide):
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, columns, rows = wide[name].shape
            blocks, scales = made_up(num_experts, rows, columns // 32, 16)
            packed |= {f"{name}{BLOCKS}": blocks, f"{name}{SCALES}": scales}
            wide[name] = widened(blocks, scales).transpose(1, 2).contiguous()
    assert packed

    save_file(wide, path, {"format": "pt"})
    from_wide = Decoder.from_folder(tmp_path, torch.bfloat16)
    expected = logits_in_chunks(from_wide, token_ids, chunk=40)
    others = {name: tensor for name, tensor in wide.items() if f"{name}{BLOCKS}" not in packed}
    save_file(others | packed, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    from_packed = Decoder.from_folder(tmp_path, torch.bfloat16)
    assert torch.equal(logits_in_chunks(from_packed, token_ids, chunk=40), expected)
    kept = Decoder.from_folder(tmp_path, torch.bfloat16, quantization="stored")
    for chunk in (1, 7, 40):
        assert torch.equal(logits_in_chunks(kept, token_ids, chunk=chunk), expected)
    ops = cpu_ops()
    if ops is not None and ops.has_linear():
        experts = [layer.mlp for layer in kept._layers]
        assert all(isinstance(each, PackedExperts) and each.gate_up[0].groups is not None for each in experts)
        own, other = (
            sum(product.weight.nbytes for layer in decoder._layers for product in layer.products())
            for decoder in (kept, from_packed)
        )
        said, said_wide = (weight_bytes(kept.config, "bfloat16", each, on_gpu=False) for each in ("stored", None))
        assert abs((said_wide - said) - (other - own)) < 0.01 * other
    for quantization in (None, "int8"):
        sizes = [weight_bytes(each.config, "bfloat16", quantization, on_gpu=False) for each in (from_wide, from_packed)]
        assert abs(sizes[1] / sizes[0] - 1) < 0.05
