"""The waiting lines of a batch in order, with lines to be tried again later."""

import heapq
from collections import deque
from collections.abc import Collection, Sequence

MAX_ATTEMPTS = 20
"""Attempts of one line; with all pauses some eight minutes."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pause before a line is tried again; each further one is twice as long."""


class LineQueue:
    """Lines by number. Each is waiting, running, or answered."""

    def __init__(self, order: Sequence[int], answered: Collection[int] = ()) -> None:
        self._waiting = deque(number for number in order if number not in answered)
        self._later: list[tuple[float, int]] = []
        """A heap of lines to be tried again, with times."""
        self._attempts: dict[int, int] = {}
        self._running: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """True if every line is answered."""
        return not (self._waiting or self._later or self._running)

    def take(self, count: int, now: float) -> list[int]:
        """The next lines to run, at most `count`: lines to be tried again first."""
        taken: list[int] = []
        while len(taken) < count and self._later and self._later[0][0] <= now:
            taken.append(heapq.heappop(self._later)[1])
        while len(taken) < count and self._waiting:
            taken.append(self._waiting.popleft())
        self._running.update(taken)
        return taken

    def answered(self, number: int) -> None:
        """A running line has an answer."""
        self._running.remove(number)
        self._attempts.pop(number, None)

    def try_again(self, number: int, now: float) -> bool:
        """Have a running line wait; False after `MAX_ATTEMPTS`."""
        attempts = self._attempts.get(number, 0) + 1
        if attempts == MAX_ATTEMPTS:
            return False
        self._attempts[number] = attempts
        self._running.remove(number)
        heapq.heappush(self._later, (now + min(FIRST_PAUSE_S * 2 ** (attempts - 1), MAX_PAUSE_S), number))
        return True

    def check_integrity(self) -> None:
        """Assert: each line is in one place."""
        numbers = [*self._waiting, *(number for _, number in self._later), *self._running]
        assert len(numbers) == len(set(numbers))
        assert all(attempts < MAX_ATTEMPTS for attempts in self._attempts.values())
