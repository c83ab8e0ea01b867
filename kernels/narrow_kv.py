"""Keys and values of 8 bits: a head's row of a token as whole numbers from -127 to 127, and behind them the float32 by
which they are multiplied.

Each row has a factor of its own, not each block: a row's bytes then depend on nothing but the row. One of a block would
have to be known when the block's first token is stored, and change with those behind it, also with draft tokens that
are taken back, and so the bits of an answer would depend on how it was computed.
"""

import torch
from torch import Tensor

FACTOR_BYTES = 4
MOST = 127.0
LEAST = 1e-30
"""Rows whose largest number is smaller are zeros."""


def narrow_rows(rows: Tensor) -> Tensor:
    """[..., head_dim] in any floating dtype to [..., head_dim + FACTOR_BYTES] int8."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    counts = (largest >= LEAST) & torch.isfinite(largest)
    most = torch.full_like(largest, MOST)  # a number divided by a tensor would be rounded twice
    numbers = torch.where(counts, rows * (most / largest), 0.0).round().to(torch.int8)
    factors = torch.where(counts, largest / most, 0.0)
    return torch.cat((numbers, factors.contiguous().view(torch.int8)), dim=-1)


def widen_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., head_dim + FACTOR_BYTES] int8 to [..., head_dim] in `dtype`, rounded once."""
    numbers, factors = rows[..., :-FACTOR_BYTES], rows[..., -FACTOR_BYTES:].contiguous().view(torch.float32)
    return (numbers.float() * factors).to(dtype)
