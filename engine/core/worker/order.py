"""Order of requests in one worker by their priority, then by their tenant, then by their arrival.

A lower priority is more urgent. Requests of a higher one start, and get prefill tokens, after all more urgent ones; of
the running requests they are preempted first. Nothing grows more urgent with time: a request waits for as long as more
urgent ones keep coming. A running request goes on while more urgent ones wait.

Requests of several tenants are ordered among the same priority by the tenants' places (`virtual_time`); the order
within a tenant is that of requests without others beside them.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby

from raydix.engine.core.costs import WorkerCosts, alone
from raydix.engine.core.worker.request import Request


def rank(request: Request, places: Mapping[str, int] | None = None) -> tuple[int, int, int]:
    """Place among running requests: the highest is preempted first, of several tenants that of the last place."""
    return request.assignment.priority, places[request.tenant] if places else 0, request.arrival


def start_order(
    preempted: deque[Request], waiting: deque[Request], choose: Callable[[Collection[str]], str] | None = None
) -> Iterator[tuple[deque[Request], Request]]:
    """Requests to start, each with its queue: of each priority the preempted requests, those with swapped KV first, and
    then the waiting ones.

    Among several tenants `choose` says before each request whose turn it is: it may have changed with the last one.
    """
    # Swapped ones first: their KV waits outside, and takes room there.
    paused = sorted(preempted, key=lambda request: request.swapped is None)
    kinds = [(0, request) for request in paused] + [(1, request) for request in waiting]
    kinds.sort(key=_priority_and_kind)
    queues = preempted, waiting
    if choose is None:
        for kind, request in kinds:
            yield queues[kind], request
        return

    for _, level in groupby(kinds, key=lambda entry: entry[1].assignment.priority):
        lines: dict[str, deque[tuple[int, Request]]] = {}
        for entry in level:
            lines.setdefault(entry[1].tenant, deque()).append(entry)
        while lines:
            tenant = choose(lines)
            kind, request = lines[tenant].popleft()
            if not lines[tenant]:
                del lines[tenant]
            yield queues[kind], request


def _priority_and_kind(entry: tuple[int, Request]) -> tuple[int, int]:
    kind, request = entry
    return request.assignment.priority, kind


def weigh_contexts(costs: WorkerCosts, token_budget: int, *, is_alone: bool = False) -> Callable[[Request], float]:
    """Weight in the budget of each next token of a request, as its computation takes by the costs.
    `is_alone`: no decode is in the step."""

    def weigh(request: Request) -> float:
        weight = costs.context_weight(request.num_computed, token_budget)
        return alone(weight) if is_alone else weight

    return weigh


def share_budget(
    requests: list[Request],
    budget: int,
    weigh: Callable[[Request], float] | None = None,
    places: Mapping[str, int] | None = None,
) -> list[tuple[Request, int]]:
    """Divide the tokens of one step among prefills: half for the oldest, the rest for the shortest first; more urgent
    requests go before in both, and then those of the tenants with the first `places`.

    Each token of a request takes as much of the budget as `weigh` says, at least 1, and 1 without it. The oldest gets a
    token in any case.
    """
    if not requests or budget <= 0:
        return []

    weights = {request.arrival: 1.0 if weigh is None else weigh(request) for request in requests}
    oldest = min(requests, key=lambda each: rank(each, places))
    # Half of the budget, rounded up, and a token at least: the oldest always moves.
    first = max(1, int((budget - budget // 2) / weights[oldest.arrival]))
    shares = {oldest.arrival: min(oldest.num_remaining, first)}
    left = budget - shares[oldest.arrival] * weights[oldest.arrival]

    def shortest_first(each: Request) -> tuple[int, int, int, int]:
        priority, place, arrival = rank(each, places)
        return priority, place, each.num_remaining, arrival

    # The shortest first, so that most of them are done soonest; the oldest may get more here, too.
    for request in sorted(requests, key=shortest_first):
        if left < 1:
            break
        already = shares.get(request.arrival, 0)
        more = min(request.num_remaining - already, int(left / weights[request.arrival]))
        shares[request.arrival] = already + more
        left -= more * weights[request.arrival]

    return [(request, shares[request.arrival]) for request in requests if shares.get(request.arrival)]
