"""Duties of the elastic workers, which follow the load, and their roles for one request.

`Elastic` measures how many seconds of prefill arrive per second, and says every second or so which workers should
mainly prefill and which decode (`raydix.engine.core.manager.planner`). A duty is a preference for new requests: nothing
under way moves.

Duties follow the load of seconds, since another duty costs nothing. The number of workers follows the load of half a
minute, and falls only where no load of the last minute needed more: a worker takes long to start. A
manager that has watched for less than the minute asks for more workers and never for fewer.

Placement takes a worker's duty for its role, with two exceptions (`with_roles`):

| duty | does both for a request if |
|---|---|
| decode | its steps stay within the objective with the request's prompt in chunks beside the decodes |
| prefill | no worker that decodes can take one more stream within the objective, and has room for it |

The objective of a worker is the strictest one of its streams and the request.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from typing import NamedTuple

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.placement import CostModel, Demand, WorkersAlike
from raydix.engine.core.manager.planner import (
    TARGET,
    TOGETHER,
    Division,
    PoolLoad,
    chunk_step_s,
    divide,
    queue_load,
    wanted,
)
from raydix.engine.core.manager.records import US_PER_S, WorkerRecord
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.types import Role

WINDOW_S = 3.0  # time in which a second of prefill that arrived counts for 1/e of it
HOLD_S = 2.0  # least time between two divisions of the same workers
# Window of the load that the number of workers follows; half of the time for which a lower number must have been
# enough, if that is less.
NUMBER_WINDOW_S = 30.0
SHRINK_S = 60.0  # time for which a lower number of workers must have been enough, by default
# A mean below it counts as none: it would take hours to fade, and an objective that no worker can meet asks for all
# workers as long as there is any stream.
LEAST_LEVEL = 0.01
TYPICAL_DECODES = 8


@dataclass(slots=True)
class Rate:
    """An amount per second, fading."""

    window_s: float = WINDOW_S
    _amount: float = 0.0
    _at: float | None = None

    def add(self, amount: float, now: float) -> None:
        self._amount = self._faded(now) + amount
        # Times may be out of order by a little. A clock that was put back must not stop the fading until it is as late
        # again.
        was_put_back = self._at is not None and now < self._at - self.window_s
        self._at = now if self._at is None or was_put_back else max(now, self._at)

    def at(self, now: float) -> float:
        """Amount per second."""
        return self._faded(now) / self.window_s

    def _faded(self, now: float) -> float:
        return 0.0 if self._at is None else self._amount * exp(-max(0.0, now - self._at) / self.window_s)


@dataclass(slots=True)
class Level:
    """The mean of a count over the last `window_s` or so, looked at now and then."""

    window_s: float = NUMBER_WINDOW_S
    _mean: float = 0.0
    _at: float | None = None

    def look(self, count: float, now: float) -> float:
        """Take the present count; returns the mean."""
        kept = 0.0 if self._at is None else exp(-max(0.0, now - self._at) / self.window_s)
        self._mean = kept * self._mean + (1 - kept) * count
        self._at = now
        return self._mean if self._mean >= LEAST_LEVEL else 0.0


@dataclass(slots=True)
class Highest:
    """The highest number of the last `window_s`."""

    window_s: float = SHRINK_S
    _numbers: deque[tuple[float, int]] = field(default_factory=deque)

    def look(self, number: int, now: float) -> int:
        """Take the present number; returns the highest one."""
        # Smaller numbers before a larger one never become the highest. Times ahead are of a clock that was put back.
        while self._numbers and (self._numbers[-1][1] <= number or self._numbers[-1][0] > now):
            self._numbers.pop()
        self._numbers.append((now, number))
        while self._numbers[0][0] < now - self.window_s:
            self._numbers.popleft()
        return self._numbers[0][1]


class PoolLimits(NamedTuple):
    """Limits of the number of elastic workers."""

    most: int = 1
    shrink_after_s: float = SHRINK_S
    least: int = 1


ONE_WORKER = PoolLimits()


class Wanted(NamedTuple):
    """A number of elastic workers for Serve's autoscaling."""

    number: int
    may_shrink: bool
    """False: the load was not watched for long enough, and the number must not fall."""


class Plan(NamedTuple):
    """Outcome of a look at the load."""

    duties: Mapping[str, Role]
    """New duties of the workers with another one than before."""
    division: Division
    load: PoolLoad
    num_wanted: int
    """Workers that this load needs."""
    may_shrink: bool
    """True if the load has been watched for long enough to know a lower number than the present one to be enough."""


