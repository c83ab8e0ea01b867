"""Chooses the workers of a request: the lowest predicted cost for the request and for others.

    cost                = time to first token + delay of others + room
    time to first token = the queue, or the wait for blocks that others are computing, whichever is longer
                        + import of the KV that is elsewhere
                        + computing the KV that is cached nowhere
    delay of others     = computing, once for each request that will wait, and a little for each decode beside it
    room                = computing again the evicted blocks, as far as evicted blocks are requested again

One sum decides between importing a prefix and recomputing the prefix, between prefill workers, and between splitting
the request and letting the decode worker that holds most of the conversation compute a short suffix. A decode worker is
chosen by predicted step time, missing KV and room.

Where the workers are on several nodes, imports take what the links between the nodes take (`Links`), and

    cost of a split request = cost + transfer of the KV that still goes on when the first token is there

and decode workers are candidates for whole requests, however long, if sending the KV would take longer than computing.

| workers | tied if | why |
|---|---|---|
| with different costs | the ranges of their sums (cost times `spread`) overlap | a fit is known within its spread |
| with equal costs | the sums differ by less than `TIE` and `TIE_S` | only hits, load and room differ, and are known |

The session decides a tie: it stays on its last worker, or goes to the one preferred by rendezvous hashing.

Workers with equal loads are one candidate. A candidate whose queue alone exceeds the best sum is not predicted: in a
large cluster few sums are made, and the choice is the one of a full scan.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import NoWorkerError
from raydix.engine.core.hashing import preferred
from raydix.engine.core.manager.links import Links, Sources
from raydix.engine.core.objectives import NO_OBJECTIVES, Objectives
from raydix.engine.core.types import Role

# Limit of the requests assumed to wait for one computation: behind a longer queue, requests go elsewhere.
MAX_DELAYED = 3
DECODE_DELAY = 0.1  # delay of a decode, as a share of the time of a computation beside it
MAX_SPREAD = 0.5  # upper limit of a fit's spread: a worse fit counts as this good
# Equal costs are tied if the difference of the sums is below this share plus these seconds.
TIE = 0.02
TIE_S = 5e-4
DECODE_HORIZON = 64  # tokens over which a decode worker's step time is weighed against the import of missing KV
MIN_CONSIDERED = 16  # minimum of predicted candidates, if there are as many, for the explanation of the choice


class SessionWorkers(NamedTuple):
    """The workers of a session's last request."""

    prefill: str
    decode: str


NO_WORKERS = SessionWorkers("", "")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Parameters of the sum beyond each worker's own costs."""

    block_size: int
    block_bytes: int = 0
    """Reported by the workers when they register."""
    state_bytes: int = 0
    """Bytes of a recurrent state, reported likewise; 0: blocks alone are of use."""
    piggyback_tokens: int = 64
    """The longest suffix for a decode worker to compute itself between decodes."""
    prior: WorkerCosts = field(default_factory=WorkerCosts)
    """Costs of a worker without measurements."""
    links: Links = field(default_factory=Links, compare=False)
    """Costs of imports between nodes, as learnt so far."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Needs of a request, the same for every worker."""

    num_tokens: int
    num_reachable_blocks: int = 0
    """Leading blocks that are in some pool, in the object store, or about to be computed."""
    pending_s: float = 0.0
    """Until the last of the reachable blocks will have been computed."""
    session: str = ""
    return_rate: float = 0.0
    """Share of evicted blocks requested again."""
    last_workers: SessionWorkers = NO_WORKERS
    """Workers of the session's last request."""
    objectives: Objectives = NO_OBJECTIVES
    sources: Sources | None = None
    """Nodes of the reachable blocks; None: nodes make no difference, since all workers are on one."""
    generates: bool = True
    """True if tokens follow the prompt; otherwise nothing is handed over."""
    is_behind: bool = False
    """True if the request gives way to others."""


