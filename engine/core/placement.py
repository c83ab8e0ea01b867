"""Which workers run a request: the ones with the lowest predicted time to first token.

    time to first token = the queue, or the wait for blocks that others are computing, whichever is longer
                        + import of the KV that is elsewhere
                        + computing what is cached nowhere

The same sum decides between importing a prefix and recomputing it, between prefill workers, and whether the decode
worker that holds most of the conversation computes a short suffix itself instead of involving a prefill worker. A
decode worker is chosen by its predicted step time and the KV that it lacks.

Workers that are the same to a request are one candidate, and nobody is predicted whose queue alone takes longer than
the best prediction: in a large cluster few sums are made, and the choice is the one that all of them would give.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from engine.core.costs import WorkerCosts
from engine.core.errors import NoWorkerError
from engine.core.types import Role

NEAR = 1.02
NEAR_S = 5e-4
"""Predictions that exceed the lowest by at most 2 % plus half a millisecond are equal to it: costs are not known
better."""
DECODE_HORIZON = 64
"""Tokens over which a decode worker's step time is weighed against the KV that it lacks."""
MIN_CONSIDERED = 16
"""So many candidates are predicted, if there are as many, to explain the choice by."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the sum is computed with, beyond each worker's own costs."""

    block_size: int
    block_bytes: int = 0
    """Learnt from the workers when they register."""
    piggyback_tokens: int = 64
    """The longest suffix that a decode worker computes itself between its decodes."""
    prior: WorkerCosts = field(default_factory=WorkerCosts)
    """Of a worker that has not measured anything yet."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs, wherever it goes."""

    num_tokens: int
    num_reachable_blocks: int = 0
    """Leading blocks that are in some pool, in the object store, or about to be computed."""
    pending_s: float = 0.0
    """Until the last of these will have been computed."""
    session: str = ""


class Offer(NamedTuple):
    """What a worker is to a request that it holds nothing of."""

    role: Role
    costs: WorkerCosts
    token_budget: int = 512
    queued_s: float = 0.0
    """Predicted time of the prefills promised to it and not done yet."""
    num_decoding: int = 0
    num_free_blocks: int | None = None


class Candidate(NamedTuple):
    """Workers that are the same to one request."""

    worker_ids: Collection[str]
    offer: Offer
    num_local_blocks: int = 0
    """Leading blocks of the request in the pool of each."""


class Prediction(NamedTuple):
    """The sum for each of some workers as the prefill worker."""

    worker_ids: Collection[str]
    num_local_blocks: int
    num_imported_blocks: int
    """Leading blocks that it gets from elsewhere, after its own."""
    wait_s: float
    import_s: float
    compute_s: float

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.import_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Placement:
    """Who prefills and who decodes (the same worker twice when the request is not split), and who else could have."""

    prefill: str
    decode: str
    chosen: Prediction
    considered: Sequence[Prediction]


