"""Costs of fetching KV from one node to a worker on another, or on the same one, learnt from imports.

    import over a link = import_s + bytes * import_byte_s

A link leads from the node whose object store holds a segment to the node of the importing worker. Workers report each
import; the fit of a link begins with the importing worker's own costs, which are those of all its imports together, and
goes back to them when nothing is reported for minutes: a link that was slow is tried again. A link never seen has no
costs of its own.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from raydix.engine.core.costs import KEPT, LinearFit, WorkerCosts

# Remembered links, those of all pairs of 256 nodes, in 1.3 KiB each; the one without reports for longest is forgotten
# first.
MAX_LINKS = 1 << 16
FADE_S = 5.0  # shortest time after which the old observations of a link are weakened
FADES_PER_S = 2.0  # `KEPT` is left of an observation after each half second, as of the imports of `CostFit`


Sources: TypeAlias = Sequence[tuple[str, int]]
"""The nodes that a prompt's leading blocks come from, in order, as runs: node and number of blocks."""


class LinkFit(LinearFit):
    """Fit of one link, with a short memory: a link becomes slow or fast from one moment to the next."""

    DECAY = 0.9


class LinkCosts(NamedTuple):
    """Seconds of an import, and of each of its bytes."""

    import_s: float
    import_byte_s: float


@dataclass(slots=True)
class _Link:
    """The fit of one link, and the outcome at `fitted_at`."""

    fit: LinkFit
    costs: LinkCosts
    fitted_at: float

    def fade(self, now: float) -> None:
        """Have what was observed before `fitted_at` count less."""
        self.fit.fade(KEPT ** (FADES_PER_S * (now - self.fitted_at)))

    def solve(self, now: float) -> None:
        """Compute the costs from what was observed."""
        self.costs, self.fitted_at = LinkCosts(*self.fit.solve(forgets=True)), now


class Links:
    """The costs of each link. `now`, of all methods: seconds on any clock that goes on."""

    def __init__(self, capacity: int = MAX_LINKS) -> None:
        self._capacity = capacity
        self._links: OrderedDict[tuple[str, str], _Link] = OrderedDict()
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._links)

    def look(self, now: float) -> None:
        """Have `costs` answer as of now."""
        self._now = max(now, self._now)

    def imported(self, source: str, target: str, num_bytes: int, seconds: float, prior: WorkerCosts) -> None:
        """Observe an import. `prior`: assumed costs of the importing worker, with which a new link begins."""
        key = source, target
        link = self._links.get(key)
        if link is None:
            costs = LinkCosts(prior.import_s, prior.import_byte_s)
            # A new link begins with what all imports of its worker take together.
            link = self._links[key] = _Link(LinkFit((1.0, float(1 << 22)), costs), costs, self._now)
        # What was observed long ago counts less than what is observed now.
        link.fade(self._now)
        link.fit.add((1.0, num_bytes), seconds)
        link.solve(self._now)
        self._links.move_to_end(key)
        if len(self._links) > self._capacity:
            self._links.popitem(last=False)

    def costs(self, source: str, target: str) -> LinkCosts | None:
        """The costs of a link as of the last `look`; None if never seen."""
        link = self._links.get((source, target))
        if link is None:
            return None
        # Fading at each question would solve the fit anew for each candidate of a placement.
        if self._now - link.fitted_at >= FADE_S:
            link.fade(self._now)
            link.solve(self._now)
        return link.costs

    def import_s(self, source: str, target: str, num_bytes: int, prior: WorkerCosts) -> float:
        """Fetching `num_bytes` from `source` to a worker on `target`, of which `prior` are the assumed costs."""
        costs = self.costs(source, target)
        return prior.import_all_s(num_bytes) if costs is None else costs.import_s + num_bytes * costs.import_byte_s

    def known(self) -> dict[tuple[str, str], LinkCosts]:
        """The costs of each link by source and target, the last reported one last."""
        return {key: link.costs for key, link in self._links.items()}
