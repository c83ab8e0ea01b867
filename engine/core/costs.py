"""Costs of a worker in seconds, fitted while it runs: the steps of its engine, and imports of KV.

    step   = step_s + prefill tokens * prefill_token_s + decodes * decode_token_s + draft tokens * draft_token_s
             + attended pairs * pair_s + swaps * swap_s + swapped bytes * swap_byte_s
    import = import_s + bytes * import_byte_s

The fit is least squares over recent observations. Without recent observations the costs of steps keep their values, and
the costs of imports go back to the first guess; in both a single slow observation counts for little. Otherwise slow
imports could make all later imports seem dearer than computing, so that none is tried any more and the fit never learns
better.

`spread` is the distance of the observed steps from the fit of their time, as a share of their length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

KEPT = 0.995  # share that is left after half a second of the observations of imports, and of steps while there are none
# Bound of the weight of a token behind many others, so that a prefill goes on whatever the fit says.
MAX_CONTEXT_WEIGHT = 16.0
# Bounds of the time of a multiplication in attention, in times of one in the model's matrices. The fit alone tells
# pairs and tokens apart too badly: while chunks shrink with the context, all take about the same time.
LEAST_EFFORT, MOST_EFFORT = 1.5, 3.0
# A step of prefills alone may take so many times as long as one beside decodes: nobody waits for a next token, but the
# first one of a request that comes meanwhile waits.
ALONE = 4.0


def alone(context_weight: float) -> float:
    """Return the weight of a context in a step without decodes."""
    return max(1.0, context_weight / ALONE)


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Seconds per unit. The defaults are a guess at a small CPU worker, good for its first few steps."""

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
    spread: float = 0.1
    """Relative standard deviation of the observed step times from the fit of their time."""
    draft_token_s: float = 1e-3
    """Per draft token behind a decode."""
    pair_share: float = 0.0
    """Multiplications for a pair as a share of those for a token in the model's matrices, as the model is made: no fit
    changes it. 0: not known, and then the fit alone gives contexts their weights."""

    def decode_step_s(self, num_decodes: int) -> float:
        """A step of decodes alone."""
        return self.step_s + num_decodes * self.decode_token_s

    def context_weight(self, num_before: float, token_budget: int) -> float:
        """Length of a step that fills the budget with tokens behind `num_before` others, in lengths of a step whose
        tokens are behind none; at most `MAX_CONTEXT_WEIGHT`."""
        step_s = self.step_s + token_budget * self.prefill_token_s
        longer = token_budget * num_before * self.pair_s / step_s if step_s else 0.0
        if self.pair_share:
            by_model = num_before * self.pair_share
            longer = min(max(longer, LEAST_EFFORT * by_model), MOST_EFFORT * by_model)
        return min(MAX_CONTEXT_WEIGHT, 1 + longer)

    def prefill_s(self, num_tokens: int, num_cached: int, token_budget: int, num_decodes: int) -> float:
        """Computing `num_tokens` positions after `num_cached`, in steps beside `num_decodes` decodes."""
        mean_before = num_cached + num_tokens / 2
        weight = self.context_weight(mean_before, token_budget)
        # Beside decodes the tokens of a chunk are fewer the longer their context is, so the steps are more.
        weight = weight if num_decodes else alone(weight)
        num_steps = ceil(num_tokens * weight / max(1, token_budget - num_decodes))
        num_pairs = num_tokens * mean_before
        return num_steps * self.decode_step_s(num_decodes) + num_tokens * self.prefill_token_s + num_pairs * self.pair_s

    def import_all_s(self, num_bytes: int) -> float:
        """Fetching `num_bytes` of KV."""
        return self.import_s + num_bytes * self.import_byte_s if num_bytes else 0.0

    def swap_once_s(self, num_bytes: int) -> float:
        """Copying `num_bytes` of one request's KV out of the pool, or back."""
        return self.swap_s + num_bytes * self.swap_byte_s


@dataclass(frozen=True, slots=True)
class StepShape:
    """Counts of the work in one engine step."""

    num_prefill_tokens: int
    num_decodes: int
    num_pairs: float
    """Pairs of a query position and a position that it attends to."""
    num_swaps: int = 0
    """Copies of one request's KV out of the pool, or back."""
    num_swapped_bytes: int = 0
    num_draft_tokens: int = 0


