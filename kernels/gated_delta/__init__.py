"""The gated delta rule: a memory that each position fades, corrects, and reads."""

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.gated_delta.reference import gated_delta_reference
from raydix.kernels.states import StateUse

__all__ = ["gated_delta"]

LANES = 16  # values of a head that the C++ kernel takes at a time
MOST_KEYS = 256  # dimensions of a key up to which the C++ kernel keeps a head's memory on its stack


def gated_delta(
    mixed: Tensor,
    beta: Tensor,
    step: Tensor,
    decay_rate: Tensor,
    step_bias: Tensor,
    states: Tensor,
    query_start: Tensor,
    use: StateUse,
) -> Tensor:
    """For each row in order, and each head: g = -decay_rate softplus(step + step_bias), the memory S fades to exp(g) S,
    then gets k (sigmoid(beta) (v - k S)) added, and gives q S / sqrt(key_dim); q and k are divided by their lengths.

    `mixed`: [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim] = [q | k | v], rows contiguous; `beta`,
    `step`: [num_tokens, num_heads] of the same dtype; `decay_rate`, `step_bias`: [num_heads] float32; `states`:
    [num_slots, num_heads, key_dim, value_dim] float32, a slot contiguous, read and written as `use` says;
    `query_start`: [num_sequences + 1] int32. Returns [num_tokens, num_heads * value_dim] in mixed's dtype.

    The memory is float32 and goes from row to row in one order, so the bits of a row do not depend on where chunks
    begin, nor on other sequences. Runs on CPUs. Raises `ValueError` on wrong shapes and slots, `TypeError` on wrong
    dtypes.
    """
    ops = cpu_ops()
    if ops is None or states.shape[3] % LANES or states.shape[2] > MOST_KEYS:
        return gated_delta_reference(mixed, beta, step, decay_rate, step_bias, states, query_start, use)
    result: Tensor = ops.gated_delta(
        mixed,
        beta,
        step,
        decay_rate,
        step_bias,
        states,
        query_start,
        use.sources,
        use.write_rows,
        use.write_slots,
    )
    return result
