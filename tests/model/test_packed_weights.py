"""Checkpoints of 4 and 8 bits as AWQ, GPTQ and llm-compressor publish them, written here by the formats' rules."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raydix.engine.core.errors import StartupError
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.families import config_of, read_config
from raydix.engine.model.sizes import weight_bytes
from raydix.engine.model.tokenizer import quiet_transformers
from raydix.engine.model.weights import Checkpoint
from raydix.kernels.cpp import cpu_ops
from raydix.kernels.cpp.loader import arithmetic
from tests.model.logits import logits_in_chunks
from tests.model.random_models import SMALL
from tests.skips import NO_PRODUCT

SIZES = {**SMALL, "hidden_size": 128, "intermediate_size": 256}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, Tensor]


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [a, b] packed along b into int32 words, the first in the lowest bits; `order`: their places in a word."""
    count = 32 // bits
    apart = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % count)).reshape(len(numbers), -1, count)
    if order is not None:
        apart = apart[..., list(order)]
    total = sum(apart[..., place] << bits * place for place in range(count))
    assert isinstance(total, Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def awq(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Parts:
    return {
        "qweight": words(numbers.T, bits, AWQ_COLUMNS),
        "qzeros": words(zeros.T, bits, AWQ_COLUMNS),
        "scales": scales.T.half().contiguous(),
    }


def gptq(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Parts:
    return {
        "qweight": words(numbers, bits).T.contiguous(),
        "qzeros": words(zeros.T - 1, bits),
        "scales": scales.T.half().contiguous(),
        "g_idx": torch.arange(numbers.shape[1]).int() // (numbers.shape[1] // scales.shape[1]),
    }


def compressed(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Parts:
    return {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales.bfloat16(),
        "weight_zero_point": words(zeros.T, bits).T.contiguous(),
        "weight_shape": torch.tensor(numbers.shape),
    }


def symmetric(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Parts:
    parts = compressed(numbers, scales, zeros, bits)
    del parts["weight_zero_point"]
    return parts


def llm_compressor(bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "strategy": "group", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


CASES: dict[str, tuple[Callable[..., Parts], int, int, dict[str, Any]]] = {
    "awq": (awq, 4, 64, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, 4, 128, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
    "gptq 8": (gptq, 8, 32, {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "gptq whole rows": (gptq, 4, -1, {"quant_method": "gptq", "bits": 4, "group_size": -1}),
    "compressed": (compressed, 4, 32, llm_compressor(4, group_size=32, symmetric=False)),
    "symmetric": (symmetric, 4, 128, llm_compressor(4, group_size=128, symmetric=True, actorder="static")),
    "symmetric 8": (symmetric, 8, -1, llm_compressor(8, group_size=None, symmetric=True)),
}


def write(case: str, folder: Path) -> dict[str, Tensor]:
    """Write a random model packed; returns its weights as they were before they were packed."""
    pack, bits, group_size, quantized = CASES[case]
    with quiet_transformers():
        import transformers

        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if ".layers." not in name or tensor.dim() == 1:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        groups = columns // (columns if group_size == -1 else group_size)
        numbers = torch.randint(0, 1 << bits, (rows, columns))
        lowest = 1 << bits - 1 if pack is symmetric else 1
        zeros = torch.randint(lowest, lowest + 1 if pack is symmetric else 1 << bits, (rows, groups))
        scales = ((torch.rand(rows, groups) + 0.5) * 2.0**-bits).bfloat16().float()  # also exact in float16
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": of for part, of in pack(numbers, scales, zeros, bits).items()}
        times = columns // groups
        tensors[name] = (numbers - zeros.repeat_interleave(times, 1)) * scales.repeat_interleave(times, 1)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return tensors


BLOCK = (48, 80)  # neither the rows nor the columns of any weight are whole blocks
FLOAT8: dict[str, tuple[str, str, dict[str, Any]]] = {
    "blocks": ("weight_scale_inv", "block", {"quant_method": "fp8", "weight_block_size": [*BLOCK]}),
    "one scale": ("weight_scale", "tensor", {"quant_method": "fp8", "activation_scheme": "static"}),
    "one scale of another name": ("weight_scale_inv", "tensor", {"quant_method": "fp8", "weight_block_size": None}),
    "rows": ("weight_scale", "channel", {**llm_compressor(8, type="float"), "format": "float-quantized"}),
    "blocks of llm-compressor": (
        *("weight_scale", "block"),
        {**llm_compressor(8, type="float", block_structure=[*BLOCK]), "format": "float-quantized"},
    ),
}


WIDE = "0.mlp.down_proj.weight"  # the end of the name of a matrix that stays in bfloat16 among those in FP8


def write_float8(
    case: str, folder: Path, wide: str = WIDE, family: str = "Llama", sizes: dict[str, Any] = SIZES
) -> dict[str, Tensor]:
    """Write a random model in FP8, all but one of its matrices; returns the weights by the formats' rule."""
    part, strategy, quantized = FLOAT8[case]
    with quiet_transformers():
        import transformers

        config_class = getattr(transformers, f"{family}Config")
        getattr(transformers, f"{family}ForCausalLM")(config_class(**sizes)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        stored[name] = tensor
        if ".layers." not in name or tensor.dim() == 1 or name.endswith(wide):
            continue
        height, width = {"block": BLOCK, "channel": (1, tensor.shape[1]), "tensor": tensor.shape}[strategy]
        scales = torch.rand(-(-tensor.shape[0] // height), -(-tensor.shape[1] // width)) + 0.5
        numbers = (tensor * 100).to(torch.float8_e4m3fn)
        value = numbers.float()
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                value[row * height : (row + 1) * height, column * width : (column + 1) * width] *= scales[row, column]
        module = name.removesuffix(".weight")
        stored |= {name: numbers, f"{module}.{part}": scales[0, 0] if strategy == "tensor" else scales}
        stored[f"{module}.input_scale"] = torch.ones(1)
        tensors[name] = value.bfloat16()
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("case", FLOAT8)
def test_fp8_is_widened_to_its_values(case: str, tmp_path: Path) -> None:
    tensors = write_float8(case, tmp_path)
    checkpoint = Checkpoint(tmp_path, read_config(tmp_path))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
        is_kept = ".layers." in name and tensor.dim() > 1 and not name.endswith(WIDE)
        assert (checkpoint.grouped(name) is not None) is is_kept
    folder = tmp_path / "wide"
    folder.mkdir()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    own, other = (logits_in_chunks(Decoder.from_folder(of), list(range(3, 43)), 16) for of in (tmp_path, folder))
    assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("part", "becomes", "says"),
    [
        ("weight_scale_inv", None, r"layers\.1\.mlp\.up_proj\.weight_scale_inv is missing"),
        ("weight_scale_inv", torch.ones(6, 3), r"weight_scale_inv is F32 \[6, 3\]; it should be .* \[6, 2\]"),
        ("weight_scale_inv", torch.full((6, 2), torch.inf), "scales that are not finite"),
        ("weight_scale_inv", torch.full((6, 2), 2.0**119), "scales that are not finite, or of 2"),
        ("weight", torch.full((256, 128), torch.nan).to(torch.float8_e4m3fn), "numbers that are none"),
        ("weight", torch.ones(128, 256).to(torch.float8_e4m3fn), r"weight is F8_E4M3 \[128, 256\]; it should be"),
        ("weight", torch.ones(256, 128).to(torch.float8_e5m2), "is stored as F8_E5M2; raydix reads"),
    ],
)
def test_a_damaged_part_of_fp8_is_named(part: str, becomes: Tensor | None, says: str, tmp_path: Path) -> None:
    write_float8("blocks", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    del tensors[name]
    if becomes is not None:
        tensors[name] = becomes
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=says):
        Checkpoint(tmp_path, read_config(tmp_path)).tensor("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_what_is_no_matrix_cannot_be_in_fp8(name: str, tmp_path: Path) -> None:
    write_float8("one scale", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name].reshape(-1).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=f"{re.escape(name)} is .*F"):
        Checkpoint(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_every_weight_has_its_value(case: str, tmp_path: Path) -> None:
    tensors = write(case, tmp_path)
    checkpoint = Checkpoint(tmp_path, read_config(tmp_path))
    for name, tensor in tensors.items():
        expected = tensor.bfloat16() if ".layers." in name and tensor.dim() > 1 else tensor
        assert torch.equal(checkpoint.tensor(name), expected), name


@pytest.mark.parametrize("case", [*CASES, *FLOAT8])
def test_weights_are_widened_or_kept(case: str, tmp_path: Path) -> None:
    write(case, tmp_path) if case in CASES else write_float8(case, tmp_path, wide="none of them")
    wide, kept = (Decoder.from_folder(tmp_path, quantization=quantization) for quantization in (None, "stored"))
    own, others = (logits_in_chunks(decoder, list(range(3, 43)), 16).float() for decoder in (kept, wide))
    # Roundings of a bfloat16 model with random weights; rows or columns out of order would give about 1.4.
    assert (own - others).abs().mean() < 0.2 * others.abs().mean()
    if arithmetic() in ("avx512_bf16", "amx_bf16"):
        assert torch.equal(own, others), "both multiply the same numbers, rounded to bfloat16 sooner or later"
    ops = cpu_ops()
    if ops is None or not ops.has_linear():
        pytest.skip(NO_PRODUCT)
    for chunk in (1, 5):
        assert torch.equal(logits_in_chunks(kept, list(range(3, 43)), chunk).float(), own)
    products = [product for layer in kept._layers for product in layer.products()]
    assert all(product.groups is not None for product in products)
    in_memory = sum(product.weight.nbytes for product in products)
    said, said_wide = (weight_bytes(kept.config, "bfloat16", each, on_gpu=False) for each in ("stored", None))
    of_wide = sum(product.weight.nbytes for layer in wide._layers for product in layer.products())
    assert abs((said_wide - said) - (of_wide - in_memory)) < 0.01 * of_wide


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "gemv"}, "awq, of another form"),
        ({"bits": 3}, "awq, of another form"),
        ({"quant_method": "gptq", "desc_act": True}, "desc_act"),
        ({"quant_method": "gptq", "bits": 2}, "gptq in 2 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq in the format marlin"),
        ({"quant_method": "gptq", "group_size": "wide"}, "unusable value"),
        ({"group_size": 0}, "unusable value: a group_size of 0"),
        ({"group_size": -2}, "unusable value: a group_size of -2"),
        ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 as e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "unusable value"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "unusable value: blocks of 128 x 0"),
        ({**llm_compressor(4, type="float"), "format": "float-quantized"}, "float-quantized in other forms"),
        (llm_compressor(4, actorder="group"), "order group"),
        ({**llm_compressor(4), "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({**llm_compressor(4), "config_groups": {}}, "compressed-tensors"),
    ],
)
def test_other_forms_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 128, **changes}
    with pytest.raises(StartupError, match=says):
        config_of({**SIZES, "model_type": "llama", "quantization_config": quantized})


@pytest.mark.parametrize(
    ("part", "becomes", "says"),
    [
        ("qzeros", None, r"layers\.1\.mlp\.up_proj\.qzeros is missing"),
        ("scales", torch.zeros(3, 256).half(), r"scales is F16 \[3, 256\]; it should be F16 or BF16 \[2, 256\]"),
        ("qweight", torch.zeros(128, 32).half(), r"qweight is F16 \[128, 32\]; it should be I32 \[128, 32\]"),
    ],
)
def test_a_damaged_part_is_named(part: str, becomes: Tensor | None, says: str, tmp_path: Path) -> None:
    write("awq", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    del tensors[name]
    if becomes is not None:
        tensors[name] = becomes
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=says):
        Checkpoint(tmp_path, read_config(tmp_path))


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write("compressed", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.weight_scale"] = torch.full_like(tensors[f"{name}.weight_scale"], 1e20)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="no finite float16"):
        Checkpoint(tmp_path, read_config(tmp_path)).tensor(f"{name}.weight")


def test_a_zero_that_eight_bits_do_not_hold_is_refused(tmp_path: Path) -> None:
    write("gptq 8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.qzeros"] = torch.full_like(tensors[f"{name}.qzeros"], -1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="a zero of 256"):
        Checkpoint(tmp_path, read_config(tmp_path)).tensor(f"{name}.weight")
