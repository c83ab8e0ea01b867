"""Notes of the stimuli of a replica's data plane (`engine.core.stimuli`): no tokens, and no text.

Decisions depend on neither, so the notes are enough to decide the same again; the names of blocks, which are hashes of
tokens, come out otherwise.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from engine.core.ingress.generation import Generation
from engine.core.objectives import NO_OBJECTIVES, Late, Objectives
from engine.core.stimuli import Notes, as_it_is
from engine.core.types import (
    Admission,
    AdmitRequest,
    Assignment,
    Attempt,
    CacheHints,
    Ended,
    Membership,
    PromptEvent,
    Salt,
    SamplingParams,
    Stage,
    StreamEvent,
    TokenEvent,
    TokenLogprobs,
)

NO_LOGPROBS = TokenLogprobs(0.0, (), ())


class GenerationNote(NamedTuple):
    """A generation that begins, without its prompt."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    cache: CacheHints
    session: str | None
    priority: int = 0
    objectives: Objectives = NO_OBJECTIVES
    reasoning_turn: int | None = None
    prompt_logprobs: int | None = None

    def recall(self, machine: object) -> Generation:
        prompt = (0,) * self.num_prompt_tokens
        return Generation(
            self.request_id,
            prompt,
            sampling=SamplingParams(self.max_tokens, prompt_logprobs=self.prompt_logprobs),
            salt=Salt(),
            cache=self.cache,
            session=self.session,
            priority=self.priority,
            objectives=self.objectives,
            reasoning_turn=self.reasoning_turn,
        )


class AttemptNote(NamedTuple):
    """The attempt of a request to admit."""

    request_id: str
    attempt: int
    session: str | None

    def recall(self, machine: object) -> AdmitRequest:
        return AdmitRequest(self.request_id, self.attempt, hashes=(), num_tokens=0, session=self.session)


class AssignmentNote(NamedTuple):
    """The attempt of an assignment."""

    request_id: str
    attempt: int

    def recall(self, machine: object) -> Assignment:
        return Assignment(
            self.request_id,
            self.attempt,
            stage=Stage.WHOLE,
            token_ids=(),
            num_prompt_tokens=0,
            sampling=SamplingParams(0),
            reply_to="",
        )


class EventsNote(NamedTuple):
    """Events of a token stream, each in plain values, which are written in an eighth of the time: two values of an
    `Attempt`, four of a `PromptEvent`, seven of a `TokenEvent`, and one more of a refusal."""

    events: tuple[tuple[Any, ...], ...]

    def recall(self, machine: object) -> list[StreamEvent]:
        return [_recalled(*facts) for facts in self.events]


def _recalled(request_id: str, attempt: int, position: int = 0, *rest: Any) -> StreamEvent:
    if not rest:
        return Attempt(request_id, attempt)
    if len(rest) == 1:
        return PromptEvent(request_id, attempt, position, (NO_LOGPROBS,) * rest[0])
    token_id, finish, cached_tokens, num_preemptions, *refusal = rest
    return TokenEvent(
        request_id,
        attempt,
        position=position,
        token_id=token_id,
        finish=finish,
        logprobs=None,
        cached_tokens=cached_tokens,
        num_preemptions=num_preemptions,
        is_refusal=bool(refusal),
    )


def _note_of_generation(generation: Generation) -> GenerationNote:
    return GenerationNote(
        generation.request_id,
        num_prompt_tokens=len(generation.prompt),
        max_tokens=generation.sampling.max_tokens,
        cache=generation.cache,
        session=generation.session,
        priority=generation.priority,
        objectives=generation.objectives,
        prompt_logprobs=generation.sampling.prompt_logprobs,
    )


def _note_of_request(request: AdmitRequest) -> AttemptNote:
    return AttemptNote(request.request_id, request.attempt, request.session)


def _note_of_assignment(assignment: Assignment) -> AssignmentNote:
    return AssignmentNote(assignment.request_id, assignment.attempt)


def _note_of_admission(admission: Admission) -> Admission:
    return replace(admission, continuations=()) if admission.continuations else admission


def _note_of_ended(ended: Ended) -> Ended:
    """The end without the drafts, of which the notes of tokens have nothing, and without the answer."""
    return replace(ended, drafts=(), answer=None) if ended.drafts or ended.answer else ended


def _note_of_events(events: Iterable[StreamEvent]) -> EventsNote:
    return EventsNote(tuple([_facts_of(event) for event in events]))


def _facts_of(event: StreamEvent) -> tuple[object, ...]:
    """The event in plain values. The cause of an error may quote text."""
    if isinstance(event, Attempt):
        return tuple(event)
    if isinstance(event, PromptEvent):
        return event.request_id, event.attempt, event.position, len(event.logprobs)
    request_id, attempt, position, token_id, finish, _, cached_tokens, _, num_preemptions, is_refusal, *_ = event
    facts = request_id, attempt, position, None if token_id is None else 0, finish, cached_tokens, num_preemptions
    return (*facts, True) if is_refusal else facts


NOTES = Notes(
    {
        Admission: _note_of_admission,
        Late: as_it_is,
        AdmitRequest: _note_of_request,
        Assignment: _note_of_assignment,
        Ended: _note_of_ended,
        Generation: _note_of_generation,
        Membership: as_it_is,
    },
    dict.fromkeys((Attempt, PromptEvent, TokenEvent), _note_of_events),
)
