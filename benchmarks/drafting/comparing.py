"""Comparison of answers, bit by bit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from raydix.engine.core.types import FinishReason, TokenEvent, TokenLogprobs

Step: TypeAlias = tuple[int | None, TokenLogprobs | None, FinishReason | None]
"""A token with its log-probabilities and whether it is the last."""
Answer: TypeAlias = Sequence[Step]

MOST_DETAILS = 20


def take(answers: Mapping[str, list[Step]], events: Iterable[TokenEvent]) -> None:
    """Add a step's tokens to their answers. Raises RuntimeError for a token out of order."""
    for event in events:
        answer = answers[event.request_id]
        if event.position != len(answer):
            raise RuntimeError(f"{event.request_id}: position {event.position} came in place of {len(answer)}")
        answer.append((event.token_id, event.logprobs, event.finish))


def first_difference(expected: Answer, got: Answer) -> int | None:
    """The first position at which two answers differ; None if they are the same."""
    for position, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


@dataclass(slots=True)
class Tally:
    """Answers of one kind of drafts under one circumstance, compared with those without drafts."""

    num_compared: int = 0
    num_tokens: int = 0
    num_differing: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_events: int = 0
    """Times that the circumstance occurred: preemptions, hand-overs and so on."""
    details: list[dict[str, Any]] = field(default_factory=list)
    """The first differing answers."""

    def compare(self, expected: Mapping[str, Answer], got: Mapping[str, Answer]) -> None:
        """Count the answers in `got`, each of which is also in `expected`."""
        for name, answer in got.items():
            self.num_compared += 1
            self.num_tokens += len(expected[name])
            position = first_difference(expected[name], answer)
            if position is not None:
                self.num_differing += 1
                self._note(name, position, expected[name], answer)

    def _note(self, name: str, position: int, expected: Answer, got: Answer) -> None:
        if len(self.details) < MOST_DETAILS:
            found = [str(each[position]) if position < len(each) else "nothing" for each in (expected, got)]
            self.details.append({"request": name, "position": position, "expected": found[0], "got": found[1]})

    def report(self) -> dict[str, Any]:
        """All counts, ready for JSON."""
        return {
            "compared": self.num_compared,
            "tokens": self.num_tokens,
            "differing": self.num_differing,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "events": self.num_events,
            **({"first_differences": self.details} if self.details else {}),
        }


def differing(report: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> int:
    """Differing answers of all tallies, by kind and circumstance."""
    return sum(tally["differing"] for tallies in report.values() for tally in tallies.values())


def compared(report: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> int:
    """Compared answers of all tallies, by kind and circumstance."""
    return sum(tally["compared"] for tallies in report.values() for tally in tallies.values())