class WorkerLoad(NamedTuple):
    """Role, costs and load of a worker; equal loads make workers equal for requests without held blocks there."""

    role: Role
    """Role of the worker; the duty of an elastic one."""
    costs: WorkerCosts
    token_budget: int = 512
    queued_s: float = 0.0
    """Predicted time of the queued, unfinished prefills."""
    num_decoding: int = 0
    num_free_blocks: int | None = None
    """Blocks without a holder; None if unknown."""
    num_queued: int = 0
    """Promised requests with an unfinished prefill."""
    num_empty_blocks: int | None = None
    """Blocks to be filled without an eviction; None if unknown."""
    is_elastic: bool = False
    """True if `role` is a duty, with exceptions (`raydix.engine.core.manager.elastic`)."""
    tpot_s: float | None = None
    """The strictest objective of the streams of an elastic worker; None without one."""
    node: str = ""
    behind_s: float = 0.0
    """Time of those prefills in `queued_s` that are behind all others."""

    def ahead_s(self, is_behind: bool) -> float:
        """Time of the queued prefills before a new request."""
        return self.queued_s if is_behind else self.queued_s - self.behind_s


class WorkersAlike(NamedTuple):
    """Workers without a difference for one request."""

    worker_ids: Collection[str]
    load: WorkerLoad
    num_local_blocks: int = 0
    """Leading blocks of the request in the pool of each worker."""
    num_promised_blocks: int = 0
    """Blocks behind these that each worker will have computed for requests before."""


class PredictedTimes(NamedTuple):
    """The sum for each of `worker_ids` as the prefill worker."""

    worker_ids: Collection[str]
    num_local_blocks: int
    num_imported_blocks: int
    """Leading blocks that come from elsewhere, or from a request before on the same worker, after the local ones."""
    wait_s: float
    import_s: float
    compute_s: float
    others_s: float = 0.0
    """Delay of all other requests together."""
    room_s: float = 0.0
    """Expected time of computing the evicted blocks again."""
    transfer_s: float = 0.0
    """Time from the first token until the decode worker has the KV; 0 for a request that is not split, and where nodes
    make no difference."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.import_s + self.compute_s

    @property
    def cost_s(self) -> float:
        """The sum behind the choice."""
        return self.ttft_s + self.others_s + self.room_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Placement:
    """The prefill and the decode worker (equal when the request is not split), and the other predictions."""

    prefill: str
    decode: str
    chosen: PredictedTimes
    considered: Sequence[PredictedTimes]
    handover_s: float | None = None
    """Predicted time from the first token to the second one of a split request."""


def place(demand: Demand, candidates: Sequence[WorkersAlike], model: CostModel) -> Placement:
    """Choose the workers of a request; the session decides ties.

    Raises:
        NoWorkerError: there is no candidate.
    """
    if not candidates:
        raise NoWorkerError("no worker is ready")
    decoders = [candidate for candidate in candidates if candidate.load.role is not Role.PREFILL]
    has_prefillers = any(candidate.load.role is not Role.DECODE for candidate in candidates)
    are_weighed = decoders and demand.generates and demand.sources is not None
    hand_overs = _HandOvers(decoders, demand, model) if are_weighed else None
    sums = _Sums()
    spared: list[WorkersAlike] = []
    # By the lower bound of the sum: where it exceeds the best sum, all further ones do.
    for candidate in sorted(candidates, key=_least_s):
        if sums.is_pruned(candidate):
            break
        prediction = predict(candidate, demand, model)
        num_cached = prediction.num_local_blocks + prediction.num_imported_blocks
        num_uncached = demand.num_tokens - num_cached * model.block_size
        # Decode workers compute only short suffixes while there are others for prompts.
        if candidate.load.role is Role.DECODE and has_prefillers and num_uncached > model.piggyback_tokens:
            spared.append(candidate)
        elif candidate.load.role is Role.PREFILL and hand_overs is not None:
            sums.add(candidate, hand_overs.with_transfer(prediction, candidate.load))
        else:
            sums.add(candidate, prediction)

    # Decode workers compute long prompts, too, where sending the KV would take longer.
    if hand_overs is not None and all(hand_overs.is_dear(*each) for each in sums.best()):
        for candidate in spared:
            sums.add(candidate, predict(candidate, demand, model))

    # The session decides between the tied ones: it stays where it was, as long as nothing speaks against it.
    near = sums.near()
    prefill = decode = (
        demand.last_workers.prefill if demand.last_workers.prefill in near else preferred(demand.session, near)
    )
    load, chosen = near[prefill]
    handover_s = None

    # Where the worker of the prompt decodes, too, nothing is handed over.
    if decoders and not any(prefill in decoder.worker_ids for decoder in decoders):
        decode, decoder = _decode_worker(decoders, demand, model, load.node)
        step_s = decoder.load.costs.decode_step_s(decoder.load.num_decoding + 1)
        handover_s = _transfer_s(chosen, load, decoder, demand, model) + step_s
    return Placement(prefill, decode, chosen, sums.predictions, handover_s=handover_s)


class _Sums:
    """The predictions of one placement so far, each with its candidate's load."""

    def __init__(self) -> None:
        self.predictions: list[PredictedTimes] = []
        self._loads: list[WorkerLoad] = []
        self._limit_s = inf

    def add(self, candidate: WorkersAlike, prediction: PredictedTimes) -> None:
        self.predictions.append(prediction)
        self._loads.append(candidate.load)
        # The sum, as much higher as its fit may be wrong: a queue below it prunes nobody.
        self._limit_s = min(self._limit_s, prediction.cost_s * (1 + _spread(candidate.load)))

    def is_pruned(self, candidate: WorkersAlike) -> bool:
        """True if the queue of a candidate alone exceeds the best sum, and enough were predicted."""
        return _least_s(candidate) > self._limit_s and len(self.predictions) >= MIN_CONSIDERED

    def best(self) -> list[tuple[PredictedTimes, WorkerLoad]]:
        """The predictions with the lowest sum."""
        lowest_s = min((each.cost_s for each in self.predictions), default=inf)
        pairs = zip(self.predictions, self._loads, strict=True)
        return [(each, load) for each, load in pairs if each.cost_s == lowest_s]

    def near(self) -> dict[str, tuple[WorkerLoad, PredictedTimes]]:
        """The workers between which the session decides."""
        tied = _tied(self._loads, [each.cost_s for each in self.predictions])
        return {
            worker_id: (self._loads[index], self.predictions[index])
            for index in tied
            for worker_id in self.predictions[index].worker_ids
        }


