"""Experts in MXFP4 are widened without rounding: as transformers does it, and as a model stored in bfloat16."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from raydix.engine.model.decoder import Decoder
from raydix.engine.model.sizes import BLOCKS, SCALES, weight_bytes
from raydix.engine.model.weights import from_mxfp4
from tests.model.logits import logits_in_chunks
from tests.model.random_models import reference


def made_up(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of `shape`, and the exponents of their blocks."""
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    return blocks, torch.randint(118, 124, shape[:-1], dtype=torch.uint8)


def test_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = made_up(2, 6, 3, 16)
    scales[0, 0] = torch.tensor([0, 127, 247])
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone())  # [num_experts, columns, rows]
    assert torch.equal(from_mxfp4(blocks, scales), expected.transpose(1, 2))
    assert from_mxfp4(blocks, scales).shape == (2, 6, 96)


def test_a_model_in_mxfp4_gives_the_bits_of_the_one_that_it_is_widened_to(tmp_path: Path) -> None:
    token_ids, _ = reference("gpt-oss", tmp_path)
    path = tmp_path / "model.safetensors"
    wide, packed = load_file(path), dict[str, torch.Tensor]()
    for name in list(wide):
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, columns, rows = wide[name].shape
            blocks, scales = made_up(num_experts, rows, columns // 32, 16)
            packed |= {f"{name}{BLOCKS}": blocks, f"{name}{SCALES}": scales}
            wide[name] = from_mxfp4(blocks, scales).transpose(1, 2).contiguous()
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
    for quantization in (None, "int8"):
        sizes = [weight_bytes(each.config, "bfloat16", quantization, on_gpu=False) for each in (from_wide, from_packed)]
        assert abs(sizes[1] / sizes[0] - 1) < 0.05
