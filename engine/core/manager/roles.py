"""Roles of elastic workers for one request.

An elastic worker has a duty (`raydix.engine.core.manager.elastic`), which placement takes for its role, with two
exceptions:

| duty | does both for a request if |
|---|---|
| decode | its steps stay within the objective with the request's prompt in chunks beside the decodes |
| prefill | no worker that decodes can take one more stream within the objective, and has room for it |

The objective of a worker is the strictest one of its streams and the request.
"""

from collections.abc import Sequence
from math import inf

from raydix.engine.core.manager.placement import Candidate, CostModel, Demand
from raydix.engine.core.manager.planner import chunk_step_s
from raydix.engine.core.types import Role


def with_roles(candidates: Sequence[Candidate], demand: Demand, model: CostModel) -> Sequence[Candidate]:
    """The candidates with the roles of the elastic ones for this request."""
    if not any(candidate.load.is_elastic for candidate in candidates):
        return candidates
    decoders = [candidate for candidate in candidates if candidate.load.role is not Role.PREFILL]
    can_decode = any(_takes_stream(candidate, demand, model) for candidate in decoders)
    return [_with_role(candidate, demand, model, can_decode=can_decode) for candidate in candidates]


def _with_role(candidate: Candidate, demand: Demand, model: CostModel, *, can_decode: bool) -> Candidate:
    load = candidate.load
    if not load.is_elastic:
        return candidate
    does_both = _takes_prompt(candidate, demand, model) if load.role is Role.DECODE else not can_decode
    return candidate._replace(load=load._replace(role=Role.MIXED)) if does_both else candidate


def _takes_prompt(candidate: Candidate, demand: Demand, model: CostModel) -> bool:
    """True if the decodes of a worker, and the request's own, stay within the objective beside its prompt."""
    load = candidate.load
    num_cached = max(candidate.num_local_blocks, demand.num_reachable_blocks) * model.block_size
    num_uncached = max(1, demand.num_tokens - num_cached)
    step_s = chunk_step_s(load.costs, load.num_decoding, num_uncached, load.token_budget)
    return step_s <= _tpot_s(candidate, demand)


def _takes_stream(candidate: Candidate, demand: Demand, model: CostModel) -> bool:
    """True if a worker may decode one stream more."""
    load = candidate.load
    num_blocks = demand.num_tokens // model.block_size + 1 - candidate.num_local_blocks
    has_room = load.num_free_blocks is None or load.num_free_blocks >= num_blocks
    return has_room and load.costs.decode_step_s(load.num_decoding + 1) <= _tpot_s(candidate, demand)


def _tpot_s(candidate: Candidate, demand: Demand) -> float:
    objectives = (candidate.load.tpot_s, demand.objectives.tpot_s)
    return min((each for each in objectives if each is not None), default=inf)
