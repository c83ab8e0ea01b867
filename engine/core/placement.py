"""Which workers run a request: the ones with the lowest predicted time to first token.

    time to first token = the queue, or the wait for blocks that others are computing, whichever is longer
                        + import of the KV that is elsewhere
                        + computing what is cached nowhere

The same sum decides between importing a prefix and recomputing it, between prefill workers, and whether the decode
worker that holds most of the conversation computes a short suffix itself instead of involving a prefill worker. A
decode worker is chosen by its predicted step time and the KV that it lacks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.core.costs import WorkerCosts
from engine.core.errors import NoWorkerError
from engine.core.types import Role

NEAR = 1.02
NEAR_S = 5e-4
"""Predictions that differ by less than 2 % or half a millisecond are equal: costs are not known better."""
DECODE_HORIZON = 64
"""Tokens over which a decode worker's step time is weighed against the KV that it lacks."""


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as seen by one request."""

    worker_id: str
    role: Role
    costs: WorkerCosts
    token_budget: int = 512
    queued_s: float = 0.0
    """Predicted time of the prefills promised to it and not done yet."""
    num_decoding: int = 0
    num_free_blocks: int | None = None
    num_local_blocks: int = 0
    """Leading blocks of the request in its own pool."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The sum for one candidate as the prefill worker."""

    worker_id: str
    decode: str
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

    chosen: Prediction
    considered: tuple[Prediction, ...]

    @property
    def prefill(self) -> str:
        return self.chosen.worker_id

    @property
    def decode(self) -> str:
        return self.chosen.decode


def place(demand: Demand, candidates: Sequence[Candidate], model: CostModel) -> Placement:
    """Choose the workers of a request; near ties go to the worker that its session hashes to.

    Raises:
        NoWorkerError: there is no candidate.
    """
    if not candidates:
        raise NoWorkerError("no worker is ready")
    decoders = _with_role(candidates, Role.DECODE, Role.MIXED) or list(candidates)
    prefillers = _with_role(candidates, Role.PREFILL, Role.MIXED)
    decoding = {candidate.worker_id: _decode_cost_s(candidate, demand, model) for candidate in decoders}
    decoder = _preferred(decoding, demand.session)
    predictions = {}
    for candidate in {c.worker_id: c for c in [*prefillers, *decoders]}.values():
        decode = candidate.worker_id if candidate.worker_id in decoding else decoder
        prediction = predict(candidate, decode, demand, model)
        num_cached = prediction.num_local_blocks + prediction.num_imported_blocks
        num_uncached = demand.num_tokens - num_cached * model.block_size
        if candidate.role is not Role.DECODE or not prefillers or num_uncached <= model.piggyback_tokens:
            predictions[candidate.worker_id] = prediction
    chosen = _preferred({worker_id: each.ttft_s for worker_id, each in predictions.items()}, demand.session)
    return Placement(predictions[chosen], tuple(predictions.values()))


def predict(candidate: Candidate, decode: str, demand: Demand, model: CostModel) -> Prediction:
    """The sum for `candidate` as the prefill worker, with the import that makes it the smallest."""
    num_local = candidate.num_local_blocks
    num_importable = max(0, demand.num_reachable_blocks - num_local)
    compute_s = _compute_s(candidate, demand, num_local, model)
    alone = Prediction(candidate.worker_id, decode, num_local, 0, candidate.queued_s, 0.0, compute_s)
    if not num_importable:
        return alone
    import_s = candidate.costs.import_all_s(num_importable * model.block_bytes)
    shorter_s = _compute_s(candidate, demand, num_local + num_importable, model)
    if import_s + shorter_s >= compute_s:
        return alone
    wait_s = max(candidate.queued_s, demand.pending_s)
    return Prediction(candidate.worker_id, decode, num_local, num_importable, wait_s, import_s, shorter_s)


def rank_by_session(session: str, worker_ids: Iterable[str]) -> list[str]:
    """Workers in the order in which a session prefers them (rendezvous hashing, Thaler and Ravishankar 1998).

    Losing a worker moves only the sessions that preferred it.
    """
    return sorted(worker_ids, key=lambda worker: blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest())


def _compute_s(candidate: Candidate, demand: Demand, num_cached_blocks: int, model: CostModel) -> float:
    num_cached = min(num_cached_blocks * model.block_size, demand.num_tokens - 1)
    return candidate.costs.prefill_s(
        demand.num_tokens - num_cached, num_cached, candidate.token_budget, candidate.num_decoding
    )


def _decode_cost_s(candidate: Candidate, demand: Demand, model: CostModel) -> float:
    num_blocks = demand.num_tokens // model.block_size + 1
    num_lacking = max(0, num_blocks - candidate.num_local_blocks)
    lacks_room = candidate.num_free_blocks is not None and candidate.num_free_blocks < num_lacking
    step_s = candidate.costs.decode_step_s(candidate.num_decoding + 1)
    import_s = candidate.costs.import_all_s(num_lacking * model.block_bytes)
    return DECODE_HORIZON * step_s * (1 + lacks_room) + import_s


def _preferred(costs_s: dict[str, float], session: str) -> str:
    """The cheapest worker; among those nearly as cheap the one that the session prefers."""
    limit_s = min(costs_s.values()) * NEAR + NEAR_S
    near = [worker_id for worker_id, cost_s in costs_s.items() if cost_s <= limit_s]
    return near[0] if len(near) == 1 else rank_by_session(session, near)[0]


def _with_role(candidates: Sequence[Candidate], *roles: Role) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.role in roles]
