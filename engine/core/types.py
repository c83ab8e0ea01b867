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


class EvictionReason(StrEnum):
    """Why a worker's pool has a block no more. All but the last two made room for another, also among segments."""

    FULL = "pool full"
    EXPIRED = "expired"
    QUOTA = "over quota"
    """Its tenant had more than its ceiling."""
    TAKEN = "taken over"
    """The request that it was for writes on in it."""
    RESET = "reset"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Validated where requests enter (`engine.api`)."""

    max_tokens: int
    """0: the request ends when its prompt is computed."""
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
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, behind its first."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token's and the most likely ones', best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int | None = None
    """The chosen token's place among all tokens, from 1, ties by id; known for prompt tokens only."""


class Stage(StrEnum):
    """Which part of a request an assignment asks a worker for."""

    WHOLE = "whole"
    """Prefill and decode."""
    PREFILL = "prefill"
    """Compute the prompt, sample one token, export the KV."""
    DECODE = "decode"
    """Go on from imported KV; compute what has not arrived in time."""


@dataclass(frozen=True, slots=True)
class Salt:
    """Who may share the KV of a sequence; the ingress knows by who asks (`engine.core.tenants`)."""

    private: bytes = b""
    """Blocks are shared among sequences of the same value."""
    num_public_tokens: int = 0
    """Tokens from the first that are no secret; blocks wholly among them are shared with everyone."""


@dataclass(frozen=True, slots=True)
class CacheWish:
    """How a request would have its KV kept once it has ended."""

    tenant: str = ""
    """Whose quota it counts against."""
    priority: int = 0
    ttl_s: float | None = None
    """From the end of the request on; None for no limit."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request's wish comes to for its blocks. Of several requests' wishes for one block the most generous
    counts."""

    tenant: str = ""
    priority: int = 0
    """A tenant's blocks of a lower priority are evicted before its blocks of a higher one."""
    expires_at: float | None = None
    """From then on the blocks are evicted before any other; None for never. In seconds, of a pool's clock or, in what
    leaves its process, since the epoch."""


DEFAULT_RETENTION = Retention()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One request as a worker gets it. A failed-over request comes again with a higher `attempt` and more tokens."""

    request_id: str
    attempt: int
    stage: Stage
    token_ids: tuple[int, ...]
    """The prompt, and after it every token that was generated already."""
    num_prompt_tokens: int
    sampling: SamplingParams
    reply_to: str
    """Id of the ingress replica whose token stream gets the events."""
    salt: Salt = Salt()
    awaited: tuple[BlockHash, ...] = ()
    """Blocks that others were told to send here; waited for, never depended on."""
    await_timeout_s: float = 30.0
    """How long to wait without any of them arriving."""
    num_scored: int = 0
    """Prompt tokens behind the first whose log-probabilities were delivered by earlier attempts."""
    cache: CacheWish = CacheWish()
    promised_to: int = 0
    """Epoch of the worker incarnation that blocks and handover were promised to; 0 if none were."""


class TokenEvent(NamedTuple):
    """One generated token, or the end of a request without one (`token_id` None)."""

    request_id: str
    attempt: int
    position: int
    """Index among the generated tokens, from 0; the same whichever attempt or worker produced it."""
    token_id: int | None
    finish: FinishReason | None
    logprobs: TokenLogprobs | None
    cached_tokens: int
    """Prompt tokens whose KV this attempt found in a cache."""
    detail: str | None = None
    """What went wrong, when `finish` is ERROR."""
    num_preemptions: int = 0
    """How often this attempt lost its blocks so far."""


class PromptEvent(NamedTuple):
    """Log-probabilities of consecutive prompt tokens. A worker reports them in order, all before the first token."""

    request_id: str
    attempt: int
    position: int
    """Index in the prompt of the first token reported; at least 1, since nothing precedes token 0."""
    logprobs: tuple[TokenLogprobs, ...]


class Handover(NamedTuple):
    """The end of a prefill assignment: the decode worker can go on from the sampled token."""

    request_id: str
    attempt: int
    token_id: int
    tail: BlockHash | None
    """The partial last block of the prompt, exported like any other."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What an exported segment contains. Its payload is the blocks in this order, one after the other."""

    fingerprint: str
    """Of the model, KV dtype and layout; another worker's must be equal."""
    hashes: tuple[BlockHash, ...]
    """One per block, in sequence order; the last one is partial when `handover` names it as its tail."""
    num_bytes: int
    checksum: int
    handover: Handover | None = None
    retention: Retention = DEFAULT_RETENTION

    @property
    def full_hashes(self) -> tuple[BlockHash, ...]:
        """The blocks that others can use: all but the tail."""
        return self.hashes[:-1] if self.handover is not None and self.handover.tail is not None else self.hashes


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """What the manager needs to know of a request to place it."""

    request_id: str
    attempt: int
    hashes: tuple[BlockHash, ...]
    """Of all full blocks of the prompt and of what was generated already."""
    num_tokens: int
    session: str | None = None
    ingress_id: str = ""
    """Who asks; if it falls silent, its requests are released."""
    cache: CacheWish = CacheWish()
    preview: tuple[int, ...] = ()
    """The first tokens, to show the prefix by."""
    generates: bool = True
    """Whether tokens follow the prompt; if none do, nobody needs to decode."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The manager's answer: who runs the request and which blocks will be sent to them."""

    request_id: str
    attempt: int
    prefill: str
    decode: str
    prefill_epoch: int
    decode_epoch: int
    prefill_awaited: tuple[BlockHash, ...]
    decode_awaited: tuple[BlockHash, ...]
