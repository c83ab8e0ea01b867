"""Arguments and results of sampling besides plain tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties on tokens already seen; row b owns entries `offsets[b]:offsets[b + 1]`, one per distinct token.

    `presence`, `frequency`, `repetition`: [batch] float32, where 0, 0 and 1 change nothing.
    `offsets`: [batch + 1] int64; `token_ids`: [num_entries] int64, distinct within a row, in prompt or output;
    `output_counts`: [num_entries] int32, how often the token was generated (0: only in the prompt).
    """

    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    offsets: Tensor
    token_ids: Tensor
    output_counts: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to single logits (-inf forbids a token); row b owns entries `offsets[b]:offsets[b + 1]`.

    `offsets`: [batch + 1] int64; `token_ids`: [num_entries] int64, distinct within a row; `values`: [num_entries]
    float32.
    """

    offsets: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Tokens that rows may choose: row b one of the set bits of `bits[rows[b]]`, or any if `rows[b]` is -1.

    `rows`: [batch] int32; `bits`: [num_masks, ceil(vocabulary / 32)] int32, token t is bit t % 32 of word t // 32. At
    least one bit of each mask is set, of a token with a finite logit.
    """

    rows: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One token per row, and log-probabilities where at least one row asked for them.

    `token_ids`: [batch] int64; `logprobs`: [batch] float32, of the token chosen; `top_ids` int64 and `top_logprobs`
    float32: [batch, n] with n the largest number asked for, most probable first. Figures that a row did not ask for are
    zero. `ranks`: [batch] int64, where tokens were given: each one's place among all by probability, from 1, ties by
    id.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    ranks: Tensor | None = None