class _HandOvers:
    """Hand-overs of one request, with the best decode workers for each node of a prefill worker."""

    def __init__(self, decoders: Sequence[WorkersAlike], demand: Demand, model: CostModel) -> None:
        self._demand = demand
        self._model = model
        self._decoders = sorted(((_decode_base_s(each, demand, model), each) for each in decoders), key=_first)
        self._best: dict[str, list[WorkersAlike]] = {}

    def with_transfer(self, prediction: PredictedTimes, load: WorkerLoad) -> PredictedTimes:
        """A prefill worker's prediction, with the hand-over to the best decode worker."""
        transfers_s = (
            _transfer_s(prediction, load, decoder, self._demand, self._model) for decoder in self._best_for(load.node)
        )
        return prediction._replace(transfer_s=min(transfers_s))

    def is_dear(self, prediction: PredictedTimes, load: WorkerLoad) -> bool:
        """True if the KV of a split request would take longer to its decode worker than computing it there."""
        if load.role is not Role.PREFILL:
            return False
        demand, model = self._demand, self._model
        for decoder in self._best_for(load.node):
            alone = predict(decoder, demand, model)
            if _import_all_s(decoder, demand, model, load.node) <= alone.import_s + alone.compute_s:
                return False
        return True

    def _best_for(self, node: str) -> list[WorkersAlike]:
        """The decode workers of the lowest cost if the prompt is computed on `node`."""
        if node not in self._best:
            least_s, best = inf, list[WorkersAlike]()
            for base_s, decoder in self._decoders:
                if base_s > least_s:
                    break
                cost_s = base_s + _import_all_s(decoder, self._demand, self._model, node)
                # All of the lowest cost stay: their links to the prefill worker may differ.
                if cost_s <= least_s:
                    best = [*best, decoder] if cost_s == least_s else [decoder]
                    least_s = cost_s
            self._best[node] = best
        return self._best[node]


