"""The life of a request as spans, made at its end of the times that its ingress has anyway.

No span has text of a prompt or of an answer: they have names, numbers, and the tenant's configured name.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from raydix.engine.core.ingress.generation import AttemptFacts, Generation
from raydix.engine.serving.accounting import operation_of, outcome_of
from raydix.engine.serving.job import Answer, Job

Value: TypeAlias = str | bool | int | float | tuple[str, ...]
About: TypeAlias = Mapping[str, Value]
"""What is told of a span, in OpenTelemetry's names where it has one."""

# Choices of a request that have spans of their own; a thousand inputs for embeddings would fill a trace.
MOST_CHOICES = 16
PROVIDER = "raydix"


class Moment(NamedTuple):
    """Something that happened within a span."""

    name: str
    at: float
    about: About


class LifeSpan(NamedTuple):
    """A part of a request's life, in monotonic time."""

    name: str
    began_at: float
    ended_at: float
    about: dict[str, Value]
    moments: tuple[Moment, ...] = ()


def life_of(job: Job, ended_at: float) -> list[LifeSpan]:
    """The spans of a request that ends: its own, and behind it its parts."""
    parts = [part for answer in job.answers[:MOST_CHOICES] for part in _parts_of(job, answer, ended_at)]
    return [_whole(job, ended_at), *_reading(job), *parts]


def _finish_reasons(job: Job) -> tuple[str, ...] | None:
    answers = job.answers[:MOST_CHOICES]
    return tuple(str(answer.finish) for answer in answers if answer.finish is not None) or None


def _whole(job: Job, ended_at: float) -> LifeSpan:
    """The span of the request itself, with the attributes of OpenTelemetry's conventions for generative AI."""
    usage, spec, operation = job.usage(), job.spec, operation_of(job)
    generations = [answer.generation for answer in job.answers]
    sampling = generations[0].sampling
    firsts = [answer.first_token_at for answer in job.answers if answer.first_token_at is not None]
    num_attempts = 1 + max(each.attempt for each in generations)
    failure = next((each.failure for each in generations if each.failure is not None), None)
    moments = (moment for each in generations[:MOST_CHOICES] for moment in _changes_of(each))
    # What is as usual is left out: a collector's encoder takes as long for an attribute as all else here.
    about: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": spec.model or job.head.model,
        "gen_ai.request.max_tokens": sampling.max_tokens or None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": None if sampling.top_p == 1 else sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": spec.seed,
        "gen_ai.request.choice.count": None if spec.n == 1 else spec.n,
        "gen_ai.request.stream": spec.form.stream or None,
        "gen_ai.response.id": job.head.id,
        "gen_ai.response.model": job.head.model,
        "gen_ai.response.finish_reasons": _finish_reasons(job),
        "gen_ai.response.time_to_first_chunk": round(min(firsts) - job.arrived_at, 6) if firsts else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "error.type": None if failure is None else failure.code,
        "raydix.request.id": job.request_id,
        "raydix.tenant": job.tenant.name or None,
        "raydix.outcome": outcome_of(job),
        "raydix.attempts": num_attempts if num_attempts > 1 else None,
        "raydix.preemptions": sum(each.num_preemptions for each in generations) or None,
        "raydix.accepted_tokens": usage.accepted_tokens or None,
    }
    known = {name: value for name, value in about.items() if value is not None}
    return LifeSpan(
        f"{operation} {job.head.model}", began_at=job.arrived_at, ended_at=ended_at, about=known, moments=tuple(moments)
    )


def _reading(job: Job) -> Iterator[LifeSpan]:
    """The time until the first choice was to be admitted; none of a request that ended before."""
    begun = [at for answer in job.answers if (at := _first_attempt(answer.generation).begun_at)]
    if begun:
        yield LifeSpan("read", job.arrived_at, max(job.arrived_at, min(begun)), {"raydix.process": "ingress"})


def _first_attempt(generation: Generation) -> AttemptFacts:
    return generation.past[0] if generation.past else generation.attempt_facts()