class Crowd:
    """The workers of a cluster, those with equal offers together."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._groups: dict[Offer, set[str]] = {}

    def put(self, worker_id: str, offer: Offer) -> None:
        """A worker has come, or its offer has changed."""
        self.remove(worker_id)
        self._offers[worker_id] = offer
        self._groups.setdefault(offer, set()).add(worker_id)

    def remove(self, worker_id: str) -> None:
        """A worker has gone; one that is not there is no error."""
        offer = self._offers.pop(worker_id, None)
        if offer is not None:
            self._groups[offer].remove(worker_id)
            if not self._groups[offer]:
                del self._groups[offer]

    def offer_of(self, worker_id: str) -> Offer | None:
        return self._offers.get(worker_id)

    def candidates(self, holders: Mapping[int, Set[str]]) -> list[Candidate]:
        """All workers as one request sees them. `holders` has each under the number of leading blocks it holds."""
        return [
            Candidate(alike, offer, num_local)
            for offer, group in self._groups.items()
            for num_local, workers in holders.items()
            if (alike := group & workers)
        ]


def place(demand: Demand, candidates: Sequence[Candidate], model: CostModel) -> Placement:
    """Choose the workers of a request; near ties go to the worker that its session hashes to.

    Raises:
        NoWorkerError: there is no candidate.
    """
    if not candidates:
        raise NoWorkerError("no worker is ready")
    decoders = [candidate for candidate in candidates if candidate.offer.role is not Role.PREFILL]
    has_prefillers = any(candidate.offer.role is not Role.DECODE for candidate in candidates)
    predictions: list[Prediction] = []
    limit_s = inf
    for candidate in sorted(candidates, key=lambda candidate: candidate.offer.queued_s):
        if candidate.offer.queued_s > limit_s and len(predictions) >= MIN_CONSIDERED:
            break
        prediction = predict(candidate, demand, model)
        num_cached = prediction.num_local_blocks + prediction.num_imported_blocks
        num_uncached = demand.num_tokens - num_cached * model.block_size
        if candidate.offer.role is not Role.DECODE or not has_prefillers or num_uncached <= model.piggyback_tokens:
            predictions.append(prediction)
            limit_s = min(limit_s, _near(prediction.ttft_s))
    near = {worker_id: each for each in predictions if each.ttft_s <= limit_s for worker_id in each.worker_ids}
    prefill = decode = preferred(demand.session, near)
    if decoders and not any(prefill in decoder.worker_ids for decoder in decoders):
        costs_s = [_decode_cost_s(decoder, demand, model) for decoder in decoders]
        limit_s = _near(min(costs_s))
        cheap = [d.worker_ids for d, cost_s in zip(decoders, costs_s, strict=True) if cost_s <= limit_s]
        decode = preferred(demand.session, [worker_id for worker_ids in cheap for worker_id in worker_ids])
    return Placement(prefill, decode, near[prefill], predictions)


def predict(candidate: Candidate, demand: Demand, model: CostModel) -> Prediction:
    """The sum for `candidate` as the prefill worker, with the import that makes it the smallest."""
    worker_ids, offer, num_local = candidate
    num_importable = max(0, demand.num_reachable_blocks - num_local)
    compute_s = _compute_s(offer, demand, num_local, model)
    alone = Prediction(worker_ids, num_local, 0, offer.queued_s, 0.0, compute_s)
    if not num_importable:
        return alone
    import_s = offer.costs.import_all_s(num_importable * model.block_bytes)
    shorter_s = _compute_s(offer, demand, num_local + num_importable, model)
    if import_s + shorter_s >= compute_s:
        return alone
    wait_s = max(offer.queued_s, demand.pending_s)
    return Prediction(worker_ids, num_local, num_importable, wait_s, import_s, shorter_s)


def preferred(session: str, worker_ids: Collection[str]) -> str:
    """The worker that a session prefers to all others (rendezvous hashing, Thaler and Ravishankar 1998); there must be
    one.

    Losing a worker moves only the sessions that preferred it.
    """
    if len(worker_ids) == 1:
        return next(iter(worker_ids))
    return min(worker_ids, key=lambda worker_id: _affinity(session, worker_id))


def _affinity(session: str, worker_id: str) -> bytes:
    return blake2b(f"{session}\0{worker_id}".encode(), digest_size=8).digest()


def _near(cost_s: float) -> float:
    """What is at most this is as good as `cost_s`."""
    return cost_s * NEAR + NEAR_S


def _compute_s(offer: Offer, demand: Demand, num_cached_blocks: int, model: CostModel) -> float:
    num_cached = min(num_cached_blocks * model.block_size, demand.num_tokens - 1)
    return offer.costs.prefill_s(demand.num_tokens - num_cached, num_cached, offer.token_budget, offer.num_decoding)


def _decode_cost_s(candidate: Candidate, demand: Demand, model: CostModel) -> float:
    _, offer, num_local = candidate
    num_lacking = max(0, demand.num_tokens // model.block_size + 1 - num_local)
    lacks_room = offer.num_free_blocks is not None and offer.num_free_blocks < num_lacking
    step_s = offer.costs.decode_step_s(offer.num_decoding + 1)
    import_s = offer.costs.import_all_s(num_lacking * model.block_bytes)
    return DECODE_HORIZON * step_s * (1 + lacks_room) + import_s
