"""Divides elastic workers between prompts and answers, from the load, the fitted costs and the objectives.

    prefill load = seconds of prefill arriving per second + queued seconds / TTFT objective
    decode load  = streams / streams of a worker whose mean token time stays within the TPOT objective
    pressure     = the higher one of both loads per worker; above 1 the objectives are missed

| division | pressure |
|---|---|
| P workers prefill, D decode | prefill load / P; decode load / D |
| all do both | prefill load, longer by the decodes beside it; decode load with chunks for that share of the time |

The division of the lowest pressure is taken. Where even that has too many prompts, all workers do both if tokens stay
in time: so all of them prefill. Another one than the present takes its place only with a pressure lower by `MARGIN`,
and only where the present one is above `IDLE`. Without a TPOT objective all workers do both: a role separates
answers from prompts for the sake of the token time. An objective that a worker misses with a single stream and no
prompt would make all pressures infinite, and tell no division from another: this token time takes its place.
"""

from bisect import bisect_left
from collections.abc import Iterable
from math import ceil, inf
from typing import NamedTuple

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.objectives import Objectives

MARGIN = 0.15  # share by which the pressure of another division must be lower
IDLE = 0.25  # pressure up to which a division stays as it is
TARGET = 0.75  # pressure at which the number of workers is right: arrivals are uneven
BACKLOG_S = 5.0  # seconds in which queued prefills are to be worked off where there is no TTFT objective
MAX_STREAMS = 4096


class PoolLoad(NamedTuple):
    """Load of the elastic workers together."""

    prefill_rate: float
    """Predicted seconds of prefill, per second."""
    queued_s: float
    """Predicted time of the queued prefills."""
    num_decoding: float
    costs: WorkerCosts
    """Costs of a typical worker."""
    token_budget: int


class Division(NamedTuple):
    """Numbers of workers by role; (0, 0): all workers do both."""

    num_prefill: int
    num_decode: int

    @property
    def is_split(self) -> bool:
        return self.num_prefill > 0


TOGETHER = Division(0, 0)  # all workers do both


class _Pressures(NamedTuple):
    prompts: float
    decodes: float


def divide(num_workers: int, load: PoolLoad, objectives: Objectives, now: Division = TOGETHER) -> Division:
    """The division of `num_workers` that suits the load. `now`: the present one."""
    if objectives.tpot_s is None or num_workers < 2:
        return TOGETHER
    # At least the token time of a single stream: otherwise no worker may have a stream, and every pressure is infinite.
    tpot_s = max(objectives.tpot_s, _mean_step_s(load, 1, busy=0.0))
    prompts = prefill_load(load, objectives)

    def pressure(division: Division) -> float:
        return _pressure(num_workers, division, load, prompts, tpot_s)

    best = min(_divisions(num_workers), key=pressure)
    # Every division misses an objective. Where tokens stay in time all workers do both, so that all of them prefill.
    if pressure(best) > 1 and _together(num_workers, load, prompts, tpot_s).decodes <= 1:
        return TOGETHER
    # A division for another number of workers than there are now cannot stay.
    is_possible = not now.is_split or sum(now) == num_workers
    if is_possible and (pressure(now) <= IDLE or pressure(best) > (1 - MARGIN) * pressure(now)):
        return now
    return best


def wanted(load: PoolLoad, objectives: Objectives, most: int, least: int = 1) -> int:
    """The least number of workers, at most `most`, that some division keeps at a pressure of `TARGET`. More workers
    never mean more pressure, so the number is searched for by halves. 0 only where `least` is 0 and there is no load.

    The queue is not counted: what queues has arrived, and is in the load; more workers than that would come when it is
    worked off."""
    prompts = load.prefill_rate
    tpot_s = objectives.tpot_s
    if least == 0 and not prompts and not load.num_decoding:
        return 0
    if tpot_s is None:
        return max(1, min(most, ceil(prompts / TARGET)))

    def is_enough(num_workers: int) -> bool:
        return _pressure(num_workers, TOGETHER, load, prompts, tpot_s) <= TARGET

    # The first number in [1, most] that is enough; `most` if none below it is.
    together = 1 + bisect_left(range(1, most), True, key=is_enough)
    return min(together, _least_split(load, prompts, tpot_s, most))