def _changes_of(generation: Generation) -> Iterator[Moment]:
    """The ends of attempts that others took over."""
    for each in generation.past:
        assert each.ended_at is not None
        about: dict[str, Value] = {
            "raydix.attempt": each.number,
            "raydix.workers": _workers_of(each),
            "raydix.tokens": each.num_tokens,
        }
        yield Moment("move" if each.has_moved else "failover", each.ended_at, about)


def _workers_of(attempt: AttemptFacts) -> tuple[str, ...]:
    return tuple(sorted({each for each in (attempt.prefill, attempt.decode) if each is not None}))


def _parts_of(job: Job, answer: Answer, ended_at: float) -> Iterator[LifeSpan]:
    """The parts of each attempt of a choice, in the order of their beginnings."""
    generation = answer.generation
    for attempt in (*generation.past, generation.attempt_facts()):
        # A choice that waits for another one's permit has not begun.
        if not attempt.begun_at:
            continue
        end = ended_at if attempt.ended_at is None else attempt.ended_at
        common: dict[str, Value] = {"raydix.attempt": attempt.number} if attempt.number else {}
        if len(job.answers) > 1:
            common["raydix.choice"] = answer.index
        for part in _parts_of_attempt(attempt, end, generation):
            part.about.update(common)
            # Times of several processes: a part that would end before it begins is one of no length.
            yield part if part.ended_at >= part.began_at else part._replace(ended_at=part.began_at)


def _parts_of_attempt(attempt: AttemptFacts, end: float, generation: Generation) -> Iterator[LifeSpan]:
    prefill, decode = attempt.prefill, attempt.decode
    yield LifeSpan("admit", attempt.begun_at, end if attempt.placed_at is None else attempt.placed_at, _placed(attempt))
    if attempt.placed_at is None or prefill is None or decode is None:
        return

    # A worker's clock is another one's: its waiting is laid behind the placement, where it began but for the way.
    answered_at = end if attempt.answered_at is None else attempt.answered_at
    prefilled_from = attempt.placed_at
    # Once where one worker does both.
    for worker in dict.fromkeys((prefill, decode)):
        start = attempt.starts.get(worker)
        # Of a worker that sent nothing it is not known when it began.
        if start is None:
            continue
        started_at = attempt.placed_at + start.waited_s
        yield LifeSpan("queue", attempt.placed_at, started_at, {"raydix.process": worker})
        if worker == prefill:
            prefilled_from = started_at
    about: dict[str, Value] = {"raydix.process": prefill}
    if prefill in attempt.starts:
        about["raydix.chunks"] = attempt.starts[prefill].num_chunks
    yield LifeSpan("prefill", min(prefilled_from, answered_at), answered_at, about)
    if attempt.answered_at is None or attempt.last_at is None:
        return

    decoded_from = attempt.answered_at
    # The decode worker waits for KV until then, so its tokens begin behind.
    if prefill != decode and attempt.handover_s is not None:
        decoded_from += attempt.handover_s
        about = {"raydix.from": prefill, "raydix.process": decode}
        yield LifeSpan("hand over", attempt.answered_at, decoded_from, about)
    if generation.sampling.max_tokens > 0:
        about = {"raydix.process": decode, "raydix.tokens": attempt.num_tokens}
        yield LifeSpan("decode", decoded_from, attempt.last_at, about)


def _placed(attempt: AttemptFacts) -> dict[str, Value]:
    """The manager's decision: the workers, and where each of the prompt's full blocks was or why it was computed."""
    about: dict[str, Value] = {"raydix.process": "manager"}
    if attempt.prefill is not None and attempt.decode is not None:
        about |= {"raydix.worker.prefill": attempt.prefill, "raydix.worker.decode": attempt.decode}
    if attempt.expected is not None:
        about["raydix.expected_ttft_s"] = round(attempt.expected.ttft_s, 6)
        about |= {f"raydix.blocks.{source}": count for source, count in attempt.expected.blocks}
    return about
