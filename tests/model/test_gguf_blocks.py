"""Weights of few bits are kept as a GGUF file has them, and a model computes with them as they are."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from raydix.engine.model.decoder import Decoder
from raydix.engine.model.families import read_config
from raydix.engine.model.gguf import MEMORY_BITS, GgufModel, _write_weights
from raydix.engine.model.gguf_blocks import KINDS, grouped
from raydix.engine.model.sizes import weight_bytes
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.weights import Checkpoint
from raydix.kernels.cpp import cpu_ops
from raydix.kernels.cpp.loader import arithmetic
from raydix.kernels.experts import PackedExperts
from raydix.kernels.linear import PackedLinear, keeps_groups, pack_groups
from tests.model.logits import logits_in_chunks
from tests.model.test_exactness import prompt
from tests.model.test_gguf_experts import save_model, write_gguf
from tests.skips import NO_PRODUCT

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "MXFP4": ()}
"""Bytes of the blocks at which a float16 begins, where it is not only the first."""


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks of random bytes, their scales finite and of both signs."""
    generator = np.random.default_rng(1)
    size = KINDS[kind].num_bytes
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    if kind == "MXFP4":  # exponents whose products are finite
        data[:, :, 0] %= 240
    for first in HALVES.get(kind, (0,)):
        scales = generator.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16)
        data[:, :, first : first + 2] = scales.view(np.uint8)
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_values_that_the_format_says(kind: str) -> None:
    blocks = random_blocks(kind, 7, 3)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(grouped(torch.from_numpy(blocks), kind).widened().numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_as_large_as_the_description_says(kind: str) -> None:
    weight = grouped(torch.from_numpy(random_blocks(kind, 64, 8)), kind)
    if not keeps_groups(weight):
        pytest.skip(NO_PRODUCT)
    bits = 8 * pack_groups(weight).weight.nbytes / weight.numbers.numel()
    assert MEMORY_BITS[kind] - 0.01 < bits <= MEMORY_BITS[kind]


def products(decoder: Decoder) -> list[PackedLinear]:
    return [decoder._lm_head, *(product for layer in decoder._layers for product in layer.products())]


def test_the_default_model_keeps_its_four_bits() -> None:
    ops = cpu_ops()
    if ops is None or not ops.has_linear():
        pytest.skip(NO_PRODUCT)
    folder = resolve_model(DEFAULT_MODEL, quantization="stored")
    decoder = Decoder.from_folder(folder, quantization="stored", max_position=512)
    wide = Decoder.from_folder(resolve_model(DEFAULT_MODEL), max_position=512)
    assert all(product.groups is not None for product in products(decoder)) and decoder.runs_in_one_call
    kept, widened = (sum(product.weight.nbytes for product in products(each)) for each in (decoder, wide))
    assert kept < 0.4 * widened
    said = weight_bytes(read_config(folder), "bfloat16", "stored", on_gpu=False)
    tables = decoder._embedding.nbytes + read_config(folder).max_position * decoder.config.head_dim * 4
    assert 0.99 < said / (kept + tables) < 1.03

    own, others = (logits_in_chunks(each, prompt(3, 200), 64).float() for each in (decoder, wide))
    if arithmetic() in ("avx512_bf16", "amx_bf16"):
        assert torch.equal(own, others), "both multiply the same numbers, rounded to bfloat16 sooner or later"
    else:
        assert not torch.equal(own, others) and (own - others).abs().mean() < 0.02 * others.abs().mean()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_are_kept(kind: str, tmp_path: Path) -> None:
    save_model(tmp_path, moe_intermediate_size=64)
    write_gguf(tmp_path, path := tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    model = GgufModel(path)
    for name, keeps in (("kept", True), ("wide", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((tmp_path / "config.json").read_text())
        _write_weights(model, tmp_path / name, lambda _: None, keeps=keeps)
    config = read_config(tmp_path)
    kept, wide = (Checkpoint(tmp_path / name, read_config(tmp_path / name)) for name in ("kept", "wide"))
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert kept.grouped(name) is not None and wide.grouped(name) is None
    assert torch.equal(kept.tensor(name), wide.tensor(name))
    decoder, ops = Decoder(config, kept, quantization="stored"), cpu_ops()
    of_layer = decoder._layers[1].mlp
    assert isinstance(of_layer, PackedExperts)
    if ops is not None and ops.has_linear():
        assert all(product.groups is not None for product in of_layer.down)
