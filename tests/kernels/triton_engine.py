"""Has a decoder on the CPU take the kernels that it would take on a GPU."""

import pytest
from torch import Tensor

import raydix.engine.model.decoder
import raydix.engine.model.layer_loader
import raydix.engine.model.sampler
import raydix.kernels.linear
from raydix.kernels.batch_invariant_matmul.triton import batch_invariant_matmul_triton
from raydix.kernels.linear import PackedLinear
from raydix.kernels.linear.packing import Layout
from raydix.kernels.paged_attention.triton import paged_attention_triton
from raydix.kernels.rms_norm.triton import rms_norm_triton
from raydix.kernels.rotary_kv_store.triton import rotary_kv_store_triton
from raydix.kernels.sample import Controls, SampleOutput
from raydix.kernels.sample.triton import sample_triton
from raydix.kernels.silu_and_mul.triton import silu_and_mul_triton


def take_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends decoders are made for, and run on, the Triton kernels in deterministic mode."""
    monkeypatch.setattr(raydix.engine.model.layer_loader, "pack_weight", invariant)
    monkeypatch.setattr(raydix.kernels.linear, "batch_invariant_matmul", batch_invariant_matmul_triton)
    monkeypatch.setattr(raydix.engine.model.decoder, "rms_norm", rms_norm_triton)
    monkeypatch.setattr(raydix.engine.model.decoder, "rotary_kv_store", rotary_kv_store_triton)
    monkeypatch.setattr(raydix.engine.model.decoder, "paged_attention", paged_attention_triton)
    monkeypatch.setattr(raydix.engine.model.decoder, "silu_and_mul", silu_and_mul_triton)
    monkeypatch.setattr(raydix.engine.model.sampler, "sample", sample_on_device)


def invariant(
    weight: Tensor, bias: Tensor | None = None, *, int8: bool = False, deterministic: bool = False
) -> PackedLinear:
    assert deterministic and not int8
    return PackedLinear(weight, None, bias, weight.shape[1], weight.shape[0], Layout.INVARIANT)


def sample_on_device(logits: Tensor, controls: Controls, **given: object) -> SampleOutput:
    wanted = given.pop("num_logprobs", None) or [None] * len(logits)
    return sample_triton(logits, controls, wanted=[-1 if n is None else n for n in wanted], **given)  # type: ignore
