"""Remembers the manager's decisions: the placement of a request, its hits, and the outcome.

Bounded: the oldest requests are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nsmallest
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from raydix.engine.core.doctor import MOST_PROMPTS, Miss
from raydix.engine.core.manager.placement import Placement, PredictedTimes
from raydix.engine.core.manager.sessions import Branch
from raydix.engine.core.objectives import WhenLate
from raydix.engine.core.types import DraftUse, Ended, Expected, Outcome, Role

MAX_CONSIDERED = 16  # workers kept per decision, the best ones


class BlockSource(StrEnum):
    """Source of a full block of a prompt, or the reason for computing the block."""

    LOCAL = "local"
    """The block is in the prefill worker's own pool."""
    WORKER = "worker"
    """The block is in another worker's pool."""
    STORE = "store"
    """The block is in the object store."""
    DISK = "disk"
    PENDING = "pending"
    """Being computed for another request, and awaited."""
    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    """Stored before, and evicted to make room."""
    LOST = "lost"
    """Stored before, and gone since for another reason: with its worker, by a reset, by a failure."""
    DIVERGED = "diverged"
    """The blocks before this one are known, with another continuation."""
    REASONING_LEFT_OUT = "reasoning_left_out"
    """An answer, with reasoning maybe, began here in an earlier turn, and this prompt goes on otherwise: most chat
    templates leave reasoning out of later prompts."""
    RECOMPUTED = "recomputed"
    """Stored somewhere, but computing was predicted to be faster."""
    NO_STATE = "no_state"
    """Somewhere, but without a recurrent state behind it to go on from."""


# Reasons of misses, for people.
WHY: Mapping[BlockSource, str] = MappingProxyType(
    {
        BlockSource.NEVER_SEEN: "no prompt with these blocks has been computed before.",
        BlockSource.EVICTED: "the blocks were computed before, and had to make room since; a larger pool, an object "
        "store or a disk would have kept them.",
        BlockSource.LOST: "the blocks were computed before, and are gone since: with a worker that ended, by a reset "
        "of the cache, or by a failure.",
        BlockSource.DIVERGED: "earlier prompts begin alike up to here, and go on differently. A date, an id or an "
        "edited message in this place costs everything behind it: put what changes last.",
        BlockSource.REASONING_LEFT_OUT: "an answer that may have reasoned began here; most chat templates leave the "
        "reasoning of earlier answers out, so the prompt goes on otherwise.",
        BlockSource.RECOMPUTED: "the blocks are somewhere, but computing them again was predicted to be quicker than "
        "fetching them.",
        BlockSource.NO_STATE: "the blocks are there, without a snapshot of the recurrent state behind them: the next "
        "prompt that parts here goes on from the snapshot that this one leaves.",
    }
)

HITS = frozenset({BlockSource.LOCAL, BlockSource.WORKER, BlockSource.STORE, BlockSource.DISK, BlockSource.PENDING})


class SessionFacts(NamedTuple):
    """The session of a request, at its admission."""

    num_requests: int
    """Requests so far, with this one."""
    num_blocks: int
    """Blocks of the session's own."""
    num_pauses: int
    paused_s: float
    branch: Branch | None = None


class Eviction(NamedTuple):
    """Blocks of a prompt that were evicted before its admission."""

    at: float
    """When the first of them that is missing left its last place, in seconds since the epoch."""
    num_more_blocks: int
    """Blocks by which the cache would have to be larger, in all its places together, to have them still."""


