"""Order of requests in one worker by their priority, then by their tenant, then by their arrival.

A lower priority is more urgent. Requests of a higher one start, and get prefill tokens, after all more urgent ones; of
the running requests they are preempted first. Nothing grows more urgent with time: a request waits for as long as more
urgent ones keep coming. A running request goes on while more urgent ones wait.

Requests of several tenants are ordered among the same priority by the tenants' places (`VirtualTime`); the order
within a tenant is that of requests without others beside them.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby

from raydix.engine.core.costs import WorkerCosts, alone
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk


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


class VirtualTime:
    """The times of all tenants that have requests here, or were served more than those that have: the Virtual Token
    Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI '24), in seconds of the worker's fitted
    costs instead of tokens.

    * A tenant's *time* grows with what is computed for its requests, divided by its weight. Cached tokens cost nothing.
    * The tenant with the least time goes first. So tenants who always want more get computing in the ratio of their
      weights, and one that wants less than its share hardly waits for the others, however much they want.
    * A tenant that returns from idleness is lifted to the least time of the others that are active: nobody saves time
      up.

    Nothing is held back: what one tenant does not use, the others compute. With one tenant there is nothing to order,
    and nothing is counted.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: other ones than 1, by tenant."""
        self._weights = dict(weights or {})
        self._times: dict[str, float] = {}
        self._num_requests: Counter[str] = Counter()  # requests here of each active tenant
        self._last = 0.0  # time of the tenant that left last, from which on the next one begins when nobody is active

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Take other weights, for what is computed from now on."""
        self._weights = dict(weights)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    @property
    def are_several(self) -> bool:
        """True if requests of more than one tenant are here, so that there is something to order."""
        return len(self._num_requests) > 1

    @property
    def active(self) -> Iterable[str]:
        """Tenants with requests here."""
        return self._num_requests.keys()

    def order(self, tenant: str) -> tuple[float, int, str]:
        """Place of an active tenant: the least goes first. At the same time the one with fewer requests does, such as
        one that has just come."""
        return self._times[tenant], self._num_requests[tenant], tenant

    def places(self) -> dict[str, int] | None:
        """The place of each active tenant; None where there is nothing to order."""
        if not self.are_several:
            return None
        return {tenant: place for place, tenant in enumerate(sorted(self.active, key=self.order))}

    def shares(self) -> dict[str, float]:
        """Share of each active tenant in what they share, by weight."""
        total = sum(self.weight(tenant) for tenant in self.active)
        return {tenant: self.weight(tenant) / total for tenant in self.active}

    def turns(self, running: Iterable[Request], costs: WorkerCosts) -> "StartTurns | None":
        """The tenants' turns to start requests in one step; None where there is nothing to order."""
        if not self.are_several:
            return None
        turns = StartTurns(self, costs)
        for request in running:
            turns.started(request)
        return turns

    def joined(self, tenant: str) -> None:
        """A request has come."""
        if tenant not in self._num_requests:
            # Lifted to the least of the active ones, and never lowered: time is not saved up in idleness.
            least = min((self._times[other] for other in self._num_requests), default=self._last)
            self._times[tenant] = max(self._times.get(tenant, least), least)
        self._num_requests[tenant] += 1

    def left(self, tenant: str) -> None:
        """A request has gone. A tenant without any is remembered as long as it is ahead of the others."""
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            return
        del self._num_requests[tenant]
        self._last = self._times[tenant]
        least = min((self._times[other] for other in self._num_requests), default=self._last)
        # A time up to the least says nothing: the tenant would be lifted to it again.
        self._times = {each: time for each, time in self._times.items() if each in self._num_requests or time > least}

    def computed(self, chunks: Iterable[ScheduledChunk], costs: WorkerCosts) -> None:
        """Charge each tenant for a step: its tokens, with what they attend to, and an equal part of the step's own time
        for each chunk."""
        if len(self._times) < 2:
            return
        known = list(chunks)
        for chunk in known:
            # The time of the step itself is shared by its chunks alike.
            seconds = costs.step_s / len(known) + chunk_s(chunk, costs)
            tenant = chunk.request.tenant
            self._times[tenant] += seconds / self.weight(tenant)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that each request is counted once, and that every active tenant has a time."""
        assert self._num_requests == Counter(request.tenant for request in requests)
        assert self._num_requests.keys() <= self._times.keys()


class StartTurns:
    """Turns to start requests. What is still to be computed of started prompts counts as if it had been, so that a
    tenant does not start all its requests before the first of them is charged."""

    def __init__(self, times: VirtualTime, costs: WorkerCosts) -> None:
        self._times = times
        self._costs = costs
        self._ahead: dict[str, float] = {}

    def started(self, request: Request) -> None:
        """Count the rest of a running request's prompt."""
        # A request that decodes has nothing left of its prompt.
        if request.num_remaining > 1:
            ahead_s = request.num_remaining * self._costs.prefill_token_s / self._times.weight(request.tenant)
            self._ahead[request.tenant] = self._ahead.get(request.tenant, 0.0) + ahead_s

    def choose(self, tenants: Collection[str]) -> str:
        return min(tenants, key=self._place)

    def is_before(self, tenant: str, other: str) -> bool:
        """True if it is the first tenant's turn even once the other's running requests wait again."""
        return self._place(tenant) < self._times.order(other)

    def _place(self, tenant: str) -> tuple[float, int, str]:
        time, num_requests, name = self._times.order(tenant)
        return time + self._ahead.get(tenant, 0.0), num_requests, name


def chunk_s(chunk: ScheduledChunk, costs: WorkerCosts) -> float:
    """Time for a chunk by itself."""
    num_drafted, num_pairs = len(chunk.draft), chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2)
    # A token of an answer costs a decode; draft tokens beside it cost what drafts do.
    is_decode = chunk.start >= chunk.request.assignment.num_prompt_tokens
    tokens_s = costs.decode_token_s if is_decode else (chunk.num_tokens - num_drafted) * costs.prefill_token_s
    return tokens_s + num_drafted * costs.draft_token_s + num_pairs * costs.pair_s
