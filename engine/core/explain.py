"""What the manager remembers of its decisions: why a request went where it went, what it hit, and what came of it.

Bounded: the oldest requests are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nsmallest
from itertools import groupby

from engine.core.placement import Placement, Prediction

MAX_CONSIDERED = 16
"""Workers kept per decision, the best ones."""


class BlockSource(StrEnum):
    """Where a full block of a prompt came from, or why it had to be computed."""

    LOCAL = "local"
    """In the prefill worker's own pool."""
    WORKER = "worker"
    """In another worker's pool."""
    STORE = "store"
    """In the object store."""
    DISK = "disk"
    PENDING = "pending"
    """Being computed for another request; waited for."""
    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    """It was here, and made room for others."""
    DIVERGED = "diverged"
    """The blocks before it are known, with another continuation."""
    RECOMPUTED = "recomputed"
    """It is somewhere, but computing it again was predicted to be faster."""


HITS = frozenset({BlockSource.LOCAL, BlockSource.WORKER, BlockSource.STORE, BlockSource.DISK, BlockSource.PENDING})


@dataclass(slots=True)
class Decision:
    """One admission: what was known when it was decided, and afterwards what happened."""

    attempt: int
    tenant: str
    num_tokens: int
    block_size: int
    runs: tuple[tuple[BlockSource, int], ...]
    """Of the prompt's full blocks, in order: how many in a row came from where."""
    prefill: str
    decode: str
    predicted_ttft_s: float
    considered: tuple[Prediction, ...]
    ttft_s: float | None = None
    """From admission to the first token."""
    ended: str | None = None
    num_preemptions: int = 0

    @property
    def regret_s(self) -> float | None:
        """How much later the first token came than the best other candidate was predicted to give it; 0 if there is
        none, or it was not later. None before the first token."""
        if self.ttft_s is None:
            return None
        others = (each.ttft_s for each in self.considered if any(name != self.prefill for name in each.worker_ids))
        return max(0.0, self.ttft_s - min(others, default=self.ttft_s))

    def as_json(self) -> dict[str, object]:
        """For the explain endpoint. Times in seconds, blocks as runs of equal sources."""
        num_hashed = sum(count for _, count in self.runs) * self.block_size
        return {
            "attempt": self.attempt,
            "prompt_tokens": self.num_tokens,
            "block_size": self.block_size,
            "blocks": [{"source": str(source), "hit": source in HITS, "count": count} for source, count in self.runs],
            "unhashed_tokens": self.num_tokens - num_hashed,
            "note": "shorter than a block: nothing to share" if not self.runs else None,
            "prefill_worker": self.prefill,
            "decode_worker": self.decode,
            "candidates": [
                _candidate(worker_id, prediction)
                for prediction in self.considered
                for worker_id in prediction.worker_ids
            ],
            "predicted_ttft_s": round(self.predicted_ttft_s, 6),
            "actual_ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "regret_s": None if self.regret_s is None else round(self.regret_s, 6),
            "preemptions": self.num_preemptions,
            "ended": self.ended,
        }


@dataclass(slots=True)
class Decisions:
    """The decisions of the last `capacity` requests, by request."""

    capacity: int = 10_000
    _by_request: OrderedDict[str, list[Decision]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_request)

    def admitted(self, request_id: str, decision: Decision) -> None:
        """Remember a decision; a request that is admitted again has several."""
        self._by_request.setdefault(request_id, []).append(decision)
        if len(self._by_request) > self.capacity:
            self._by_request.popitem(last=False)

    def first_token(self, request_id: str, attempt: int, ttft_s: float) -> Decision | None:
        """What the prediction was of; None if it is forgotten."""
        for decision in self._of(request_id, attempt):
            decision.ttft_s = ttft_s
            return decision
        return None

    def ended(self, request_id: str, attempt: int, how: str, num_preemptions: int) -> None:
        for decision in self._of(request_id, attempt):
            decision.ended, decision.num_preemptions = how, num_preemptions

    def of(self, name: str, tenant: str | None = None) -> dict[str, list[Decision]]:
        """The decisions of the requests that belong to what a client knows as `name`: each of its choices is a request
        named `<name>-<unique>-<index>`. Only a tenant's own, unless `tenant` is None."""
        return {
            request_id: decisions
            for request_id, decisions in self._by_request.items()
            if name in (request_id, request_id.rsplit("-", 2)[0]) and tenant in (None, decisions[0].tenant)
        }

    def _of(self, request_id: str, attempt: int) -> Iterator[Decision]:
        return (decision for decision in self._by_request.get(request_id, ()) if decision.attempt == attempt)


def runs_of(sources: Iterable[BlockSource]) -> tuple[tuple[BlockSource, int], ...]:
    """Equal sources in a row, counted: long prompts have few changes."""
    return tuple((source, len(list(run))) for source, run in groupby(sources))


def best_considered(placement: Placement) -> tuple[Prediction, ...]:
    """The predictions worth remembering, best first, and of alike workers as many as are worth it."""
    best: list[Prediction] = []
    room = MAX_CONSIDERED
    for prediction in sorted(placement.considered, key=lambda prediction: prediction.ttft_s)[:MAX_CONSIDERED]:
        if room:
            worker_ids = prediction.worker_ids
            if len(worker_ids) > 1:
                worker_ids = nsmallest(room, worker_ids, key=lambda name: (name != placement.prefill, name))
            best.append(prediction._replace(worker_ids=list(worker_ids)))
            room -= len(worker_ids)
    return tuple(best)


def _candidate(worker_id: str, prediction: Prediction) -> dict[str, object]:
    return {
        "worker": worker_id,
        "local_blocks": prediction.num_local_blocks,
        "imported_blocks": prediction.num_imported_blocks,
        "wait_s": round(prediction.wait_s, 6),
        "import_s": round(prediction.import_s, 6),
        "compute_s": round(prediction.compute_s, 6),
        "ttft_s": round(prediction.ttft_s, 6),
    }
