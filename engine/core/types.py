"""Values that cross the borders between ingress, manager and workers. Frozen, picklable, no behaviour."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

BlockHash: TypeAlias = bytes
"""16-byte digest of a block: its tokens, all tokens before it, and what the KV was computed with."""


class Role(StrEnum):
    """What a worker is placed for. Every worker can do everything; the role decides what it is asked."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Validated where requests enter (`engine.api`)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """All ids that end generation, the model's own end-of-sequence ids included unless `ignore_eos`."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely alternatives reported with each token; 0 reports the chosen token only."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token's and the most likely ones', best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