def predict(candidate: WorkersAlike, demand: Demand, model: CostModel) -> PredictedTimes:
    """The sum for `candidate` as the prefill worker, with the import that gives the shortest time to first token."""
    worker_ids, load, num_local, num_promised = candidate
    # Without an import. What the worker computes for others before costs nothing here, but the wait for it.
    queue_s = load.ahead_s(demand.is_behind)
    num_imported, import_s = num_promised, 0.0
    wait_s = max(queue_s, demand.pending_s) if num_promised else queue_s
    compute_s = _compute_s(load, demand, num_local + num_promised, model, load.num_decoding)

    # With an import of all reachable blocks, if that is quicker.
    num_importable = demand.num_reachable_blocks - num_local
    if num_importable > num_promised:
        all_import_s = _import_s(load, demand, num_local + num_promised, demand.num_reachable_blocks, model)
        shorter_s = _compute_s(load, demand, num_local + num_importable, model, load.num_decoding)
        if all_import_s + shorter_s < compute_s:
            num_imported, import_s, compute_s = num_importable, all_import_s, shorter_s
            # The queue is worked off while others compute the blocks, so the longer one of both waits counts.
            wait_s = max(queue_s, demand.pending_s)

    # Delay of others, and computing again the blocks that are evicted.
    others_s = 0.0
    if load.num_queued or load.num_decoding:
        # Requests behind this one wait for all of it, decodes beside it for a part of each step.
        num_delayed = min(load.num_queued, MAX_DELAYED) + DECODE_DELAY * load.num_decoding
        others_s = num_delayed * _compute_s(load, demand, num_local + num_imported, model, num_decodes=0)
    room_s = _room_s(load, demand, num_local + num_promised, model)
    return PredictedTimes(
        worker_ids=worker_ids,
        num_local_blocks=num_local,
        num_imported_blocks=num_imported,
        wait_s=wait_s,
        import_s=import_s,
        compute_s=compute_s,
        others_s=others_s,
        room_s=room_s,
    )


def _spread(load: WorkerLoad) -> float:
    return min(load.costs.spread, MAX_SPREAD)


def _least_s(candidate: WorkersAlike) -> float:
    """Lower bound of any request's cost on `candidate`, within its spread and the range of a tie."""
    return (candidate.load.ahead_s(is_behind=False) - TIE_S) / (1 + TIE) * (1 - _spread(candidate.load))


def _tied(loads: Sequence[WorkerLoad], costs_s: Sequence[float]) -> list[int]:
    """Indices of the sums with a chance to be the lowest.

    Sums with equal costs are compared with the least of them, and belong to the result if tied with it.
    """
    least_s: dict[WorkerCosts, float] = {}
    limit_s = inf
    for load, cost_s in zip(loads, costs_s, strict=True):
        # Sums of equal costs have no error against each other: the least of them stands for all.
        if cost_s <= least_s.get(load.costs, inf):
            least_s[load.costs] = cost_s
        limit_s = min(limit_s, cost_s * (1 + _spread(load)))
    return [
        index
        for index, (load, cost_s) in enumerate(zip(loads, costs_s, strict=True))
        if (least := least_s[load.costs]) * (1 - _spread(load)) <= limit_s and cost_s <= least * (1 + TIE) + TIE_S
    ]


def _compute_s(load: WorkerLoad, demand: Demand, num_cached_blocks: int, model: CostModel, num_decodes: int) -> float:
    """Time of computing the tokens behind the cached blocks, in steps beside `num_decodes` decodes."""
    # The last token is always computed: its output is the first sampled token.
    num_cached = min(num_cached_blocks * model.block_size, demand.num_tokens - 1)
    return load.costs.prefill_s(demand.num_tokens - num_cached, num_cached, load.token_budget, num_decodes)


def _room_s(load: WorkerLoad, demand: Demand, num_local: int, model: CostModel) -> float:
    """Expected time of computing the blocks again that are evicted for the request."""
    if load.num_empty_blocks is None or not demand.return_rate:
        return 0.0
    # Only what the empty blocks have no room for pushes others out.
    num_evicted = _num_lacking(demand, num_local, model) - load.num_empty_blocks
    return max(0, num_evicted) * model.block_size * load.costs.prefill_token_s * demand.return_rate


