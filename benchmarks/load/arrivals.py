"""Times of sending requests: arrival processes and the limits that end every run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Arrivals = Literal["poisson", "constant"]


def arrival_times(rate: float, kind: Arrivals, seed: int) -> Iterator[float]:
    """Yield seconds from the start at which to send, without end: `rate` per second on average, the first at once."""
    if kind == "constant":
        yield from (index / rate for index in itertools.count())
    generator = random.Random(seed)
    now = 0.0
    while True:
        yield now
        now += generator.expovariate(rate)


def think_times(mean_s: float, seed: str) -> Iterator[float]:
    """Pauses of one user between turns, without end: even between half and one and a half times `mean_s`."""
    generator = random.Random(seed)
    while True:
        yield generator.uniform(0.5, 1.5) * mean_s


@dataclass(slots=True)
class Limits:
    """Numbers the requests, and refuses once `requests` were sent or `duration_s` has passed; at least one is set."""

    requests: int | None
    duration_s: float | None
    sent: int = 0

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise ValueError("a run without a limit would not end")

    def open(self, elapsed_s: float) -> bool:
        """True if another request may be sent at `elapsed_s` after the start."""
        in_number = self.requests is None or self.sent < self.requests
        return in_number and (self.duration_s is None or elapsed_s < self.duration_s)

    def take(self, elapsed_s: float) -> int | None:
        """The next request's number, or None when the run is over."""
        if not self.open(elapsed_s):
            return None
        self.sent += 1
        return self.sent - 1
