"""The batch-invariant matrix product on a GPU: the same tiles whatever the number of rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows per tile, and tiles of rows that walk over the columns together so that a weight tile is read once from memory.
BLOCK_M, GROUP_M = 64, 8
WIDE = 8192


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    stride_x_token,
    stride_weight_out,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] weight[n, k] + bias[n], k in steps of BLOCK_K from 0, in float32.

    x: [num_tokens, in_features]; weight: [out_features, in_features]; both with contiguous rows; bias: [out_features];
    out: [num_tokens, out_features] contiguous.

    One program handles BLOCK_M rows and BLOCK_N columns of out.
    """
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + program % (GROUP_M * tiles_n) % group
    tile_n = program % (GROUP_M * tiles_n) // group

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows and columns past the end compute on another's data and are not stored.
    x_ptrs = x_ptr + (rows % num_tokens).to(tl.int64)[:, None] * stride_x_token + inner[None, :]
    weight_ptrs = weight_ptr + (columns % out_features).to(tl.int64)[None, :] * stride_weight_out + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, in_features, BLOCK_K):
        x = tl.load(x_ptrs, mask=inner[None, :] < in_features - k, other=0.0)
        weight = tl.load(weight_ptrs, mask=inner[:, None] < in_features - k, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < out_features, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    mask = (rows < num_tokens)[:, None] & (columns < out_features)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def batch_invariant_matmul_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `batch_invariant_matmul`, on one device.

    Every output element is one program's sum over k in ascending tiles, with the same instructions for a row wherever
    it stands in its tile; the tile shape is chosen by the weight's shape and dtype alone, and nothing splits k.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    half = x.element_size() == 2
    block_n = 128 if half and out_features >= WIDE else 64
    block_k = 64 if half else 32
    if out.numel():
        grid = (triton.cdiv(num_tokens, BLOCK_M) * triton.cdiv(out_features, block_n),)
        _matmul_kernel[grid](
            x,
            weight,
            x if bias is None else bias.contiguous(),
            out,
            num_tokens,
            out_features,
            in_features,
            x.stride(0),
            weight.stride(0),
            HAS_BIAS=bias is not None,
            PRECISION="tf32" if half else "ieee",
            BLOCK_M=BLOCK_M,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=GROUP_M,
            num_warps=4,
            num_stages=4 if half else 2,
        )
    return out