def prefill_load(load: PoolLoad, objectives: Objectives) -> float:
    """Workers that the prompts keep busy."""
    return load.prefill_rate + queue_load(load, objectives)


def queue_load(load: PoolLoad, objectives: Objectives) -> float:
    """Workers that the queue keeps busy if it is worked off within the objective."""
    return load.queued_s / (objectives.ttft_s or BACKLOG_S)


def max_streams(load: PoolLoad, tpot_s: float, busy: float = 0.0) -> int:
    """Streams of a worker whose mean token time stays within `tpot_s` while prefill chunks run beside the decodes for
    the share `busy` of the time; 0 if there are none."""
    # Streams in [least, most]: a step takes longer with each, so the number is searched for by halves.
    least, most = 0, MAX_STREAMS
    while least < most:
        middle = (least + most + 1) // 2
        if _mean_step_s(load, middle, busy) <= tpot_s:
            least = middle
        else:
            most = middle - 1
    return least


def chunk_step_s(costs: WorkerCosts, num_decodes: int, num_tokens: int, token_budget: int) -> float:
    """A step of decodes and as much of a prompt's `num_tokens` as the budget has room for."""
    num_prefill = min(num_tokens, max(0, token_budget - num_decodes))
    # Where all chunks are alike, the fit may find their time in their pairs as well as in their tokens.
    num_pairs = num_prefill * num_prefill / 2
    return costs.decode_step_s(num_decodes) + num_prefill * costs.prefill_token_s + num_pairs * costs.pair_s


def _divisions(num_workers: int) -> Iterable[Division]:
    return [TOGETHER, *(Division(count, num_workers - count) for count in range(1, num_workers))]


def _least_split(load: PoolLoad, prompts: float, tpot_s: float, most: int) -> int:
    """The least number, at most `most`, of which some prefill and the others decode at a pressure of `TARGET`."""
    decodes = _share(load.num_decoding, max_streams(load, tpot_s))
    if decodes == inf:
        return most
    return min(most, max(1, ceil(prompts / TARGET)) + max(1, ceil(decodes / TARGET)))


def _pressure(num_workers: int, division: Division, load: PoolLoad, prompts: float, tpot_s: float) -> float:
    if division.is_split:
        decodes = _share(load.num_decoding / division.num_decode, max_streams(load, tpot_s))
        return max(prompts / division.num_prefill, decodes)
    return max(_together(num_workers, load, prompts, tpot_s))


def _together(num_workers: int, load: PoolLoad, prompts: float, tpot_s: float) -> _Pressures:
    """The pressures where all workers do both."""
    num_streams = load.num_decoding / num_workers
    busy = prompts / num_workers * _slower(load, num_streams)
    return _Pressures(busy, _share(num_streams, max_streams(load, tpot_s, min(1.0, busy))))


def _share(num_streams: float, most: int) -> float:
    return num_streams / most if most else inf if num_streams else 0.0


def _slower(load: PoolLoad, num_streams: float) -> float:
    """Time of a prefill beside so many decodes, in times of the same one alone."""
    budget, num_decodes = load.token_budget, ceil(num_streams)
    # Seconds for each prompt token: decodes take time of the step, and room in its budget.
    alone_s = chunk_step_s(load.costs, 0, budget, budget) / budget
    beside_s = chunk_step_s(load.costs, num_decodes, budget, budget) / max(1, budget - num_decodes)
    return beside_s / alone_s if alone_s else 1.0


def _mean_step_s(load: PoolLoad, num_streams: int, busy: float) -> float:
    """Mean time of a token where chunks run beside the decodes for the share `busy` of the time."""
    chunk_s = chunk_step_s(load.costs, num_streams, load.token_budget, load.token_budget)
    # Tokens per second are averaged over time, since steps without a chunk yield more of them. Costs may be 0.
    per_s = (1 - busy) / max(1e-9, load.costs.decode_step_s(num_streams)) + busy / max(1e-9, chunk_s)
    return 1 / per_s
