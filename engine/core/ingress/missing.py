"""Attempts that the workers of one ingress replica do not have, by the workers' own answers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.types import Attempt

MISSING_S = 0.5
"""An attempt that is missing in two answers to pings this far apart is lost. The first answer may have overtaken the
attempt's last events; answers that a link held up arrive together, and say nothing by their number."""


@dataclass(slots=True)
class Missing:
    """Attempts that a worker was sent, and did not have when it answered last. Times in monotonic seconds."""

    _since: dict[str, dict[Attempt, float]] = field(default_factory=dict)
    """By worker: since which answer each attempt is missing."""

    def answered(self, worker_id: str, unknown: Iterable[Attempt], now: float) -> list[Attempt]:
        """Take a worker's answer to a ping, with the attempts that are not there; returns the ones that are lost."""
        before = self._since.pop(worker_id, {})
        since = {attempt: before.get(attempt, now) for attempt in unknown}
        if since:
            self._since[worker_id] = since
        return [attempt for attempt, missing_since in since.items() if now - missing_since >= MISSING_S]

    def forget(self, worker_id: str) -> None:
        """A worker is followed no longer."""
        self._since.pop(worker_id, None)