@dataclass(slots=True)
class Decision:
    """The facts of an admission's decision, and the outcome."""

    attempt: int
    tenant: str
    num_tokens: int
    block_size: int
    runs: tuple[tuple[BlockSource, int], ...]
    """Sources of the prompt's full blocks in order, as runs: source and number of blocks."""
    prefill: str
    decode: str
    predicted_ttft_s: float
    considered: tuple[PredictedTimes, ...]
    ttft_s: float | None = None
    """Seconds from admission to the first token."""
    predicted_handover_s: float | None = None
    """Seconds from the first token to the second one, if two workers share the request."""
    handover_s: float | None = None
    """Seconds from the first token to the second one, as measured; None before the end."""
    ended: Outcome | None = None
    session: SessionFacts | None = None
    num_preemptions: int = 0
    drafts: tuple[DraftUse, ...] = ()
    """Draft tokens computed in the attempt's steps, by source."""
    prefix_caching: bool = True
    """True if KV was kept for later requests."""
    duties: Mapping[str, Role] = field(default_factory=dict)
    """Duties of the elastic ones among the workers."""
    objective_ttft_s: float | None = None
    when_late: WhenLate | None = None
    """Treatment of the request, which no worker was predicted to serve in time; None in time."""
    uncached_s: float = 0.0
    """Predicted time of computing the whole prompt at the worker, had there been no cache."""
    saved_s: float = 0.0
    """Seconds of `uncached_s` that hits are predicted to save."""
    eviction: Eviction | None = None
    """Set if the first computed block was evicted before."""
    admitted_at: float = 0.0
    """Time of the admission, in seconds since the epoch."""
    adapter: str | None = None
    """Name of the request's adapter, which shares its KV with no other one; None: the model alone."""

    @property
    def expected(self) -> Expected:
        """The decision in the few figures that its request's ingress keeps."""
        # At each admission: a `Counter` takes twice as long.
        blocks: dict[str, int] = {}
        for source, count in self.runs:
            blocks[source.value] = blocks.get(source.value, 0) + count
        return Expected(self.predicted_ttft_s, (*blocks.items(),))

    @property
    def regret_s(self) -> float | None:
        """Delay of the first token beyond the prediction for the best other candidate.

        0 without another candidate or delay; None before the first token.
        """
        if self.ttft_s is None:
            return None
        # Equal workers are one candidate, which is another choice too if the group has any worker beside the chosen
        # one.
        others = (each.ttft_s for each in self.considered if any(name != self.prefill for name in each.worker_ids))
        return max(0.0, self.ttft_s - min(others, default=self.ttft_s))

    @property
    def first_miss(self) -> tuple[int, BlockSource] | None:
        """The position of the first token whose block was computed, and the reason; None without such a block."""
        position = 0
        for source, count in self.runs:
            # Prefixes only: what stands behind the first miss may be stored, and is computed all the same.
            if source not in HITS:
                return position, source
            position += count * self.block_size
        return None

    @property
    def evicted_ago_s(self) -> float:
        """Seconds between the eviction of the first computed block and the admission; 0 without an eviction."""
        return 0.0 if self.eviction is None else max(0.0, self.admitted_at - self.eviction.at)

    @property
    def why(self) -> str | None:
        """Why the first computed block was computed, in a sentence; None without such a block."""
        if self.first_miss is None:
            return None
        _, reason = self.first_miss
        if self.eviction is None:
            return WHY[reason]
        more = self.eviction.num_more_blocks
        return (
            f"{WHY[reason]} They were evicted {self.evicted_ago_s:,.0f} s before the prompt came, and {more:,} more "
            f"block{'s' if more > 1 else ''} of room would have kept them."
        )

    def miss(self, names: tuple[str, ...]) -> Miss:
        """What was found of the prompt of a request with these names."""
        num_hits = sum(count for source, count in self.runs if source in HITS)
        return Miss(
            names=names,
            num_cached=num_hits * self.block_size,
            token_s=self.uncached_s / max(1, self.num_tokens),
            source=None if self.first_miss is None else str(self.first_miss[1]),
            evicted_ago_s=None if self.eviction is None else round(self.evicted_ago_s, 3),
            num_more_blocks=None if self.eviction is None else self.eviction.num_more_blocks,
        )

    @property
    def _note(self) -> str | None:
        if not self.prefix_caching:
            return "cache.prefix_caching is false: nothing is kept for later requests"
        return None if self.runs else "shorter than a block: nothing to share"

    def as_json(self) -> dict[str, object]:
        """The decision as the explain endpoint shows it. Times in seconds, blocks as runs of equal sources."""
        missed_at, _ = self.first_miss or (None, None)
        num_hashed = sum(count for _, count in self.runs) * self.block_size
        return {
            "attempt": self.attempt,
            "adapter": self.adapter,
            "prompt_tokens": self.num_tokens,
            "block_size": self.block_size,
            "blocks": [{"source": str(source), "hit": source in HITS, "count": count} for source, count in self.runs],
            "unhashed_tokens": self.num_tokens - num_hashed,
            "left_cache_at": missed_at,
            "why": self.why,
            "evicted": None
            if self.eviction is None
            else {"ago_s": round(self.evicted_ago_s, 3), "more_blocks": self.eviction.num_more_blocks},
            "note": self._note,
            "prefill_worker": self.prefill,
            "decode_worker": self.decode,
            "duties": {worker_id: str(duty) for worker_id, duty in self.duties.items()},
            "candidates": [
                _candidate(worker_id, prediction)
                for prediction in self.considered
                for worker_id in prediction.worker_ids
            ],
            "predicted_ttft_s": round(self.predicted_ttft_s, 6),
            "uncached_s": round(self.uncached_s, 6),
            "saved_s": round(self.saved_s, 6),
            "objective_ttft_s": _rounded(self.objective_ttft_s),
            "late": self.when_late,
            "actual_ttft_s": _rounded(self.ttft_s),
            "predicted_handover_s": _rounded(self.predicted_handover_s),
            "actual_handover_s": _rounded(self.handover_s),
            "regret_s": _rounded(self.regret_s),
            "preemptions": self.num_preemptions,
            "drafts": {
                str(use.source): {"drafted": use.num_drafted, "accepted": use.num_accepted} for use in self.drafts
            },
            "ended": self.ended,
            "session": None
            if self.session is None
            else {
                "requests": self.session.num_requests,
                "blocks": self.session.num_blocks,
                "pauses": self.session.num_pauses,
                "paused_s": round(self.session.paused_s, 6),
                "branch": _branch(self.session.branch),
            },
        }


