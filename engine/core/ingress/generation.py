"""State of one request at its ingress: assignments, delivered tokens, workers.

| position of a token event | the event is |
|---|---|
| the next one | delivered |
| further on | kept until its predecessors have come |
| delivered already, or of an earlier attempt | dropped |

So every token is delivered exactly once, whatever is retried. The token at a position does not depend on the worker, so
retries do not change the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raydix.engine.core.answers.continuations import BegunAnswer, packed
from raydix.engine.core.errors import ModelFailedError, RaydixError, RequestError
from raydix.engine.core.hashing import BlockChain
from raydix.engine.core.ingress.cluster_view import ModelFacts
from raydix.engine.core.objectives import LATE_PRIORITY, NO_OBJECTIVES, Objectives
from raydix.engine.core.types import (
    Adapter,
    Admission,
    AdmitRequest,
    Assignment,
    AttemptName,
    BlockHash,
    CacheHints,
    DraftSource,
    DraftUse,
    Expected,
    FinishReason,
    Paused,
    PromptEvent,
    Salt,
    Sampling,
    Stage,
    StartTimes,
    TokenEvent,
    TokenLogprobs,
)

NUM_PREVIEW_TOKENS = 32  # first tokens of a prompt that the manager keeps to show its prefix by


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What is known of one attempt. Times are of the ingress' monotonic clock; None where the attempt did not come so
    far."""

    number: int
    prefill: str | None
    decode: str | None
    begun_at: float
    """Time from which the attempt was to be admitted."""
    placed_at: float | None
    answered_at: float | None
    """Time of the first token."""
    handover_s: float | None
    """Duration as `Generation.handover_s`."""
    last_at: float | None
    """Time of the last token."""
    ended_at: float | None
    """Time at which another attempt took over; None: there is none."""
    num_tokens: int
    """Tokens delivered up to the end of the attempt, by earlier ones too."""
    starts: Mapping[str, StartTimes]
    """Beginnings by worker."""
    expected: Expected | None
    """The manager's expectations; None without the manager."""
    has_moved: bool = False
    """True if the attempt ended because its worker was about to stop."""