def _num_lacking(demand: Demand, num_local: int, model: CostModel) -> int:
    """Blocks for the prompt and the first token that the worker does not hold."""
    return max(0, _num_blocks(demand, model) - num_local)


def _decode_worker(
    decoders: Sequence[WorkersAlike], demand: Demand, model: CostModel, node: str
) -> tuple[str, WorkersAlike]:
    """The decode worker of a request whose prompt is computed on `node`, and the worker's candidate."""
    costs_s = [_decode_base_s(each, demand, model) + _import_all_s(each, demand, model, node) for each in decoders]
    tied = _tied([decoder.load for decoder in decoders], costs_s)
    near = {worker_id: decoders[index] for index in tied for worker_id in decoders[index].worker_ids}
    decode = demand.last_workers.decode if demand.last_workers.decode in near else preferred(demand.session, near)
    return decode, near[decode]


def _decode_base_s(candidate: WorkersAlike, demand: Demand, model: CostModel) -> float:
    """The cost of decoding at a worker, without the import of KV."""
    load, num_local = candidate.load, candidate.num_local_blocks
    num_lacking = _num_lacking(demand, num_local, model)
    # Without room the stream waits, or preempts others: as if each step took twice as long.
    lacks_room = load.num_free_blocks is not None and load.num_free_blocks < num_lacking
    step_s = load.costs.decode_step_s(load.num_decoding + 1)
    return DECODE_HORIZON * step_s * (1 + lacks_room) + _room_s(load, demand, num_local, model)


def _import_all_s(decoder: WorkersAlike, demand: Demand, model: CostModel, node: str) -> float:
    """Import of all that a decode worker lacks of a prompt that is computed on `node`."""
    return _import_s(decoder.load, demand, decoder.num_local_blocks, _num_blocks(demand, model), model, node)


def _transfer_s(
    prediction: PredictedTimes, load: WorkerLoad, decoder: WorkersAlike, demand: Demand, model: CostModel
) -> float:
    """Time from the first token until a decode worker has the KV.

    Blocks that are somewhere are sent from the admission on, the others chunk by chunk while the next chunk is
    computed, and the last chunk after the first token.
    """
    end = _num_blocks(demand, model)
    num_cached = prediction.num_local_blocks + prediction.num_imported_blocks
    num_in_chunk = -(-load.token_budget // model.block_size)
    first_computed = max(decoder.num_local_blocks, num_cached)
    first_of_last_chunk = max(first_computed, end - num_in_chunk)
    # The end of three transfers in seconds, each begun as early as its blocks are there: all blocks from the admission
    # on, the computed ones from the begin of the computation, the last chunk at the first token.
    all_s, computed_s, last_s = (
        _import_s(decoder.load, demand, start, end, model, load.node)
        for start in (decoder.num_local_blocks, first_computed, first_of_last_chunk)
    )
    return max(last_s, computed_s - prediction.compute_s, all_s - prediction.ttft_s)


def _import_s(load: WorkerLoad, demand: Demand, start: int, end: int, model: CostModel, node: str = "") -> float:
    """Fetching the blocks of a prompt from `start` to `end`; blocks that are not reachable yet come from `node`."""
    if demand.sources is None or start >= end:
        # Beside the blocks comes the state behind the last of them.
        return load.costs.import_all_s((end - start) * model.block_bytes + model.state_bytes) if start < end else 0.0
    counts: dict[str, int] = {}
    at, last = 0, node
    for source, count in (*demand.sources, (node, max(0, end - demand.num_reachable_blocks))):
        # The part of the run [at, at + count) that lies in [start, end).
        num_blocks = min(end, at + count) - max(start, at)
        if num_blocks > 0:
            counts[source] = counts.get(source, 0) + num_blocks * model.block_bytes
            last = source
        at += count
    if counts and model.state_bytes:
        counts[last] += model.state_bytes
    return sum(model.links.import_s(source, load.node, num_bytes, load.costs) for source, num_bytes in counts.items())


def _num_blocks(demand: Demand, model: CostModel) -> int:
    """Blocks for the prompt and the first token."""
    return demand.num_tokens // model.block_size + 1


def _first(pair: tuple[float, WorkersAlike]) -> float:
    return pair[0]
