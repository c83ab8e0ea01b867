"""Objectives of requests: wanted latencies, and the treatment of late requests."""

from dataclasses import dataclass
from enum import StrEnum


class WhenLate(StrEnum):
    """Treatment of a request whose first token is predicted to come later than its objective on every worker."""

    WAIT = "wait"
    REFUSE = "refuse"
    GIVE_WAY = "give_way"
    """The request goes behind all that are in time (`LATE_PRIORITY`)."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latencies that requests are to have; None: no objective."""

    ttft_s: float | None = None
    """Seconds from the admission to the first token."""
    tpot_s: float | None = None
    """Mean time of each further token."""
    when_late: WhenLate | None = None

    @staticmethod
    def of_ms(ttft_ms: float | None, tpot_ms: float | None, when_late: str | None = None) -> "Objectives":
        """Objectives as clients and operators give them: in milliseconds, `when_late` by its value."""
        ttft_s, tpot_s = (None if ms is None else ms / 1000 for ms in (ttft_ms, tpot_ms))
        return Objectives(ttft_s, tpot_s, None if when_late is None else WhenLate(when_late))

    def over(self, others: "Objectives") -> "Objectives":
        """Merge with the others: their values where there is none here."""
        return Objectives(
            others.ttft_s if self.ttft_s is None else self.ttft_s,
            others.tpot_s if self.tpot_s is None else self.tpot_s,
            others.when_late if self.when_late is None else self.when_late,
        )


NO_OBJECTIVES = Objectives()

# `priority` of a late request that gives way to others; from here on requests, lines of batches too, keep nobody else
# waiting.
LATE_PRIORITY = 2**62


@dataclass(frozen=True, slots=True)
class Late:
    """The manager's answer to a request that is refused, because its objective cannot be met now."""

    predicted_s: float
    """Earliest first token that a worker is predicted to give."""
    objective_s: float
