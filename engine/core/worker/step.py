"""Values of one step: the scheduler's decision, the runner's answer, and the outcome.

Part of the decision are *moves*, copies of block contents before the step computes. The scheduler decides them one
after the other while it allocates and releases blocks. Done in that order, each move finds the contents that it was
decided for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from raydix.engine.core.types import (
    DEFAULT_RETENTION,
    BlockHash,
    DraftSource,
    FinishReason,
    Handover,
    PromptEvent,
    Retention,
    Snapshot,
    TokenEvent,
    TokenLogprobs,
)
from raydix.engine.core.worker.request import Request


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy the block `source` onto the block `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Keep the contents of `blocks` outside the pool for a preempted request, and the recurrent state in slot `state`
    if there is one."""

    request_id: str
    blocks: tuple[int, ...]
    state: int | None = None


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Fill `blocks` with the last of the contents kept for the request, and slot `state` with the kept state, and drop
    the kept copy."""

    request_id: str
    blocks: tuple[int, ...]
    state: int | None = None


@dataclass(frozen=True, slots=True)
class SwapDrop:
    """Drop the contents kept for the request, if any."""

    request_id: str


Move: TypeAlias = CopyBlock | SwapOut | SwapIn | SwapDrop


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The recurrent states that a chunk reads and writes, as slots."""

    source: int | None
    """State behind the positions before the chunk; None: the chunk begins the sequence."""
    writes: tuple[tuple[int, int], ...]
    """Numbers of positions, ascending, each with the slot for the state behind so many."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Consecutive positions of one request to compute in this step."""

    request: Request
    start: int
    num_tokens: int
    store_from: int
    """Positions below `store_from` are in shared blocks already: computed for their output, not stored."""
    samples: bool
    """True if the chunk reaches the last token, so that the next token is sampled from its output."""
    scored: range = range(0)
    """Positions of the chunk computed for the log-probability of the prompt token behind each."""
    pooled: range = range(0)
    """Positions of the chunk whose hidden states are added to the request's sum."""
    draft: tuple[int, ...] = ()
    """Guessed tokens behind the request's last one: the last positions of the chunk, one more row of logits each."""
    draft_source: DraftSource | None = None
    """Origin of the draft, if there is one."""
    states: StateMoves | None = None
    """None: the model has no recurrent states."""

    @property
    def ends_pooled(self) -> bool:
        """True if the pooled hidden state of a request is known after the chunk."""
        request = self.request
        return request.num_to_pool > 0 and self.start + self.num_tokens == request.num_to_pool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The work of one step. The requests in `preempted` lost their blocks to make room."""

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    """Copies of blocks to be made in this order, before the chunks are computed."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The runner's answer for one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_last: bool = False
    """True if the token ends the answer by the request's grammar, whatever its parameters say."""


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The runner's answer to a step, by request id."""

    sampled: Mapping[str, Sequence[SampledToken]] = field(default_factory=dict)
    """The new tokens of each chunk that samples: the accepted ones of its draft, and the one behind."""
    scores: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities for each position of a chunk's `scored`, if there are any."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Requests that can have no next token, by no fault of the model's, each with the reason."""
    sums: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    """Sums (`raydix.engine.core.worker.prompt_results`) of each chunk with `pooled` positions, up to each end of a
    block among these, and up to the last of these if no block ends there."""
    pooled: Mapping[str, bytes] = field(default_factory=dict)
    """Pooled state, as `TokenEvent.pooled`, of each chunk that `ends_pooled`."""


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Blocks and recurrent states to be exported; the exporter holds a reference to each until it has copied the
    contents."""

    request_id: str
    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]
    handover: Handover | None = None
    retention: Retention = DEFAULT_RETENTION
    states: tuple[tuple[Snapshot, int], ...] = ()
    """Each with its slot."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of a step: events for the ingress, blocks for other workers, requests that have ended."""

    scores: tuple[PromptEvent, ...]
    events: tuple[TokenEvent, ...]
    exports: tuple[ExportedBlocks, ...]
    finished: tuple[Request, ...]
    answered: tuple[Request, ...] = ()
    """Requests whose prompt was completed in the step, by this worker."""


def chunk_of(request: Request, num_tokens: int) -> ScheduledChunk:
    """The next `num_tokens` positions of a request."""
    start, end = request.num_computed, request.num_computed + num_tokens
    # A prompt that is only scored or embedded asks for no token, so its last chunk samples nothing.
    samples = end == len(request.token_ids) and request.assignment.sampling.max_tokens > 0
    if not request.has_prompt_results:
        return ScheduledChunk(request, start, num_tokens, store_from=request.num_shared, samples=samples)
    return ScheduledChunk(
        request,
        start,
        num_tokens,
        store_from=request.num_shared,
        samples=samples,
        # A preempted request computes positions again whose results it has: those are asked for once only.
        scored=range(max(start, request.num_scored), min(end, request.num_to_score)),
        pooled=range(max(start, request.num_pooled), min(end, request.num_to_pool)),
    )


def events_of(chunk: ScheduledChunk, sampled: Sequence[SampledToken], max_model_len: int) -> list[TokenEvent]:
    """The next tokens of a chunk's request, up to one that ends the request."""
    request, events = chunk.request, list[TokenEvent]()
    for num_ahead, token in enumerate(sampled):
        # Accepted draft tokens count one by one, so that an answer ends where it would without drafts, and the rest is
        # dropped.
        finish = end_after(request, token, max_model_len, num_ahead)
        events.append(event_of(request, token, finish, num_ahead))
        if finish is not None:
            break
    # The counts of a draft ride on the step's last event: one event for each step has them, and a sum is never counted
    # twice.
    if chunk.draft and events:
        num_accepted = len(events) - 1
        events[-1] = events[-1]._replace(
            num_accepted=num_accepted,
            num_rejected=len(chunk.draft) - num_accepted,
            draft_source=chunk.draft_source,
        )
    return events


def event_of(
    request: Request,
    sampled: SampledToken | None,
    finish: FinishReason | None,
    num_ahead: int = 0,
    *,
    pooled: bytes | None = None,
) -> TokenEvent:
    """A next token of a request, behind `num_ahead` others, or its end without one but perhaps with its pooled
    hidden state."""
    return TokenEvent(
        request_id=request.request_id,
        attempt=request.assignment.attempt,
        position=request.num_output + num_ahead,
        token_id=None if sampled is None else sampled.token_id,
        finish=finish,
        logprobs=None if sampled is None else sampled.logprobs,
        cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        pooled=pooled,
    )


def end_after(request: Request, sampled: SampledToken, max_model_len: int, num_ahead: int = 0) -> FinishReason | None:
    """The reason why a request ends with a next token, behind `num_ahead` others; None if more tokens follow."""
    sampling, count = request.assignment.sampling, request.num_output + num_ahead + 1
    # A complete grammar ends an answer below min_tokens, too: no token may follow.
    if sampled.is_last or (sampled.token_id in sampling.stop_token_ids and count > sampling.min_tokens):
        return FinishReason.STOP
    # The context counts the prompt, and a token of which no further one can be computed is the last.
    if count >= sampling.max_tokens or len(request.token_ids) + num_ahead + 1 >= max_model_len:
        return FinishReason.LENGTH
    return None
