"""Gaps between the tokens of streams while a long prompt is prefilled beside them, with drafts and without.

A step computes at most one token budget, drafts included: so the longest gap is that of a step with a full budget of
prefill, as without drafts. The same prompt is also prefilled alone: its longest step is the measure.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.drafting.engines import Worker
from benchmarks.drafting.questions import Question
from raydix.engine.core.types import SamplingParams

QUIET_STEPS = 20
STREAM_TOKENS = 2000
TOKEN_IDS = range(100, 40_000)
ARRIVING = "arriving"


@dataclass(frozen=True, slots=True)
class Gaps:
    """One arrival of a prompt; times in milliseconds."""

    quiet_ms: float
    """Median gap before the arrival."""
    median_ms: float
    longest_ms: float
    budget_step_ms: float
    """Longest step of such a prompt alone."""
    draft_tokens: int
    """Computed in the steps of the arriving prompt."""
    most_tokens: int
    """Most tokens computed in one of these steps."""


def measure(worker: Worker, questions: Sequence[Question], num_streams: int, prompt_len: int, seed: int) -> Gaps:
    """Gaps of streams that answer the questions without end, while a random prompt arrives."""
    generator = random.Random(seed)
    budget_step_ms = _alone(worker, generator.choices(TOKEN_IDS, k=prompt_len))
    names = [f"stream {number}" for number in range(num_streams)]
    worker.answers = {}
    for number, name in enumerate(names):
        worker.submit(_endless(questions[number % len(questions)]).assignment(name, number.to_bytes(4)))
    while not all(worker.answers[name].times for name in names):
        worker.step()

    quiet = _gaps(worker, names, QUIET_STEPS)
    worker.submit(_prompt(generator.choices(TOKEN_IDS, k=prompt_len)).assignment(ARRIVING))
    gaps, num_drafted, most_tokens = list[float](), 0, 0
    while not worker.answers[ARRIVING].times:
        gaps += _gaps(worker, names, 1)
        assert worker.last is not None
        shape = worker.last.shape
        num_drafted += shape.num_draft_tokens
        most_tokens = max(most_tokens, shape.num_prefill_tokens + shape.num_decodes + shape.num_draft_tokens)

    worker.engine.abort(names, 0.0)
    return Gaps(
        quiet_ms=1e3 * statistics.median(quiet),
        median_ms=1e3 * statistics.median(gaps),
        longest_ms=1e3 * max(gaps),
        budget_step_ms=budget_step_ms,
        draft_tokens=num_drafted,
        most_tokens=most_tokens,
    )


def report(rounds: Mapping[str, Sequence[Gaps]], token_budget: int) -> dict[str, Any]:
    """The medians over the rounds by mode, and the longest gap over that without drafts and over a budget's step."""
    figures: dict[str, Any] = {mode: _medians(found) for mode, found in rounds.items()}
    off, auto = (figures[mode]["longest_ms"] for mode in ("off", "auto"))
    return {
        "token_budget": token_budget,
        **figures,
        "longest_auto_over_off": round(auto / off, 3),
        "longest_auto_over_budget_step": round(auto / figures["auto"]["budget_step_ms"], 3),
        "within_budget": all(each.most_tokens <= token_budget for found in rounds.values() for each in found),
    }


def _medians(rounds: Sequence[Gaps]) -> dict[str, float]:
    return {name: round(statistics.median(getattr(each, name) for each in rounds), 2) for name in Gaps.__slots__}


def _alone(worker: Worker, token_ids: Sequence[int]) -> float:
    """The longest step of a prompt alone, in milliseconds."""
    worker.answers = {}
    worker.submit(_prompt(token_ids).assignment(ARRIVING))
    longest_s = 0.0
    while not worker.answers[ARRIVING].times:
        worker.step()
        longest_s = max(longest_s, worker.step_s)
    return 1e3 * longest_s


def _gaps(worker: Worker, names: Sequence[str], num_steps: int) -> list[float]:
    """The gaps that end in the next steps, of all streams."""
    before = {name: len(worker.answers[name].times) for name in names}
    for _ in range(num_steps):
        worker.step()
    return [gap for name in names for gap in worker.answers[name].gaps[before[name] - 1 :]]


def _endless(question: Question) -> Question:
    """The question with an answer that goes on until it is aborted."""
    sampling = replace(question.sampling, max_tokens=STREAM_TOKENS, stop_token_ids=(), grammar=None)
    return replace(question, sampling=sampling)


def _prompt(token_ids: Sequence[int]) -> Question:
    return Question("", tuple(token_ids), SamplingParams(max_tokens=1, temperature=0.0))
