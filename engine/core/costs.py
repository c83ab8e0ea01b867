"""How long things take on a worker, fitted while it runs: a step of its engine, and fetching KV from elsewhere.

    step   = step_s + prefill tokens * prefill_token_s + decodes * decode_token_s + attended pairs * pair_s
             + swaps * swap_s + swapped bytes * swap_byte_s
    import = import_s + bytes * import_byte_s

The fit is least squares over what was seen lately. What was not seen lately keeps the value that it had, of steps; of
imports it goes back to the first guess, and in both a hiccup of the machine counts for little. Otherwise slow imports
could make all later ones seem dearer than computing, so that none is tried any more and the fit never learns better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

IMPORTS_KEPT = 0.995
"""What is left of what was seen of imports, half a second later."""


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Seconds, each per one. The defaults are a guess at a small CPU worker, good for its first few steps."""

    step_s: float = 2e-3
    prefill_token_s: float = 1e-3
    decode_token_s: float = 1e-3
    pair_s: float = 0.0
    """Per query position and position that it attends to."""
    import_s: float = 2e-3
    import_byte_s: float = 1e-9
    swap_s: float = 1e-3
    """Per request whose KV is copied out of the pool or back, besides the bytes."""
    swap_byte_s: float = 1e-9

    def decode_step_s(self, num_decodes: int) -> float:
        """A step of decodes alone."""
        return self.step_s + num_decodes * self.decode_token_s

    def prefill_s(self, num_tokens: int, num_cached: int, token_budget: int, num_decodes: int) -> float:
        """Computing `num_tokens` positions after `num_cached`, in steps that go on with `num_decodes` decodes."""
        num_steps = ceil(num_tokens / max(1, token_budget - num_decodes))
        num_pairs = num_tokens * (num_cached + num_tokens / 2)
        return num_steps * self.decode_step_s(num_decodes) + num_tokens * self.prefill_token_s + num_pairs * self.pair_s

    def import_all_s(self, num_bytes: int) -> float:
        """Fetching `num_bytes` of KV."""
        return self.import_s + num_bytes * self.import_byte_s if num_bytes else 0.0

    def swap_once_s(self, num_bytes: int) -> float:
        """Copying one request's `num_bytes` of KV out of the pool, or back."""
        return self.swap_s + num_bytes * self.swap_byte_s


@dataclass(frozen=True, slots=True)
class StepShape:
    """What an engine step computed."""

    num_prefill_tokens: int
    num_decodes: int
    num_pairs: float
    """Pairs of a query position and a position that it attends to."""
    num_swaps: int = 0
    """Times that one request's KV was copied out of the pool, or back."""
    num_swapped_bytes: int = 0


class CostFit:
    """Follows one worker's costs."""

    def __init__(self, prior: WorkerCosts) -> None:
        self._steps = LinearFit(
            (1.0, 256.0, 16.0, 256.0 * 1024.0, 1.0, float(1 << 22)),
            (
                prior.step_s,
                prior.prefill_token_s,
                prior.decode_token_s,
                prior.pair_s,
                prior.swap_s,
                prior.swap_byte_s,
            ),
        )
        self._imports = LinearFit((1.0, float(1 << 22)), (prior.import_s, prior.import_byte_s))

    def step(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        self._steps.add(
            (
                1.0,
                shape.num_prefill_tokens,
                shape.num_decodes,
                shape.num_pairs,
                shape.num_swaps,
                shape.num_swapped_bytes,
            ),
            seconds,
        )

    def imported(self, num_bytes: int, seconds: float) -> None:
        """Fetching and unpacking a segment took so long, without the wait for a step that was under way."""
        self._imports.add((1.0, num_bytes), seconds)

    def fade_imports(self) -> None:
        """Twice a second: what was seen of imports counts for less with time, half after a minute or so. While they
        seem dearer than computing none is seen, so in the end one must be tried again."""
        self._imports.fade(IMPORTS_KEPT)

    def costs(self) -> WorkerCosts:
        """What is thought now."""
        step_s, prefill_token_s, decode_token_s, pair_s, swap_s, swap_byte_s = self._steps.solve()
        import_s, import_byte_s = self._imports.solve(forgets=True)
        return WorkerCosts(
            step_s, prefill_token_s, decode_token_s, pair_s, import_s, import_byte_s, swap_s, swap_byte_s
        )


class LinearFit:
    """Non-negative least squares with a fading memory: y = sum of w[i] * x[i].

    `scales` are typical values of the x[i], which make them comparable. `solve` leans a little on its last answer, so
    a coefficient of which nothing was seen stays as it was. An observation above `MAX_SURPRISE` times what the last
    answer and the prior expect counts as that much.
    """

    DECAY = 0.99
    LEAN = 0.5
    MAX_SURPRISE = 4.0

    def __init__(self, scales: Sequence[float], prior: Sequence[float]) -> None:
        self._scales = tuple(scales)
        self._prior = [weight * scale for weight, scale in zip(prior, scales, strict=True)]
        self._weights = self._prior
        count = len(self._scales)
        self._products = [[0.0] * count for _ in range(count)]
        self._targets = [0.0] * count

    def add(self, x: Sequence[float], y: float) -> None:
        """One observation."""
        row = [value / scale for value, scale in zip(x, self._scales, strict=True)]
        expected = max(_sum_of_products(weights, row) for weights in (self._weights, self._prior))
        y = min(y, self.MAX_SURPRISE * expected) if expected else y
        for index, value in enumerate(row):
            products = self._products[index]
            for other, product in enumerate(row):
                products[other] = self.DECAY * products[other] + value * product
            self._targets[index] = self.DECAY * self._targets[index] + value * y

    def fade(self, kept: float) -> None:
        """Let only this fraction of what was observed count."""
        self._products = [[kept * product for product in products] for products in self._products]
        self._targets = [kept * target for target in self._targets]

    def solve(self, *, forgets: bool = False) -> tuple[float, ...]:
        """The coefficients. One that would be negative is zero, and the others are fitted without it.

        `forgets`: lean on the prior and not on the last answer, so that what was observed counts only while it does.
        """
        anchor = self._prior if forgets else self._weights
        free = list(range(len(self._scales)))
        while True:
            matrix = [[self._products[i][j] + self.LEAN * (i == j) for j in free] for i in free]
            solution = _eliminate(matrix, [self._targets[i] + self.LEAN * anchor[i] for i in free])
            kept = [index for index, weight in zip(free, solution, strict=True) if weight >= 0]
            if len(kept) == len(free):
                break
            free = kept
        self._weights = [0.0] * len(self._scales)
        for index, weight in zip(free, solution, strict=True):
            self._weights[index] = weight
        return tuple(weight / scale for weight, scale in zip(self._weights, self._scales, strict=True))


def _sum_of_products(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _eliminate(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """Solve a positive definite system by elimination; both arguments are used up."""
    count = len(targets)
    for pivot in range(count):
        for row in range(pivot + 1, count):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, count):
                matrix[row][column] -= factor * matrix[pivot][column]
            targets[row] -= factor * targets[pivot]
    solution = [0.0] * count
    for row in reversed(range(count)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, count))
        solution[row] = (targets[row] - known) / matrix[row][row]
    return solution
