"""A client's request under way: its choices, and the tokens and text that each has so far."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from raydix.engine.api.assembler import ChoiceAssembler, Piece
from raydix.engine.api.compaction import Summary, is_due
from raydix.engine.api.context_edits import ContextEdits
from raydix.engine.api.openai_responses.stored import Claim, Run
from raydix.engine.api.responses import ResponseHead, TokenUsage, function_call, message_parts, total_usage
from raydix.engine.api.resuming import EventIds
from raydix.engine.api.spec import ChatMessage, GenerationSpec
from raydix.engine.api.trace_context import TraceContext
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.parsers.answer import AssembledMessage
from raydix.engine.core.ingress.room import Permit
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import FinishReason, Sampling, TokenEvent, TokenLogprobs
from raydix.engine.serving.chats import Chat
from raydix.engine.serving.prompt_records import Diagnosis
from raydix.engine.serving.served_model import AdapterUse

MANY_LISTED = 128  # log-probabilities of a position above which they are most of an answer's memory
LISTED_BYTES = 8  # bytes of one log-probability in an array, with its token's id
SHOWN_BYTES = 128  # most bytes of one log-probability as text, in the event or slice that is being made
SCORE_BYTES = 40  # bytes of one log-probability as Python objects
# Tokens for which short lists of log-probabilities are counted where the client sets no limit: nearly all answers end
# long before the context does.
USUAL_TOKENS = 1024


@dataclass(slots=True, eq=False)
class Answer:
    """One choice under way."""

    generation: Generation
    assembler: ChoiceAssembler
    index: int
    echo: str = ""
    """Text of the prompt, if the answer is to begin with the prompt."""
    first_token_at: float | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the generated tokens; kept for whole answers only."""
    pieces: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """Stop string or token at the end (`Piece.stop_reason`)."""
    chat: Chat | None = None
    """Chat that the choice answers, if there is one."""
    message_id: str | None = None
    """Reference under which the answer's token ids are kept."""
    message: AssembledMessage | None = None
    """Parts of the text, if it is parsed."""
    permit: Permit | None = None
    """Held by the answer until it runs; None from then on."""
    is_by_token: bool = False
    """Each piece has one token, so that pieces are a function of the tokens and not of time."""
    successor: "Answer | None" = None
    """Answer of the same job that waits for this one's permit."""
    lender: "Answer | None" = None
    """Answer of another job that gets the permit back behind the last successor, and runs no sooner for it."""

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Hold the answer's permit, and hand it on to the successor, give it back to the lender or release it at the
        end, or before, when what is yielded is called."""
        assert self.permit is not None, "an answer runs once, before its job is closed"
        permit, self.permit = self.permit, None
        is_over = False

        def over() -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            heir = self.successor or self.lender
            if heir is None:
                permit.release()
            else:
                heir.permit = permit

        try:
            yield over
        finally:
            over()

    def parts(self, events: list[TokenEvent]) -> Iterable[Sequence[TokenEvent]]:
        """The events of each piece to make of events that came together: of a token where its log-probabilities are
        many, so that an event of the stream has those of one position."""
        is_by_token = self.is_by_token or (self.generation.sampling.logprobs or 0) > MANY_LISTED
        return [[event] for event in events] if is_by_token else [events]

    @property
    def text(self) -> str:
        """Generated text so far."""
        return "".join(self.pieces)

    def as_message(self) -> ChatMessage:
        """The answer as a client sends it back."""
        parts = {"content": self.text} if self.message is None else message_parts(self.message, function_call)
        # Most clients send no reasoning back.
        parts.pop("reasoning", None)
        return {"role": "assistant", **parts, "content": parts["content"] or ""}

    @property
    def is_stored(self) -> bool:
        """True if the finished answer is to be kept: its message has the text and nothing else."""
        is_asked = self.chat is not None and self.chat.is_stored
        return is_asked and (self.message is None or self.message.content == self.text)

    def take(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.pieces.append(piece.text)
        self.finish, self.stop_reason = piece.finish, piece.stop_reason
        if self.message is not None:
            # Before the events: the last call counts as one although its end is missing.
            self.message.is_cut = piece.finish is FinishReason.LENGTH
            self.message.take(piece.events)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens; 0 without any."""
        return sum(at.chosen for at in self.logprobs) / max(1, len(self.logprobs))

    def usage(self) -> TokenUsage:
        """Usage of this choice alone so far."""
        num_prompt = len(self.generation.prompt)
        cached = min(self.generation.cached_tokens or 0, num_prompt)

        # Tokens behind a stop string were right, but are no part of the answer.
        accepted = self.generation.accepted
        num_accepted = bisect_left(accepted, len(self.token_ids))
        num_cut = 0 if self.finish is None else len(accepted) - num_accepted
        return TokenUsage(
            num_prompt,
            len(self.token_ids),
            cached,
            self.assembler.num_reasoning_tokens,
            accepted_tokens=num_accepted,
            rejected_tokens=self.generation.num_rejected + num_cut,
        )

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Log-probabilities of each token of the prompt; complete when the first piece has come."""
        return [None, *self.generation.prompt_logprobs]


@dataclass(slots=True, eq=False)
class Job:
    """One request under way; its maker closes it."""

    request_id: str
    spec: GenerationSpec
    tenant: Tenant
    head: ResponseHead
    answers: list[Answer]
    arrived_at: float
    marked_tokens: tuple[int, ...] = ()
    """Tokens of the prompt before each of the request's marks."""
    unread: GenerationSpec | None = None
    """The request before it was read, where its conversation may be compacted."""
    begins_anew: bool = False
    """A summary is to take the place of the conversation before it is answered."""
    diagnosis: Diagnosis | None = None
    """The prompt beside an earlier one, if the request asks why it was not hit."""
    edits: ContextEdits | None = None
    """What was left out of the client's chat, where the request asks for edits."""
    summary: Summary | None = None
    """The summary that was made for the request."""
    event_ids: EventIds | None = None
    """Ids of the stream's events, if the request asks for ids."""
    run: Run | None = None
    """All that is needed to generate a response in the background again; None for other requests."""
    claim: Claim | None = None
    """The response in the background that the answer is to end; None for other requests."""
    is_repeated: bool = False
    """The answer was or is generated elsewhere, too: this job is for a reader of its stream, and keeps nothing."""
    num_had_events: int = 0
    """Events of the stream that its reader has already."""
    adapter_use: AdapterUse | None = None
    """Hold on the request's adapter; None for the model alone."""
    trace: TraceContext | None = None
    """Span that the request's own ones are below; None: they begin a trace."""

    @property
    def is_paused(self) -> bool:
        """True while a choice waits for its session's turn."""
        return any(answer.generation.paused is not None for answer in self.answers)

    @property
    def conversation(self) -> GenerationSpec:
        """The request whose conversation may be compacted, as the model sees it: with its edits made."""
        assert self.unread is not None
        return replace(self.unread, messages=self.spec.messages, edits=None)

    def is_to_begin_anew(self) -> bool:
        """True if a summary is to take the place of the conversation, by the request's wish and its prompt's length."""
        # A stream that can be gone on with needs the same prompt again, and a second summary would have other words.
        if self.unread is None or self.event_ids is not None:
            return False
        # Its stream can be read again, too, from the prompt on.
        if self.spec.form.stream and self.spec.turn is not None and self.spec.turn.in_background:
            return False
        return is_due(self.conversation, len(self.answers[0].generation.prompt))

    def held_bytes(self, hidden_size: int) -> int:
        """Memory that the answers may need until they are sent, where it is much: for log-probabilities, also those of
        a prompt, and for pooled hidden states of `hidden_size`."""
        num_bytes = 0
        for answer in self.answers:
            sampling, num_prompt = answer.generation.sampling, len(answer.generation.prompt)
            if sampling.logprobs is not None:
                num_bytes += self._listed_bytes(sampling, max(sampling.logprobs, len(sampling.logprob_token_ids)))
            if (num_top := sampling.prompt_logprobs) is not None:
                num_bytes += num_prompt * (num_top + 1) * (LISTED_BYTES if num_top > MANY_LISTED else SCORE_BYTES)
            if sampling.pooling is not None:
                num_bytes += hidden_size * SCORE_BYTES // 2
        return num_bytes + SHOWN_BYTES * max((a.generation.sampling.logprobs or 0 for a in self.answers), default=0)

    def _listed_bytes(self, sampling: Sampling, num_listed: int) -> int:
        """Memory of an answer's log-probabilities, `num_listed` beside that of each token."""
        if num_listed > MANY_LISTED:
            return sampling.max_tokens * num_listed * LISTED_BYTES
        # A stream sends them on, token by token.
        if self.spec.form.stream:
            return 0
        has_limit = self.spec.max_tokens is not None
        num_tokens = sampling.max_tokens if has_limit else min(sampling.max_tokens, USUAL_TOKENS)
        return num_tokens * (num_listed + 1) * SCORE_BYTES

    def hand_over(self, count: int) -> list[Permit]:
        """Up to `count` permits of answers that do not run now, of which the caller is the owner from now on."""
        permits = list[Permit]()
        for answer in self.answers[:count]:
            if answer.permit is not None:
                permits.append(answer.permit)
                answer.permit = None
        return permits

    def close(self) -> None:
        """Release the permits of answers that will never run, and the adapter."""
        if self.adapter_use is not None:
            self.adapter_use.release()
        for answer in self.answers:
            if answer.permit is not None:
                answer.permit.release()
                answer.permit = None

    def chosen(self) -> list[Answer]:
        """Finished answers of the response: of each prompt's samples the `n` best ones, best first."""
        n, num_samples = self.spec.n, self.spec.num_samples
        if n == num_samples:
            return self.answers
        chosen: list[Answer] = []
        for start in range(0, len(self.answers), num_samples):
            chosen += sorted(self.answers[start : start + num_samples], key=lambda answer: -answer.mean_logprob)[:n]
        return chosen

    def pooled(self) -> list[bytes]:
        """Pooled hidden states of the prompts of a finished job of embeddings, one for each input in their order."""
        states = [answer.generation.pooled for answer in self.answers]
        assert all(state is not None for state in states), "a generation with pooling ends with its pooled state"
        return [state for state in states if state is not None]

    def usage(self) -> TokenUsage:
        """Prompt tokens once per prompt, generated tokens of every sample."""
        # Samples of a prompt share the prompt, which is computed and counted once.
        n = self.spec.num_samples
        prompts = [self.answers[start : start + n] for start in range(0, len(self.answers), n)]
        return total_usage([_usage_of_samples(samples) for samples in prompts])


def _usage_of_samples(samples: Sequence[Answer]) -> TokenUsage:
    """Usage of all samples of one prompt, the prompt's as the first sample's."""
    usages = [answer.usage() for answer in samples]
    if len(usages) == 1:
        return usages[0]
    return replace(total_usage(usages), prompt_tokens=usages[0].prompt_tokens, cached_tokens=usages[0].cached_tokens)