@dataclass(slots=True)
class Decisions:
    """The decisions of the last `capacity` requests, by request."""

    capacity: int = 10_000
    _by_request: OrderedDict[str, list[Decision]] = field(default_factory=OrderedDict)
    _named: dict[str, dict[str, None]] = field(default_factory=dict)
    """The requests of each name that clients may ask for, in the order of `_by_request`."""

    def __len__(self) -> int:
        return len(self._by_request)

    def admitted(self, request_id: str, decision: Decision) -> None:
        """Remember a decision; each attempt of a request has one. An attempt that is admitted again, because its worker
        was not there any more, keeps the later one."""
        decisions = self._by_request.setdefault(request_id, [])
        for name in names_of(request_id):
            self._named.setdefault(name, {})[request_id] = None
        # One attempt has one placement that counts: with both, a prediction would be compared with another worker's
        # time.
        if decisions and decisions[-1].attempt == decision.attempt:
            decisions.pop()
        decisions.append(decision)
        # The least recently begun goes, not the least recently touched: the order is that of admissions, and an attempt
        # of an old request does not bring it back to the front.
        if len(self._by_request) > self.capacity:
            self._forget(next(iter(self._by_request)))

    def first_token(self, request_id: str, attempt: int, ttft_s: float) -> Decision | None:
        """Record the time of the first token; returns the decision, None if forgotten."""
        for decision in self._of(request_id, attempt):
            decision.ttft_s = ttft_s
            return decision
        return None

    def ended(self, end: Ended) -> Decision | None:
        """Record the end of an attempt; returns the decision, None if forgotten."""
        for decision in self._of(end.request_id, end.attempt):
            decision.ended, decision.num_preemptions, decision.drafts = end.how, end.num_preemptions, end.drafts
            decision.handover_s = end.handover_s
            return decision
        return None

    def misses(self, tenant: str, since: float) -> list[Miss]:
        """The hits of each of the tenant's prompts since a time (seconds since the epoch) and the reason of its first
        miss, the latest prompt first; of at most as many prompts as the doctor looks at."""
        found: list[Miss] = []
        for request_id, (decision, *_) in reversed(self._by_request.items()):
            # Requests lie in the order of their first admissions.
            if decision.admitted_at < since or len(found) == MOST_PROMPTS:
                break
            # The choices of a request share its prompt, so that the first one tells of it.
            if decision.tenant == tenant and request_id.rpartition("-")[2] in ("0", request_id):
                found.append(decision.miss(names_of(request_id)[1:]))
        return found

    def of(self, name: str, tenant: str | None = None) -> dict[str, list[Decision]]:
        """The decisions of the requests behind a client's `name`: each choice is a request named
        `<name>-<unique>-<index>`, or `<other name>-<name>.<unique>-<index>` where an answer has a name of its own.

        Only a tenant's own, unless `tenant` is None.
        """
        found = {request_id: self._by_request[request_id] for request_id in self._named.get(name, ())}
        return {
            request_id: decisions for request_id, decisions in found.items() if tenant in (None, decisions[0].tenant)
        }

    def check_integrity(self) -> None:
        """Assert that every request is found by its names, and no other one."""
        named = {(name, request_id) for name, ids in self._named.items() for request_id in ids}
        assert named == {(name, each) for each in self._by_request for name in names_of(each)}
        assert all(self._named.values()) and len(self._by_request) <= self.capacity

    def _forget(self, request_id: str) -> None:
        del self._by_request[request_id]
        for name in {*names_of(request_id)}:
            del self._named[name][request_id]
            if not self._named[name]:
                del self._named[name]

    def _of(self, request_id: str, attempt: int) -> Iterator[Decision]:
        return (decision for decision in self._by_request.get(request_id, ()) if decision.attempt == attempt)


