"""Which workers run a request: the ones with the lowest predicted time to first token.

    time to first token = tokens queued ahead / prefill rate
                        + bytes of KV to import / import rate
                        + tokens to compute / prefill rate

The same sum decides between importing a prefix and recomputing it, between prefill workers, and whether the decode
worker that holds most of the conversation computes a short suffix itself instead of involving a prefill worker.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.core.errors import NoWorkerError
from engine.core.types import Role


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the sum is computed with."""

    block_size: int
    block_bytes: int = 0
    """Learnt from the workers when they register."""
    import_bytes_per_s: float = 1e9
    piggyback_tokens: int = 64
    """The longest suffix that a decode worker computes itself between its decodes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as seen by one request."""

    worker_id: str
    role: Role
    prefill_tokens_per_s: float
    queued_tokens: int
    """Prefill tokens promised to it and not computed yet."""
    num_requests: int
    num_local_blocks: int
    """Leading blocks of the request in its own pool."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who prefills and who decodes; the same worker twice when the request is not split."""

    prefill: str
    decode: str
    predicted_ttft_s: float
    num_imported_blocks: int
    """Leading blocks that the prefill worker gets from elsewhere, after its own."""


def place(
    num_tokens: int,
    num_reachable_blocks: int,
    candidates: Sequence[Candidate],
    costs: CostModel,
    session: str,
) -> Placement:
    """Choose the workers of a request of `num_tokens`, whose first `num_reachable_blocks` are somewhere.

    Ties go to the worker that the session hashes to.

    Raises:
        NoWorkerError: there is no candidate.
    """
    if not candidates:
        raise NoWorkerError("no worker is ready")
    decoders = _with_role(candidates, Role.DECODE, Role.MIXED) or list(candidates)
    prefillers = _with_role(candidates, Role.PREFILL, Role.MIXED)
    order = {worker: rank for rank, worker in enumerate(rank_by_session(session, [c.worker_id for c in candidates]))}

    decoder = min(decoders, key=lambda c: (c.num_requests, -c.num_local_blocks, order[c.worker_id]))
    decoder_ids = {candidate.worker_id for candidate in decoders}
    options = []
    for candidate in {c.worker_id: c for c in [*prefillers, *decoders]}.values():
        ttft, num_imported = predict_ttft(candidate, num_tokens, num_reachable_blocks, costs)
        uncached = num_tokens - (candidate.num_local_blocks + num_imported) * costs.block_size
        if candidate.role is Role.DECODE and prefillers and uncached > costs.piggyback_tokens:
            continue
        decode = candidate.worker_id if candidate.worker_id in decoder_ids else decoder.worker_id
        options.append((ttft, order[candidate.worker_id], candidate.worker_id, decode, num_imported))
    ttft, _, prefill, decode, num_imported = min(options)
    return Placement(prefill, decode, ttft, num_imported)


def predict_ttft(
    candidate: Candidate, num_tokens: int, num_reachable_blocks: int, costs: CostModel
) -> tuple[float, int]:
    """Seconds to the first token on `candidate`, and how many blocks it should import for that."""
    rate = candidate.prefill_tokens_per_s
    num_importable = max(0, num_reachable_blocks - candidate.num_local_blocks)
    import_s = num_importable * costs.block_bytes / costs.import_bytes_per_s
    recompute_s = num_importable * costs.block_size / rate
    num_imported = num_importable if import_s < recompute_s else 0
    num_cached = candidate.num_local_blocks + num_imported
    compute_s = max(1, num_tokens - num_cached * costs.block_size) / rate
    return candidate.queued_tokens / rate + import_s * (num_imported > 0) + compute_s, num_imported


def rank_by_session(session: str, worker_ids: Iterable[str]) -> list[str]:
    """Workers in the order in which a session prefers them (rendezvous hashing, Thaler and Ravishankar 1998).

    Losing a worker moves only the sessions that preferred it.
    """
    return sorted(worker_ids, key=lambda worker: blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest())


def _with_role(candidates: Sequence[Candidate], *roles: Role) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.role in roles]
