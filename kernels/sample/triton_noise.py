"""The noise of tokens on a GPU, in the bits that `kernels/sample/reference.py` specifies.

Kernels that call these functions are launched with `enable_fp_fusion=False`: a product and a sum are rounded apart.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def first_arrivals(seed, position, groups):
    """The member that arrives first in each of `groups` [n] int32, [n] int32, and the time, [n] float32."""
    a, b, c, d = _words(seed, position, 0, groups // 64 * 16 + groups % 16)
    which = groups // 16 % 4
    word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    times = _exponential(word >> 4, 3.725290298461914e-09) * 0.0625  # 2^-28, 1 / 16
    return (word & 15).to(tl.int32), times


@triton.jit
def arrivals(seed, position, groups, members, times, NUM_GROUPS: tl.constexpr):
    """Arrival times [n, 16] of all members of `groups` [n], whose first ones are `members` [n] and `times` [n]."""
    blocks = 4 * groups[:, None] + tl.arange(0, 4)[None, :]
    a, b, c, d = _words(seed, position, 1, blocks)
    word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (NUM_GROUPS, 16))
    later = times[:, None] + _exponential(word, 2.3283064365386963e-10)  # 2^-32
    return tl.where(tl.arange(0, 16)[None, :] == members[:, None], times[:, None], later)


@triton.jit
def logarithm(x):
    """ln(x) of positive normal numbers."""
    bits = x.to(tl.int32, bitcast=True)
    exponents = (bits - 0x3F3504F3) >> 23
    return exponents.to(tl.float32) * 0.6931472 + _series((bits - (exponents << 23)).to(tl.float32, bitcast=True) - 1.0)


@triton.jit
def _series(f):
    """ln(1 + f)."""
    s = tl.div_rn(f, f + 2.0)
    q = s * s
    total = 0.11111111 * q + 0.14285715
    total = total * q + 0.2
    total = total * q + 0.33333334
    total = total * q + 1.0
    return (s + s) * total


@triton.jit
def _exponential(numbers, UNIT: tl.constexpr):
    """-ln(1 - v) where v = (number + 1/2) * UNIT."""
    v = (numbers.to(tl.float32) + 0.5) * UNIT
    rest = tl.maximum(1.0 - v, 2.9802322387695312e-08)  # 2^-25
    return -tl.where(v < 0.25, _series(-v), logarithm(rest))


@triton.jit
def _words(seed, position, STREAM: tl.constexpr, blocks):
    """The four words of each block, uint32."""
    counter = blocks.to(tl.uint32)
    zero = counter * 0
    return tl.philox(seed, counter, zero + position.to(tl.uint32), zero + STREAM, zero)
