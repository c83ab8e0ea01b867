"""The gated activation on a GPU."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, stride_x_token, intermediate, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """out = act(gate) * up, with act silu or the tanh form of gelu.

    x: [num_tokens, 2 * intermediate] = [gate | up], rows strided; out: [num_tokens, intermediate] contiguous.

    One program handles BLOCK columns of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    row_ptr = x_ptr + token * stride_x_token
    gate = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + intermediate + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_SILU:
        activated = gate / (1.0 + tl.exp(-gate))
    else:
        # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), with u = sqrt(2 / pi) (g + 0.044715 g^3).
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-2.0 * inner))
    tl.store(out_ptr + token * intermediate + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_triton(x: Tensor, kind: str = "silu") -> Tensor:
    """Do what `silu_and_mul` does, on one device; a row's bits do not depend on the number of rows."""
    num_tokens, width = x.shape
    if width % 2:
        raise ValueError(f"the last dimension holds gate and up and must be even, not {width}")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_tokens, width // 2), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width // 2, BLOCK))
        _silu_and_mul_kernel[grid](
            x, out, x.stride(0), width // 2, IS_SILU=kind == "silu", BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out