@dataclass(slots=True, eq=False)
class Generation:
    """A request under way. Only its ingress writes to the fields."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: Salt
    cache: CacheHints
    adapter: Adapter | None = None
    """Adapter as `Assignment.adapter`."""
    session: str | None = None
    priority: int = 0
    """Priority as `Assignment.priority`."""
    objectives: Objectives = NO_OBJECTIVES
    prediction: tuple[int, ...] = ()
    """Prediction as `Assignment.prediction`."""
    reasoning_turn: int | None = None
    """Turn as `AdmitRequest.reasoning_turn`."""
    answer_name: bytes = b""
    """Name as `AdmitRequest.answer_name`, from the first admission on."""
    tokens: list[int] = field(default_factory=list)
    """Generated and delivered tokens."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens behind the first; complete when the first token arrives."""
    pooled: bytes | None = None
    """Pooled state as `TokenEvent.pooled`, once it has come."""
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    """The workers of this attempt: equal when the request is not split, None before the placement."""
    cached_tokens: int | None = None
    imported_tokens: int = 0
    """Prompt tokens whose KV was promised from elsewhere to the first attempt's prefill worker."""
    begun_at: float = 0.0
    """Time from which this attempt was to be admitted."""
    placed_at: float = 0.0
    first_placed_at: float = 0.0
    """Time of the first attempt's placement; `placed_at` is the present one's."""
    answered_by: str | None = None
    """The worker that sent this attempt's first token, once that is delivered."""
    taken_by: set[str] = field(default_factory=set)
    """The workers that have taken this attempt on, as far as is known."""
    answered_at: float = 0.0
    """Time of this attempt's first token."""
    last_at: float = 0.0
    """Time of this attempt's last token so far."""
    starts: dict[str, StartTimes] = field(default_factory=dict)
    """Beginnings of this attempt by worker."""
    expected: Expected | None = None
    """The manager's expectations of this attempt; None without the manager."""
    past: list[AttemptFacts] = field(default_factory=list)
    """Attempts before this one."""
    handover_s: float | None = None
    """Seconds from this attempt's first token to the second one, where another worker computed the second one."""
    num_preemptions: int = 0
    accepted: list[int] = field(default_factory=list)
    """Positions of the tokens that were in a draft, ascending."""
    num_rejected: int = 0
    """Draft tokens that did not become tokens."""
    drafts: dict[DraftSource, DraftUse] = field(default_factory=dict)
    """Drafts of this attempt."""
    stopped: set[tuple[str, int]] = field(default_factory=set)
    """Worker incarnations, by id and epoch, that died or fell silent by what they computed for this request, or perhaps
    for another one."""
    failure: RaydixError | None = None
    finished_by: str | None = None
    """The worker that sent the last token, and so has forgotten the request already."""
    stop: FinishReason | None = None
    """Reason for the answer's end; None before it."""
    paused: Paused | None = None
    """The manager's last answer, while the request's session waits for its turn."""
    is_stopped: bool = False
    """True if a stop string has ended the request; its workers do not know."""
    early: dict[int, TokenEvent] = field(default_factory=dict)
    """Events ahead of their predecessors: the first token and the others come from different workers."""

    @property
    def tenant(self) -> str:
        return self.cache.tenant

    @property
    def has_ended(self) -> bool:
        """True once all tokens were delivered."""
        return self.finished_by is not None or self.is_stopped

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.failure is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Start of the next attempt: the prompt and all delivered tokens."""
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def is_answered(self) -> bool:
        """True once this attempt has delivered a token."""
        return self.answered_by is not None

    @property
    def attempt_name(self) -> AttemptName:
        return AttemptName(self.request_id, self.attempt)

    @property
    def awaits_prefill(self) -> bool:
        """True while the decode worker of a split request waits for its first token."""
        return self.prefill != self.decode and self.prefill is not None and not self.is_answered

    def place(self, admission: Admission, block_size: int, now: float) -> None:
        """Record this attempt's workers."""
        self.prefill, self.decode = admission.prefill, admission.decode
        # Once late, always behind: an attempt that is in time does not raise the priority again.
        if admission.gives_way:
            self.priority = max(self.priority, LATE_PRIORITY)
        self.placed_at = now
        self.expected = admission.expected
        # Imports and the first placement are figures of the request, to which its retries add nothing.
        if self.attempt == 0:
            self.first_placed_at = now
            self.imported_tokens = len(admission.prefill_awaited) * block_size

    def assignments(self, admission: Admission, reply_to: str, await_timeout_s: float) -> list[tuple[str, Assignment]]:
        """The assignments of this attempt's workers, by worker id.

        After `await_timeout_s` without a block the manager lets one of the waiting workers compute it
        (`Supply.replace_stalled`), so the others wait as long again. A decode worker waits for its own prefill only.
        """
        prefill_awaited = (*admission.prefill_awaited, *admission.prefill_states)
        split = [
            (admission.prefill, Stage.PREFILL, prefill_awaited, admission.prefill_epoch),
            (admission.decode, Stage.DECODE, admission.decode_awaited, admission.decode_epoch),
        ]
        whole = [(admission.prefill, Stage.WHOLE, prefill_awaited, admission.prefill_epoch)]

        return [
            (
                worker_id,
                Assignment(
                    request_id=self.request_id,
                    attempt=self.attempt,
                    stage=stage,
                    token_ids=self.token_ids,
                    num_prompt_tokens=len(self.prompt),
                    sampling=self.sampling,
                    reply_to=reply_to,
                    salt=self.salt,
                    awaited=awaited,
                    await_timeout_s=await_timeout_s if stage is Stage.DECODE else 2 * await_timeout_s,
                    num_scored=len(self.prompt_logprobs),
                    cache=self.cache,
                    promised_to=epoch,
                    priority=self.priority,
                    prediction=() if stage is Stage.PREFILL else self.prediction,
                    continuations=() if stage is Stage.PREFILL else admission.continuations,
                    is_suspect=bool(self.stopped),
                    adapter=self.adapter,
                    parts_at=admission.num_known,
                ),
            )
            for worker_id, stage, awaited, epoch in (whole if admission.prefill == admission.decode else split)
        ]

    def idle_assignment(self, token_ids: Sequence[int], reply_to: str) -> Assignment | None:
        """An idle assignment for KV that a later request may begin with.

        None without ids, or if the ids begin with other public tokens than the prompt: the salt belongs to the latter.
        """
        # The next turn may invoke its adapter elsewhere, and what stands before is the model's.
        if self.adapter is not None and self.adapter.invocation:
            return None
        # The public beginning is hashed without the tenant's salt, so ids with another beginning would get wrong names.
        num_public = self.salt.num_public_tokens
        if not token_ids or tuple(token_ids[:num_public]) != self.prompt[:num_public]:
            return None

        return Assignment(
            request_id=f"{self.request_id}-next",
            attempt=self.attempt,
            stage=Stage.WHOLE,
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=Sampling(max_tokens=0),
            reply_to=reply_to,
            salt=self.salt,
            cache=self.cache,
            is_idle=True,
            adapter=self.adapter,
        )

    def admit_request(
        self, root: BlockHash, model: ModelFacts, ingress_id: str, avoided: tuple[str, ...]
    ) -> AdmitRequest:
        """What the manager is asked for this attempt. `root`: of the workers' block hashes; `avoided`: workers that are
        silent or doubted."""
        token_ids = self.token_ids
        chain = BlockChain(root, self.salt, model.block_size)
        hashes = chain.hashes(token_ids) if model.names_blocks else []
        return AdmitRequest(
            self.request_id,
            self.attempt,
            tuple(hashes),
            len(token_ids),
            session=self.session,
            ingress_id=ingress_id,
            cache=self.cache,
            preview=self.prompt[:NUM_PREVIEW_TOKENS],
            generates=self.sampling.max_tokens > 0,
            avoided=avoided,
            answer_name=self.named_answer(chain, hashes) if model.names_answers else b"",
            objectives=self.objectives,
            priority=self.priority,
            reasoning_turn=self.reasoning_turn,
            adapter=None if self.adapter is None else self.adapter.name,
        )

    def named_answer(self, chain: BlockChain, hashes: Sequence[BlockHash]) -> bytes:
        """The name of the place where the answer begins, from the first attempt on; empty if nobody may draft from the
        answer. `hashes`: of the full blocks so far."""
        # The name is the place behind the prompt, so a retry, whose chain goes further, keeps that of the first
        # attempt.
        wants_drafts = self.sampling.speculation and self.sampling.max_tokens > 0
        if wants_drafts and not self.tokens:
            self.answer_name = chain.answer_name(hashes, self.prompt)
        return self.answer_name

    def answer(self) -> BegunAnswer | None:
        """The beginning of the answer so far, if others may draft from it."""
        if not self.answer_name or not self.tokens or self.failure is not None:
            return None
        return BegunAnswer(self.answer_name, packed(self.tokens))

    def delivered(self, num_tokens: int, now: float, *, is_first: bool) -> None:
        """Note the time of delivered tokens: of the first two of an attempt, and of the last."""
        self.last_at = now
        if is_first:
            self.answered_at = now
        if self.handover_s is None and self.prefill != self.decode and (num_tokens > 1 or not is_first):
            self.handover_s = now - self.answered_at

    def take(self, event: TokenEvent, worker_id: str) -> list[TokenEvent]:
        """Accept an event from `worker_id`; returns the events that are due now, in order."""
        if event.attempt != self.attempt or self.is_over:
            return []
        if event.finish is FinishReason.ERROR:
            self.failure = failure_of(event)
            return []
        if event.position < len(self.tokens):
            return []
        if event.start is not None:
            self.starts[worker_id] = event.start

        # Events of one worker come in order, but the first token of a split request comes from another worker.
        self.early[event.position] = event
        due = []
        while (following := self.early.pop(len(self.tokens), None)) is not None:
            due.append(following)
            if following.token_id is None:  # the end of a request that generates nothing
                self.pooled = following.pooled
                break
            self.tokens.append(following.token_id)

        if due:
            self.answered_by = self.answered_by or worker_id
            self.num_preemptions = due[-1].num_preemptions
            for event in due:
                if event.draft_source is not None:
                    self._count_draft(event.draft_source, event)
            if self.cached_tokens is None:
                self.cached_tokens = due[0].cached_tokens
            if due[-1].finish is not None:
                self.finished_by, self.stop = worker_id, due[-1].finish
        return due

    def _count_draft(self, source: DraftSource, event: TokenEvent) -> None:
        self.accepted += range(event.position - event.num_accepted, event.position)
        self.num_rejected += event.num_rejected
        _, num_drafted, num_accepted = self.drafts.get(source, DraftUse(source, 0, 0))
        num_drafted += event.num_accepted + event.num_rejected
        self.drafts[source] = DraftUse(source, num_drafted, num_accepted + event.num_accepted)

    def lacks_before(self, event: PromptEvent | TokenEvent) -> bool:
        """True if events before this one were lost on the way. One worker's events come in order: the prompt's
        log-probabilities, then tokens. Only the first token of an attempt may come late, from another worker."""
        if event.attempt != self.attempt or self.is_over:
            return False
        if isinstance(event, PromptEvent):
            return event.position > len(self.prompt_logprobs) + 1
        if event.finish is FinishReason.ERROR:
            return False
        if event.position == len(self.tokens):
            is_scored = self.sampling.prompt_logprobs is not None
            return is_scored and not self.is_answered and len(self.prompt_logprobs) < len(self.prompt) - 1
        # A decode worker's tokens may overtake the prefill worker's first one; behind that one nothing may be missing.
        is_only_sender = self.is_answered or self.prefill == self.decode
        return is_only_sender and event.position > len(self.tokens)

    def may_be_at(self, worker_id: str) -> bool:
        """True if a worker may still have this attempt; a prefill worker ends it with its first token."""
        return worker_id == self.decode or (worker_id == self.prefill and worker_id != self.answered_by)

    def take_scores(self, event: PromptEvent) -> None:
        """Append new log-probabilities.

        Positions may be reported twice: by a prefill worker, and by a decode worker that gave up waiting for the
        prefill.
        """
        if event.attempt == self.attempt and not self.is_over:
            # Positions begin at 1, as the first token has no log-probability. Those that are known already are skipped.
            known = len(self.prompt_logprobs) + 1 - event.position
            self.prompt_logprobs += event.logprobs[known:]

    def dies_with(self, worker_id: str) -> bool:
        """True if this attempt cannot continue without `worker_id`.

        The prefill worker is needed up to the attempt's first token: once it has handed over, nobody else would deliver
        that token.
        """
        is_needed = self.decode == worker_id or (self.prefill == worker_id and not self.is_answered)
        return is_needed and not self.is_over

    def loses_kv_with(self, worker_id: str) -> bool:
        """True if `worker_id` was only to send KV to the decode worker, which can compute the KV itself."""
        return not self.is_over and self.prefill == worker_id and self.decode is not None

    def attempt_facts(self, ended_at: float | None = None, *, has_moved: bool = False) -> AttemptFacts:
        """The present attempt, which ends at `ended_at` if another one is to begin."""
        return AttemptFacts(
            number=self.attempt,
            prefill=self.prefill,
            decode=self.decode,
            begun_at=self.begun_at,
            placed_at=None if self.prefill is None else self.placed_at,
            answered_at=self.answered_at if self.is_answered else None,
            handover_s=self.handover_s,
            last_at=self.last_at if self.is_answered else None,
            ended_at=ended_at,
            num_tokens=len(self.tokens),
            starts=dict(self.starts),
            expected=self.expected,
            has_moved=has_moved,
        )

    def start_over(self, now: float, *, has_moved: bool = False) -> set[str]:
        """Begin another attempt, without a placement yet; returns the workers of the last attempt. `has_moved`: the
        last one's worker is about to stop."""
        self.past.append(self.attempt_facts(now, has_moved=has_moved))
        self.begun_at = now
        self.starts.clear()
        self.expected = None
        workers = self.workers_to_abort()
        self.prefill = self.decode = None
        self.early.clear()
        self.drafts.clear()
        self.attempt += 1
        self.answered_by = None
        self.taken_by.clear()
        self.handover_s = None
        return workers

    def workers_to_abort(self) -> set[str]:
        """Workers that may still know this attempt."""
        return {worker for worker in (self.prefill, self.decode) if worker not in (None, self.finished_by)}


def failure_of(event: TokenEvent) -> RaydixError:
    """Return the error that a worker's event with the finish ERROR stands for."""
    if event.is_refusal:
        return RequestError(f"The answer cannot follow its grammar: {event.detail}.")
    return ModelFailedError(f"the model could not be run: {event.detail}")
