"""Mamba-2's selective scan: a memory of each head that every position fades, adds to, and reads."""

import math

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.selective_scan.reference import selective_scan_reference
from raydix.kernels.states import StateUse

__all__ = ["selective_scan"]

LANES = 16  # dimensions of a head that the C++ kernel takes at a time
MOST_STATES = 256  # numbers of one dimension's state up to which the C++ kernel keeps a head's memory on its stack


def selective_scan(
    mixed: Tensor,
    step: Tensor,
    decay_rate: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    query_start: Tensor,
    use: StateUse,
    *,
    step_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """For each row in order, and each head: d = softplus(step + step_bias) within `step_limits`, the memory S becomes
    exp(-decay_rate d) S + B (d x), and gives C S + skip x. Neighbouring heads share B and C: those of their group.

    `mixed`: [num_tokens, num_heads * head_dim + 2 * num_groups * state_size] = [x | B | C], rows contiguous; `step`:
    [num_tokens, num_heads] of the same dtype; `decay_rate`, `step_bias`, `skip`: [num_heads] float32; `states`:
    [num_slots, num_heads, state_size, head_dim] float32, a slot contiguous, read and written as `use` says;
    `query_start`: [num_sequences + 1] int32. Returns [num_tokens, num_heads * head_dim] in mixed's dtype.

    The memory is float32 and goes from row to row in one order, so the bits of a row do not depend on where chunks
    begin, nor on other sequences. Runs on CPUs. Raises `ValueError` on wrong shapes and slots, `TypeError` on wrong
    dtypes.
    """
    ops = cpu_ops()
    if ops is None or states.shape[3] % LANES or states.shape[2] > MOST_STATES:
        return selective_scan_reference(
            mixed, step, decay_rate, step_bias, skip, states, query_start, use, step_limits=step_limits
        )
    result: Tensor = ops.selective_scan(
        mixed,
        step,
        decay_rate,
        step_bias,
        skip,
        states,
        query_start,
        use.sources,
        use.write_rows,
        use.write_slots,
        *step_limits,
    )
    return result