class CostFit:
    """Fits the costs of one worker."""

    def __init__(self, prior: WorkerCosts) -> None:
        """`prior`: the costs assumed until something is observed; what no fit changes is kept."""
        self._steps = LinearFit(
            (1.0, 256.0, 16.0, 256.0 * 1024.0, 1.0, float(1 << 22), 8.0),
            (
                prior.step_s,
                prior.prefill_token_s,
                prior.decode_token_s,
                prior.pair_s,
                prior.swap_s,
                prior.swap_byte_s,
                prior.draft_token_s,
            ),
        )

        self._imports = LinearFit((1.0, float(1 << 22)), (prior.import_s, prior.import_byte_s))
        self._spread = prior.spread
        self._pair_share = prior.pair_share

        self.num_steps = 0
        """Steps observed so far."""
        self._num_steps_before = 0  # `num_steps` at the last call of `fade`

    def step(self, shape: StepShape, seconds: float) -> None:
        self.num_steps += 1
        self._steps.add(
            (
                1.0,
                shape.num_prefill_tokens,
                shape.num_decodes,
                shape.num_pairs,
                shape.num_swaps,
                shape.num_swapped_bytes,
                shape.num_draft_tokens,
            ),
            seconds,
        )

    def imported(self, num_bytes: int, seconds: float) -> None:
        """Observe the fetching and unpacking of a segment, without the wait for a running step."""
        self._imports.add((1.0, num_bytes), seconds)

    def fade(self) -> None:
        """Weaken old observations; to be called twice a second.

        Imports: half of the weight is left after a minute or so. While imports seem dearer than computing none is
        observed, so in the end one must be tried again. Steps: weakened only while there are none, so that a worker
        that seemed slow, and was left alone, is soon tried again.
        """
        # While imports seem dear none is tried, so their observations must lose weight by themselves.
        self._imports.fade(KEPT)
        # While there are steps, new ones outweigh the old ones anyway.
        if self.num_steps == self._num_steps_before:
            self._steps.fade(KEPT)
        self._num_steps_before = self.num_steps

    def costs(self) -> WorkerCosts:
        """The costs as fitted now."""
        step_s, prefill_token_s, decode_token_s, pair_s, swap_s, swap_byte_s, draft_token_s = self._steps.solve()
        import_s, import_byte_s = self._imports.solve(forgets=True)
        return WorkerCosts(
            step_s=step_s,
            prefill_token_s=prefill_token_s,
            decode_token_s=decode_token_s,
            pair_s=pair_s,
            import_s=import_s,
            import_byte_s=import_byte_s,
            swap_s=swap_s,
            swap_byte_s=swap_byte_s,
            spread=self._steps.spread(self._spread),
            draft_token_s=draft_token_s,
            pair_share=self._pair_share,
        )


class LinearFit:
    """Non-negative least squares with a fading memory: y = sum of w[i] * x[i].

    `scales` are typical values of the x[i]: they make the x[i] comparable. `solve` leans a little on its last answer,
    so a coefficient without observations stays. An observation above `MAX_SURPRISE` times the larger of fit and prior
    is cut to that limit.
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
        self._squared_residuals = 0.0
        self._squared_expectations = 0.0

    def add(self, x: Sequence[float], y: float) -> None:
        """Add one observation."""
        row = [value / scale for value, scale in zip(x, self._scales, strict=True)]
        fitted = _sum_of_products(self._weights, row)
        expected = max(fitted, _sum_of_products(self._prior, row))
        # One observation while the machine stood still shall not cost a worker its requests for minutes.
        y = min(y, self.MAX_SURPRISE * expected) if expected else y
        self._squared_residuals = self.DECAY * self._squared_residuals + (y - fitted) ** 2
        self._squared_expectations = self.DECAY * self._squared_expectations + fitted**2
        for index, value in enumerate(row):
            products = self._products[index]
            for other, product in enumerate(row):
                products[other] = self.DECAY * products[other] + value * product
            self._targets[index] = self.DECAY * self._targets[index] + value * y

    def fade(self, kept: float) -> None:
        """Keep only this fraction of the weight of all observations."""
        self._products = [[kept * product for product in products] for products in self._products]
        self._targets = [kept * target for target in self._targets]

    def spread(self, prior: float) -> float:
        """Root mean square of the recent residuals as a share of the fitted values; `prior` without observations."""
        if not self._squared_expectations:
            return prior
        return sqrt(self._squared_residuals / self._squared_expectations)

    def solve(self, *, forgets: bool = False) -> tuple[float, ...]:
        """The coefficients. A coefficient that would be negative is zero, and the others are fitted without it.

        `forgets`: lean on the prior instead of the last answer, so that faded observations lose their effect.
        """
        # Without observations the system has no other solution than what it leans on.
        anchor = self._prior if forgets else self._weights
        free = list(range(len(self._scales)))
        while True:
            matrix = [[self._products[i][j] + self.LEAN * (i == j) for j in free] for i in free]
            solution = _eliminate(matrix, [self._targets[i] + self.LEAN * anchor[i] for i in free])
            # Active sets: a coefficient that would be negative leaves the fit, and comes back with the next call.
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
    """Solve a positive definite system by elimination; both arguments are overwritten."""
    count = len(targets)
    for pivot in range(count):
        for row in range(pivot + 1, count):
            # No pivot is 0: `LEAN` is added to the diagonal of a matrix that is positive semidefinite.
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, count):
                matrix[row][column] -= factor * matrix[pivot][column]
            targets[row] -= factor * targets[pivot]
    solution = [0.0] * count
    for row in reversed(range(count)):
        known = sum(matrix[row][column] * solution[column] for column in range(row + 1, count))
        solution[row] = (targets[row] - known) / matrix[row][row]
    return solution
