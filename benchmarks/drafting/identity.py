"""Identity of answers: every kind of drafts under every circumstance, compared with each request alone and without.

| circumstance | a request |
|---|---|
| `alone` | is the only one |
| `among 15` | is answered beside fifteen others |
| `handed over` | is prefilled by one engine and decoded by another, with the KV in segments |
| `preempted` | loses its blocks to others and is recomputed |
| `swapped` | has its blocks kept outside the pool meanwhile |
| `killed` | is cut off on one engine and goes on at another from the tokens that were delivered |
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchmarks.drafting.comparing import Answer, Step, Tally, take
from benchmarks.drafting.drafters import Kind, kinds
from benchmarks.drafting.engines import Workshop
from benchmarks.drafting.questions import Question
from raydix.engine.core.answers.continuations import packed
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.types import Assignment, Stage
from raydix.engine.model.engine import Engine, ExportedSegment, StepResult

GROUP = 16
"""Requests answered together."""
SWAP_BYTES = 1 << 30
CHEAP = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=1e-5, swap_s=0.0, swap_byte_s=0.0)
"""Costs by which every draft is worth its time, and swapping, too."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 12, "logit_bias": ((198, 1.5),)},
    {"temperature": 0.9, "min_p": 0.02, "min_tokens": 5},
)
Answers: TypeAlias = dict[str, list[Step]]
Report: TypeAlias = dict[str, dict[str, dict[str, Any]]]
"""Counts by kind of drafts and by circumstance."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Engines of one kind of drafts."""

    workshop: Workshop
    kind: Kind
    tally: Tally

    def engine(self, num_blocks: int | None = None, swap_bytes: int = 0) -> Engine:
        """A new engine, which knows no KV."""
        grammars = self.workshop.grammars()
        drafter = self.kind.drafter(grammars)
        engine = self.workshop.engine(grammars, drafter, num_blocks=num_blocks, swap_bytes=swap_bytes)
        engine.scheduler.learn_costs(CHEAP)
        return engine

    def count_drafts(self, *engines: Engine) -> None:
        """Count what engines have drafted, at their end, and that they have lost no block."""
        for engine in engines:
            engine.scheduler.check_integrity()
            for counts in engine.scheduler.drafting.counts.values():
                self.tally.num_drafted += counts.num_drafted
                self.tally.num_accepted += counts.num_accepted


Circumstance: TypeAlias = Callable[[Bench, Sequence[Assignment]], Answers]


def check(
    workshop: Workshop,
    questions: Mapping[str, Sequence[Question]],
    count: int,
    num_tokens: int,
    names: Sequence[str] = (),
) -> Report:
    """The tallies of `count` requests, by kind of drafts and circumstance. `names`: of kinds; default: all."""
    asked = requests(questions, count, num_tokens)
    plain = Kind("off", lambda grammars: None)
    expected = alone(Bench(workshop, plain, Tally()), asked)
    asked = [_predicted(each, expected[each.request_id]) for each in asked]

    report: Report = {}
    for kind in kinds(workshop.draft_limits, workshop.vocab_size, expected):
        for name, answer in CIRCUMSTANCES.items() if not names or kind.name in names else ():
            tally = Tally()
            tally.compare(expected, answer(Bench(workshop, kind, tally), asked))
            report.setdefault(kind.name, {})[name] = tally.report()
            print(
                f"{kind.name}, {name}: {tally.num_differing} of {tally.num_compared} differ",
                file=sys.stderr,
                flush=True,
            )
    return report


