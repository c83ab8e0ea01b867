"""RMS normalisation on a GPU."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    stride_x_token,
    stride_residual_token,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """out = s / sqrt(mean(s^2) + eps) * weight, with s = x or s = x + residual rounded to x's dtype.

    x, residual: [num_tokens, HIDDEN], rows strided; weight: [HIDDEN]; out, total (s): [num_tokens, HIDDEN] contiguous.

    One program handles one token.
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < HIDDEN
    x = tl.load(x_ptr + token * stride_x_token + dims, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * stride_residual_token + dims, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + token * HIDDEN + dims, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + dims, (wide * scale * weight).to(x.dtype), mask=mask)


@overload
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: None = ...) -> Tensor: ...


@overload
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]: ...


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what `rms_norm` does, on one device; a row's bits do not depend on the number of rows."""
    num_tokens, hidden = x.shape
    if weight.shape != (hidden,) or (residual is not None and residual.shape != x.shape):
        raise ValueError("weight must be [hidden] and residual like x")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError("residual must have x's dtype")
    x, weight = _rows_contiguous(x), weight.contiguous()
    residual = None if residual is None else _rows_contiguous(residual)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = max(16, triton.next_power_of_2(hidden))
    if num_tokens:
        _rms_norm_kernel[(num_tokens,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            total,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(max(block // 512, 1), 16),
            enable_fp_fusion=False,
        )
    return out if residual is None else (out, total)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