class Elastic:
    """Measures the load of the elastic workers, and divides them."""

    def __init__(self) -> None:
        self._prefill = Rate()
        self._long_prefill = Rate(NUMBER_WINDOW_S)
        self._streams = Level()
        self._wanted = Highest()
        self._watched_since: float | None = None  # time of the first look; None before
        self._division = TOGETHER
        self._divided_at: float | None = None

    def admitted(self, compute_s: float, now: float) -> None:
        """A request was placed on an elastic worker, which will prefill for `compute_s`."""
        self._prefill.add(compute_s, now)
        self._long_prefill.add(compute_s, now)

    def shrink_after(self, shrink_after_s: float) -> None:
        """Want fewer workers only where so few were enough for this time. Another time than before begins now."""
        if shrink_after_s == self._wanted.window_s:
            return
        # Half of the wait at most, so that at its end the load from before the wait is mostly forgotten.
        window_s = min(NUMBER_WINDOW_S, shrink_after_s / 2)
        self._wanted, self._watched_since = Highest(shrink_after_s), None
        self._long_prefill, self._streams = Rate(window_s), Level(window_s)

    def plan(
        self, workers: Sequence[WorkerRecord], objectives: Objectives, most: int, now: float, least: int = 1
    ) -> Plan | None:
        """Divide the elastic `workers` that stay; None without any. `most`, `least`: limits of their number."""
        if not workers:
            self._watched_since = None
            return None
        if self._watched_since is None:
            self._watched_since = now
        load = self._load(workers, now)
        division = divide(len(workers), load, objectives, self._division)
        # Workers do not change their duties back and forth within `HOLD_S`, unless a worker has come or gone.
        is_held = self._divided_at is not None and now - self._divided_at < HOLD_S
        if is_held and sum(self._division) in (0, len(workers)):
            division = self._division
        if division != self._division:
            self._division, self._divided_at = division, now
        duties = _duties(workers, division)
        changed = {each.worker_id: duty for each in workers if (duty := duties[each.worker_id]) is not each.duty}
        may_shrink = now - self._watched_since >= self._wanted.window_s
        num_wanted = self._num_wanted(load, objectives, min(most, len(workers)), most, now, least)
        return Plan(duties=changed, division=division, load=load, num_wanted=num_wanted, may_shrink=may_shrink)

    def _num_wanted(
        self, load: PoolLoad, objectives: Objectives, present: int, most: int, now: float, least: int
    ) -> int:
        """The number that the load wants, and not fewer than the present one while the queue is long: clients that wait
        for their answers send nothing."""
        streams = self._streams.look(load.num_decoding, now)
        rate = self._long_prefill.at(now)
        slow = load._replace(prefill_rate=rate if rate >= LEAST_LEVEL else 0.0, num_decoding=streams)
        number = wanted(slow, objectives, most, least)
        if queue_load(load, objectives) > TARGET * present:
            number = max(number, present)
        return self._wanted.look(number, now)

    def _load(self, workers: Sequence[WorkerRecord], now: float) -> PoolLoad:
        return PoolLoad(
            prefill_rate=self._prefill.at(now),
            queued_s=sum(worker.queued_us - worker.behind_us for worker in workers) / US_PER_S,
            num_decoding=sum(len(worker.decoding) for worker in workers),
            costs=_typical([worker.costs for worker in workers]),
            token_budget=min(worker.token_budget for worker in workers),
        )


def _duties(workers: Sequence[WorkerRecord], division: Division) -> dict[str, Role]:
    """The duty of each worker. Workers keep theirs as far as the numbers allow; a worker with few streams prefills."""
    if not division.is_split:
        return {worker.worker_id: Role.MIXED for worker in workers}
    # Prefilling workers first, then those with the fewest streams to finish.
    ranked = sorted(workers, key=lambda each: (each.duty is not Role.PREFILL, len(each.decoding), each.worker_id))
    prefilling = {worker.worker_id for worker in ranked[: division.num_prefill]}
    return {name: Role.PREFILL if name in prefilling else Role.DECODE for name in (w.worker_id for w in workers)}


def _typical(costs: Sequence[WorkerCosts]) -> WorkerCosts:
    """The worker's costs in the middle, by its step of a few decodes."""
    return sorted(costs, key=lambda each: each.decode_step_s(TYPICAL_DECODES))[len(costs) // 2]


def with_roles(candidates: Sequence[WorkersAlike], demand: Demand, model: CostModel) -> Sequence[WorkersAlike]:
    """The candidates with the roles of the elastic ones for this request."""
    if not any(candidate.load.is_elastic for candidate in candidates):
        return candidates
    decoders = [candidate for candidate in candidates if candidate.load.role is not Role.PREFILL]
    # Whether some worker takes the stream is the same for all candidates.
    can_decode = any(_takes_stream(candidate, demand, model) for candidate in decoders)
    return [_with_role(candidate, demand, model, can_decode=can_decode) for candidate in candidates]


def _with_role(candidate: WorkersAlike, demand: Demand, model: CostModel, *, can_decode: bool) -> WorkersAlike:
    load = candidate.load
    if not load.is_elastic:
        return candidate
    does_both = _takes_prompt(candidate, demand, model) if load.role is Role.DECODE else not can_decode
    return candidate._replace(load=load._replace(role=Role.MIXED)) if does_both else candidate


def _takes_prompt(candidate: WorkersAlike, demand: Demand, model: CostModel) -> bool:
    """True if the decodes of a worker, and the request's own, stay within the objective beside its prompt."""
    load = candidate.load
    num_cached = max(candidate.num_local_blocks, demand.num_reachable_blocks) * model.block_size
    num_uncached = max(1, demand.num_tokens - num_cached)
    step_s = chunk_step_s(load.costs, load.num_decoding, num_uncached, load.token_budget)
    return step_s <= _tpot_s(candidate, demand)


def _takes_stream(candidate: WorkersAlike, demand: Demand, model: CostModel) -> bool:
    """True if a worker may decode one stream more."""
    load = candidate.load
    num_blocks = demand.num_tokens // model.block_size + 1 - candidate.num_local_blocks
    has_room = load.num_free_blocks is None or load.num_free_blocks >= num_blocks
    return has_room and load.costs.decode_step_s(load.num_decoding + 1) <= _tpot_s(candidate, demand)


def _tpot_s(candidate: WorkersAlike, demand: Demand) -> float:
    objectives = (candidate.load.tpot_s, demand.objectives.tpot_s)
    return min((each for each in objectives if each is not None), default=inf)