def requests(questions: Mapping[str, Sequence[Question]], count: int, num_tokens: int) -> list[Assignment]:
    """Requests of all workloads by turns, with other sampling parameters each time; those that are asked again have the
    parameters of the first time."""
    workloads = list(questions)
    asked = []
    for number in range(count):
        turn, place = divmod(number, len(workloads))
        name = workloads[place]
        known = questions[name]
        variant = VARIANTS[(turn + turn // len(known)) % len(VARIANTS)]
        question = known[turn % len(known)]
        sampling = replace(question.sampling, seed=turn, max_tokens=num_tokens, logprobs=3 * (turn % 2), **variant)
        asked.append(replace(question, sampling=sampling).assignment(f"{name} {turn}"))
    return asked


def _predicted(assignment: Assignment, answer: Answer) -> Assignment:
    """The request with an answer as the cluster would have kept it, and a prediction, if it has none: its answer with
    some tokens left out, changed and put in."""
    chance = random.Random(assignment.request_id)
    guess = [token_id for token_id, _, _ in answer if token_id is not None]
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(guess)) if guess else 0
        guess[place : place + chance.randint(0, 2)] = [
            chance.randrange(100, 40_000) for _ in range(chance.randint(0, 2))
        ]
    return replace(assignment, prediction=assignment.prediction or tuple(guess), continuations=(packed(guess),))


def groups(asked: Sequence[Assignment]) -> Iterator[Sequence[Assignment]]:
    """The requests that are answered together."""
    for first in range(0, len(asked), GROUP):
        yield asked[first : first + GROUP]


# Circumstances


def alone(bench: Bench, asked: Sequence[Assignment]) -> Answers:
    engine = bench.engine()
    answers: Answers = {}
    for each in asked:
        answers |= _run(engine, [each])
    bench.count_drafts(engine)
    return answers


def among_others(bench: Bench, asked: Sequence[Assignment]) -> Answers:
    engine = bench.engine()
    answers: Answers = {}
    for group in groups(asked):
        answers |= _run(engine, group)
        bench.tally.num_events += len(group) > 1
    bench.count_drafts(engine)
    return answers


def handed_over(bench: Bench, asked: Sequence[Assignment]) -> Answers:
    prefill, decode = bench.engine(), bench.engine()
    answers: Answers = {}
    for group in groups(asked):
        _begin(prefill, [replace(each, stage=Stage.PREFILL) for each in group])
        _begin(decode, [replace(each, stage=Stage.DECODE) for each in group])
        found: Answers = {each.request_id: [] for each in group}
        for step in _steps(prefill):
            take(found, step.events)
            for segment in map(ExportedSegment.arrived, step.segments):
                decode.import_segment(segment.header, segment.payload, 0.0)
                bench.tally.num_events += segment.header.handover is not None
            for beside in _steps(decode, 1):
                take(found, beside.events)
        for step in _steps(decode):
            take(found, step.events)
        answers |= found
    bench.count_drafts(prefill, decode)
    return answers


def preempted(bench: Bench, asked: Sequence[Assignment]) -> Answers:
    return _crowded(bench, asked, 0)


def swapped(bench: Bench, asked: Sequence[Assignment]) -> Answers:
    return _crowded(bench, asked, SWAP_BYTES)


def _crowded(bench: Bench, asked: Sequence[Assignment], swap_bytes: int) -> Answers:
    """In a pool that has little more room than the longest request needs."""
    block_size = bench.workshop.settings.block_size
    longest = max(-(-(len(each.token_ids) + each.sampling.max_tokens) // block_size) for each in asked)
    engine = bench.engine(longest + longest // 4 + 4, swap_bytes)
    answers: Answers = {}
    for group in groups(asked):
        answers |= _run(engine, group)
    bench.tally.num_events = engine.preemptions.num_swapped if swap_bytes else engine.preemptions.num_recomputed
    bench.count_drafts(engine)
    return answers


def killed(bench: Bench, asked: Sequence[Assignment]) -> Answers:
    first, second = bench.engine(), bench.engine()
    chance = random.Random(3)
    answers: Answers = {}
    for group in groups(asked):
        found: Answers = {each.request_id: [] for each in group}
        _begin(first, group)
        num_delivered = chance.uniform(0.1, 0.7) * sum(each.sampling.max_tokens for each in group)
        for step in _steps(first):
            take(found, step.events)
            if sum(map(len, found.values())) >= num_delivered:
                break
        first.abort([each.request_id for each in group], 0.0)

        left = [each for each in group if not _has_ended(found[each.request_id])]
        bench.tally.num_events += len(left)
        _begin(second, [_resubmitted(each, found[each.request_id]) for each in left])
        for step in _steps(second):
            take(found, step.events)
        answers |= found
    bench.count_drafts(first, second)
    return answers


CIRCUMSTANCES: dict[str, Circumstance] = {
    "alone": alone,
    "among 15": among_others,
    "handed over": handed_over,
    "preempted": preempted,
    "swapped": swapped,
    "killed": killed,
}


def _resubmitted(assignment: Assignment, delivered: Answer) -> Assignment:
    """The next attempt of a request, as an ingress sends it."""
    token_ids = [token_id for token_id, _, _ in delivered if token_id is not None]
    return replace(assignment, attempt=assignment.attempt + 1, token_ids=(*assignment.token_ids, *token_ids))


def _has_ended(answer: Answer) -> bool:
    return bool(answer) and answer[-1][2] is not None


def _run(engine: Engine, assignments: Sequence[Assignment]) -> Answers:
    """Answer all at once."""
    _begin(engine, assignments)
    answers: Answers = {each.request_id: [] for each in assignments}
    for step in _steps(engine):
        take(answers, step.events)
    return answers


def _begin(engine: Engine, assignments: Sequence[Assignment]) -> None:
    """Submit requests whose grammars are compiled when this returns. Raises RuntimeError for one that cannot be."""
    for each in assignments:
        engine.submit(each, 0.0)
    assert engine.grammars is not None
    engine.grammars.settle()
    if refusals := engine.hear_of_grammars(0.0):
        raise RuntimeError(f"refused: {refusals}")


def _steps(engine: Engine, most: int | None = None) -> Iterator[StepResult]:
    """Run steps until nothing is left to compute, or `most`. Raises RuntimeError where a request fails."""
    num_steps = 0
    while num_steps != most and (step := engine.step(0.0)) is not None:
        if step.failures:
            raise RuntimeError(f"failed: {step.failures}")
        engine.pool.drain_journal()
        num_steps += 1
        yield step
