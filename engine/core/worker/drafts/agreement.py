"""Chances of a draft model's guesses, learnt from their comparison with the answers.

A request begins with the rate of the worker's requests so far, and soon has its own. One request in `EXPLORING` begins
with the first rate of all: a model of no use gets another chance.
"""

from collections.abc import Sequence

FIRST_RATE = 0.7
"""The rate before anything was learnt."""
WORKER_WEIGHT = 200.0
"""Most guesses that count for a worker's rate: of older ones less and less is left."""
REQUEST_WEIGHT = 40.0
BEGIN_WEIGHT = 4.0
EXPLORING = 64


class Rate:
    """A share of right guesses with a fading memory."""

    def __init__(self, value: float, max_weight: float) -> None:
        self.value = value
        self._weight = BEGIN_WEIGHT
        self._max_weight = max_weight

    def observe(self, *, is_right: bool) -> None:
        self._weight = min(self._max_weight, self._weight + 1)
        self.value += (is_right - self.value) / self._weight


class Agreement:
    """The latest guesses for one request, and the rate of right ones."""

    def __init__(self, worker: Rate, first: float) -> None:
        """`worker`: the rate of all requests, which learns, too."""
        self._rates = worker, Rate(first, REQUEST_WEIGHT)
        self._position = 0
        """Of the first guess."""
        self._guess: Sequence[int] = ()

    @property
    def rate(self) -> float:
        """The chance of the next guess."""
        return self._rates[1].value

    def chances(self, count: int) -> list[float]:
        """For each of the next `count` guesses the chance of this one and all before."""
        return [self.rate ** (index + 1) for index in range(count)]

    def guessed(self, position: int, token_ids: Sequence[int]) -> None:
        """Note a guess of the tokens from `position` on."""
        self._position, self._guess = position, token_ids

    def follow(self, token_ids: Sequence[int]) -> None:
        """Compare the latest guess with the request's tokens, up to the first wrong one."""
        for guess, token_id in zip(self._guess, token_ids[self._position :], strict=False):
            for rate in self._rates:
                rate.observe(is_right=guess == token_id)
            if guess != token_id:
                break
        self._guess = ()


class Agreements:
    """The agreement of each request of a worker."""

    def __init__(self) -> None:
        self._worker = Rate(FIRST_RATE, WORKER_WEIGHT)
        self._by_id: dict[str, Agreement] = {}
        self._num_begun = 0

    def of(self, request_id: str) -> Agreement:
        """The agreement of a request; a new one for a new request."""
        known = self._by_id.get(request_id)
        if known is None:
            self._num_begun += 1
            first = FIRST_RATE if self._num_begun % EXPLORING == 0 else self._worker.value
            known = self._by_id[request_id] = Agreement(self._worker, first)
        return known

    def keep(self, request_ids: set[str]) -> None:
        """Forget all other requests."""
        for request_id in self._by_id.keys() - request_ids:
            del self._by_id[request_id]