def names_of(request_id: str) -> tuple[str, ...]:
    """The names by which clients may ask for a request's decisions."""
    # From the right: a client's own name may have hyphens, the unique part and the index have none.
    name, *rest = request_id.rsplit("-", 2)
    own, dot, _ = rest[0].partition(".") if rest else ("", "", "")
    return (request_id, name, own) if dot else (request_id, name)


def _branch(branch: Branch | None) -> dict[str, object] | None:
    if branch is None:
        return None
    _, name, *_ = names_of(branch.request_id)
    return {"of": name, "blocks": branch.num_blocks}


def runs_of(sources: Iterable[BlockSource]) -> tuple[tuple[BlockSource, int], ...]:
    """Equal sources in a row, counted: long prompts have few changes."""
    return tuple((source, len(list(run))) for source, run in groupby(sources))


def best_considered(placement: Placement) -> tuple[PredictedTimes, ...]:
    """The `MAX_CONSIDERED` best predictions, best first; of equal workers the chosen one first."""
    best: list[PredictedTimes] = []
    room = MAX_CONSIDERED
    for prediction in sorted(placement.considered, key=lambda prediction: prediction.cost_s)[:MAX_CONSIDERED]:
        # The limit counts workers, not predictions: of a thousand idle workers one group would hold them all.
        if room:
            worker_ids = prediction.worker_ids
            if len(worker_ids) > 1:
                worker_ids = nsmallest(room, worker_ids, key=lambda name: (name != placement.prefill, name))
            best.append(PredictedTimes(list(worker_ids), *prediction[1:]))
            room -= len(worker_ids)
    return tuple(best)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _candidate(worker_id: str, prediction: PredictedTimes) -> dict[str, object]:
    return {
        "worker": worker_id,
        "local_blocks": prediction.num_local_blocks,
        "imported_blocks": prediction.num_imported_blocks,
        "wait_s": round(prediction.wait_s, 6),
        "import_s": round(prediction.import_s, 6),
        "compute_s": round(prediction.compute_s, 6),
        "ttft_s": round(prediction.ttft_s, 6),
        "others_s": round(prediction.others_s, 6),
        "room_s": round(prediction.room_s, 6),
        "transfer_s": round(prediction.transfer_s, 6),
        "cost_s": round(prediction.cost_s, 6),
    }
