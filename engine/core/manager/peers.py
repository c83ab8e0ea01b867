"""Assumed costs of each worker, from its own fit and the fits of its peers.

Peers are workers of one role, token budget and device. Their fits differ by chance, and a worker without requests
measures nothing to correct its fit with.

| a worker that | has the costs |
|---|---|
| is no further from the peers' median than their spread | of the median, so that only held blocks and load decide |
| has measured nothing yet | of the median |
| computes no step | of its fit, fading towards the median with each report |
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median_low

from raydix.engine.core.costs import WorkerCosts

# Share of the way to the peers' median that unused costs go with each report; with two a second, half in 17 s.
FADE = 0.02
# Compared figures: a step with so many prompt tokens, one with so many decodes, an import of so many bytes.
PREFILL_TOKENS = 256
DECODES = 8
IMPORT_BYTES = 1 << 22
NAMES = tuple(each.name for each in fields(WorkerCosts))


@dataclass(slots=True)
class _Group:
    """Workers that are peers, and their costs."""

    own: dict[str, WorkerCosts | None] = field(default_factory=dict)
    """Last report of each worker, faded if unused; None before the first measurement."""
    median: WorkerCosts | None = None
    num_reports: int = 0
    """Reports since the last update of the median."""


class PeerCosts:
    """The costs for placement. `prior`: costs while no peer has measured anything."""

    def __init__(self, prior: WorkerCosts) -> None:
        self.prior = prior
        self._groups: dict[Hashable, _Group] = {}
        self._group_of: dict[str, _Group] = {}

    def add(self, worker_id: str, kind: Hashable) -> None:
        """Add a worker; workers of one `kind` are peers."""
        self.remove(worker_id)
        group = self._group_of[worker_id] = self._groups.setdefault(kind, _Group())
        group.own[worker_id] = None

    def remove(self, worker_id: str) -> None:
        """Remove a worker; an unknown one is no error."""
        group = self._group_of.pop(worker_id, None)
        if group is not None:
            del group.own[worker_id]

    def report(self, worker_id: str, costs: WorkerCosts, *, has_stepped: bool) -> Sequence[str]:
        """Take a worker's costs, and whether a step has been fitted since its last report; returns the workers whose
        assumed costs may have changed.

        The median is updated once in as many reports as there are peers, so that the cost of a report does not grow
        with their number.
        """
        group = self._group_of[worker_id]
        known = group.own[worker_id]
        # Costs that no step has changed fade: the peers know better what a step takes now.
        if known is None or has_stepped:
            group.own[worker_id] = costs
        elif group.median is not None:
            group.own[worker_id] = _between(known, group.median, FADE)
        group.num_reports += 1
        # The median of all is made once in a round of reports.
        if group.median is not None and group.num_reports < len(group.own):
            return [worker_id]
        group.num_reports = 0
        group.median = _median([own for own in group.own.values() if own is not None])
        return list(group.own)

    def costs_of(self, worker_id: str) -> WorkerCosts:
        """The assumed costs of a worker's steps and imports."""
        group = self._group_of[worker_id]
        own, common = group.own[worker_id], group.median
        if own is None or common is None:
            return own or common or self.prior
        # Each fit may be wrong by its spread, so a difference within both says nothing.
        margin = own.spread + common.spread
        if not _is_near(_typical_steps(own), _typical_steps(common), margin):
            return own
        if _is_near([own.import_all_s(IMPORT_BYTES)], [common.import_all_s(IMPORT_BYTES)], margin):
            return common
        # Steps are as the peers', imports are not: the worker is on another link.
        return replace(common, import_s=own.import_s, import_byte_s=own.import_byte_s)


def _typical_steps(costs: WorkerCosts) -> list[float]:
    return [costs.step_s + PREFILL_TOKENS * costs.prefill_token_s, costs.decode_step_s(DECODES)]


def _is_near(some: Sequence[float], others: Sequence[float], margin: float) -> bool:
    return all(abs(one - other) <= margin * other for one, other in zip(some, others, strict=True))


def _between(costs: WorkerCosts, other: WorkerCosts, share: float) -> WorkerCosts:
    """`share` of the way from `costs` to `other`."""
    values = [getattr(costs, name) + share * (getattr(other, name) - getattr(costs, name)) for name in NAMES]
    return WorkerCosts(*values)


def _median(costs: Sequence[WorkerCosts]) -> WorkerCosts:
    """The median of each coefficient, the lower one of two."""
    return WorkerCosts(*(median_low(getattr(each, name) for each in costs) for name in NAMES))
