"""The batch-invariant matrix product on a GPU: each output is summed in one order, whatever the number of rows.

The tile shape is free where it does not show in the bits, and fixed where it might. On Hopper the matrix instruction
takes 64 rows and 16 steps of k for every shape below, and an element of the sum is the same bits in all of them (the
tests for GPUs compare numbers of rows that take different shapes). There few rows take narrow tiles, so that many
programs read the weight at once, and many rows take large ones, fed by the copy engine. On other GPUs one shape serves
all.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from raydix.kernels.gpu import is_hopper, multiprocessors

GROUP_M = 8  # tiles of rows that walk over the columns together, so that a weight tile is read once from memory
WIDE = 8192
FEW_ROWS = 64  # most rows that take one tile of rows
ENOUGH = 0.7  # least tiles per multiprocessor for which a larger tile is worth its size


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program's work: rows, columns, steps of k at once, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# For up to FEW_ROWS rows, where the time is that of reading the weight: by its columns and by its rows' length.
NARROW = Tile(64, 32, 128, num_warps=4, num_stages=5)
DEEP = Tile(64, 32, 256, num_warps=4, num_stages=4)
SHALLOW = Tile(64, 64, 128, num_warps=4, num_stages=4)
# For more rows, the largest first.
LARGE = (
    Tile(128, 256, 64, num_warps=8, num_stages=3),
    Tile(128, 128, 64, num_warps=8, num_stages=4),
    Tile(64, 128, 64, num_warps=4, num_stages=5),
)
# For rows that the copy engine cannot read, since their length is no multiple of 16 bytes.
UNALIGNED = Tile(64, 64, 64, num_warps=4, num_stages=3)


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
    # Rows past the end are not read. Columns past the end compute on another's data and are not stored.
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x_token + inner[None, :]
    weight_ptrs = weight_ptr + (columns % out_features).to(tl.int64)[None, :] * stride_weight_out + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, in_features, BLOCK_K):
        x_mask = (rows < num_tokens)[:, None] & (inner[None, :] < in_features - k)
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs, mask=inner[:, None] < in_features - k, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < out_features, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    mask = (rows < num_tokens)[:, None] & (columns < out_features)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _large_matmul_kernel(
    x_descriptor,
    weight_descriptor,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[m, n] as `_matmul_kernel` sums it; the copy engine reads x and weight, and gives zeros past their ends.

    x_descriptor: of x in tiles [BLOCK_M, BLOCK_K]; weight_descriptor: of weight in tiles [BLOCK_N, BLOCK_K].

    Each of as many programs as there are multiprocessors handles one tile of out after the other.
    """
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        group = min(tiles_m - first_m, GROUP_M)
        first_row = (first_m + tile % (GROUP_M * tiles_n) % group) * BLOCK_M
        first_column = tile % (GROUP_M * tiles_n) // group * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, in_features, BLOCK_K):
            x = x_descriptor.load([first_row, k])
            weight = weight_descriptor.load([first_column, k])
            acc = tl.dot(x, weight.T, acc)
        rows, columns = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + columns, mask=columns < out_features, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
        mask = (rows < num_tokens)[:, None] & (columns < out_features)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def batch_invariant_matmul_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what `batch_invariant_matmul` does, on one device.

    Every output element is one program's sum over k in ascending order, with the same instructions for a row wherever
    it stands in its tile, and nothing splits k.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out

    half, hopper = x.element_size() == 2, is_hopper(x.device)
    bias_or_any = x if bias is None else bias.contiguous()
    if half and hopper and num_tokens > FEW_ROWS and _is_aligned(x) and _is_aligned(weight):
        tile = _large_tile(num_tokens, out_features, multiprocessors(x.device))
        num_tiles = triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(out_features, tile.block_n)
        _large_matmul_kernel[(min(num_tiles, multiprocessors(x.device)),)](
            TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
            bias_or_any,
            out,
            num_tokens,
            out_features,
            in_features,
            HAS_BIAS=bias is not None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=GROUP_M,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )
        return out

    if half and hopper:
        tile = UNALIGNED if num_tokens > FEW_ROWS else _narrow_tile(out_features, in_features)
    else:
        tile = _only_tile(half, out_features)
    _matmul_kernel[(triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(out_features, tile.block_n),)](
        x,
        weight,
        bias_or_any,
        out,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        PRECISION="tf32" if half else "ieee",
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the copy engine can read the rows: they begin at multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


def _narrow_tile(out_features: int, in_features: int) -> Tile:
    """The tile of up to FEW_ROWS rows on Hopper: wide enough weights fill the device with tiles of 64 columns."""
    if out_features >= WIDE:
        return SHALLOW
    return DEEP if in_features >= WIDE else NARROW


def _large_tile(num_tokens: int, out_features: int, num_multiprocessors: int) -> Tile:
    """The largest tile with enough of them for the device, else the smallest."""
    return next(
        (
            tile
            for tile in LARGE
            if triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(out_features, tile.block_n)
            >= ENOUGH * num_multiprocessors
        ),
        LARGE[-1],
    )


def _only_tile(half: bool, out_features: int) -> Tile:
    """The tile for any number of rows where its shape may show in the bits."""
    block_n = 128 if half and out_features >= WIDE else 64
    return Tile(64, block_n, 64 if half else 32, num_warps=4, num_stages=4 if half else 2)
