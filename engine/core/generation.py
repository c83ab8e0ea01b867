"""One request as its ingress follows it: what it asked for, what it got, and who works on it.

A token event is taken if its position is the next one, kept if it came before its predecessors, and dropped if that
position was delivered already or the event belongs to an earlier attempt. So whatever is retried, by whom and how
often, every token appears exactly once, and because the token at a position does not depend on who computes it, the
text is the one it would have been.
"""

from dataclasses import dataclass, field

from engine.core.errors import ModelFailedError, ServiceError
from engine.core.types import (
    Admission,
    Assignment,
    CacheWish,
    FinishReason,
    PromptEvent,
    Salt,
    SamplingParams,
    Stage,
    TokenEvent,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Generation:
    """A request under way. Its ingress alone writes to it."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: Salt
    cache: CacheWish
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    """Generated and delivered."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens behind the first; complete when the first token arrives."""
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    """The workers of this attempt; the same one twice when the request is not split, None while there is none."""
    cached_tokens: int | None = None
    imported_tokens: int = 0
    """Prompt tokens whose KV the first attempt's prefill worker was promised from elsewhere."""
    placed_at: float = 0.0
    is_answered: bool = False
    """Whether this attempt has delivered a token."""
    num_preemptions: int = 0
    failure: ServiceError | None = None
    finished_by: str | None = None
    """The worker that sent the last token; it has forgotten the request already."""
    is_stopped: bool = False
    """Whether a stop string has ended it, of which its workers do not know."""
    early: dict[int, TokenEvent] = field(default_factory=dict)
    """Events whose predecessors have not come yet: the first token and the others come from different workers."""

    @property
    def tenant(self) -> str:
        return self.cache.tenant

    @property
    def has_ended(self) -> bool:
        """Whether it has got all that it wanted."""
        return self.finished_by is not None or self.is_stopped

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.failure is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the next attempt starts from: the prompt and all that was delivered."""
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def awaits_prefill(self) -> bool:
        """Whether the decode worker of a split request still waits for its first token."""
        return self.prefill != self.decode and self.prefill is not None and not self.tokens

    def place(self, admission: Admission, block_size: int, now: float) -> None:
        """This attempt's workers are these."""
        self.prefill, self.decode = admission.prefill, admission.decode
        self.placed_at = now
        if self.attempt == 0:
            self.imported_tokens = len(admission.prefill_awaited) * block_size

    def assignments(self, admission: Admission, reply_to: str, await_timeout_s: float) -> list[tuple[str, Assignment]]:
        """What each of this attempt's workers is asked to do.

        After `await_timeout_s` without a block the manager has one of those that wait compute it
        (`Supply.replace_stalled`), so the others wait as long again. A decode worker waits for its own prefill.
        """
        split = [
            (admission.prefill, Stage.PREFILL, admission.prefill_awaited, admission.prefill_epoch),
            (admission.decode, Stage.DECODE, admission.decode_awaited, admission.decode_epoch),
        ]
        whole = [(admission.prefill, Stage.WHOLE, admission.prefill_awaited, admission.prefill_epoch)]
        return [
            (
                worker_id,
                Assignment(
                    self.request_id,
                    self.attempt,
                    stage,
                    self.token_ids,
                    len(self.prompt),
                    self.sampling,
                    reply_to,
                    self.salt,
                    awaited,
                    await_timeout_s if stage is Stage.DECODE else 2 * await_timeout_s,
                    num_scored=len(self.prompt_logprobs),
                    cache=self.cache,
                    promised_to=epoch,
                ),
            )
            for worker_id, stage, awaited, epoch in (whole if admission.prefill == admission.decode else split)
        ]

    def take(self, event: TokenEvent, worker_id: str) -> list[TokenEvent]:
        """The events that are due now that `worker_id` has sent this one, in order."""
        if event.attempt != self.attempt or self.is_over:
            return []
        if event.finish is FinishReason.ERROR:
            self.failure = ModelFailedError(f"the model could not be run: {event.detail}")
            return []
        if event.position < len(self.tokens):
            return []
        self.early[event.position] = event
        due = []
        while (following := self.early.pop(len(self.tokens), None)) is not None:
            due.append(following)
            if following.token_id is None:
                break  # the end of a request that generates nothing
            self.tokens.append(following.token_id)
        if due:
            self.is_answered = True
            self.num_preemptions = due[-1].num_preemptions
            if self.cached_tokens is None:
                self.cached_tokens = due[0].cached_tokens
            if due[-1].finish is not None:
                self.finished_by = worker_id
        return due

    def take_scores(self, event: PromptEvent) -> None:
        """Take the log-probabilities that are new: a prefill worker and a decode worker that gave up waiting for it
        report the same positions."""
        if event.attempt == self.attempt and not self.is_over:
            known = len(self.prompt_logprobs) + 1 - event.position
            assert known >= 0, "log-probabilities of prompt tokens come in order"
            self.prompt_logprobs += event.logprobs[known:]

    def dies_with(self, worker_id: str) -> bool:
        """Whether this attempt cannot go on without that worker. A prefill worker is needed up to the first token,
        which nobody else would deliver."""
        return not self.is_over and (self.decode == worker_id or (self.prefill == worker_id and not self.tokens))

    def loses_kv_with(self, worker_id: str) -> bool:
        """Whether that worker was only to send the decode worker its KV, and the decode worker can compute it."""
        return not self.is_over and self.prefill == worker_id and self.decode is not None

    def start_over(self) -> set[str]:
        """Begin another attempt, not placed yet; returns the workers of the last one."""
        workers = self.workers_to_abort()
        self.prefill = self.decode = None
        self.early.clear()
        self.attempt += 1
        self.is_answered = False
        return workers

    def workers_to_abort(self) -> set[str]:
        """Workers that may still know this attempt."""
        return {worker for worker in (self.prefill, self.decode) if worker not in (None, self.finished_by)}
