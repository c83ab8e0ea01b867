"""Requests that no worker could take, until each is admitted again."""

from dataclasses import dataclass, field
from typing import NamedTuple


class _Retry(NamedTuple):
    priority: int
    at: float


@dataclass(slots=True)
class Retries:
    """Times at which requests are admitted again, the longest waiting first. No request waits while a request with a
    higher `priority` number is admitted."""

    _retries: dict[str, _Retry] = field(default_factory=dict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._retries

    @property
    def names(self) -> list[str]:
        """The waiting requests."""
        return list(self._retries)

    @property
    def next_at(self) -> float | None:
        """When the next is due; None if there is none."""
        return min([retry.at for retry in self._retries.values()], default=None)

    def add(self, request_id: str, priority: int, at: float) -> None:
        """Have a request wait until a time."""
        self._retries[request_id] = _Retry(priority, at)

    def drop(self, request_id: str) -> None:
        """Forget a request, if it waits."""
        self._retries.pop(request_id, None)

    def due(self, now: float) -> list[str]:
        """Return the requests whose time has come, and all that go before one of these, in their order."""
        last = max([retry.priority for retry in self._retries.values() if retry.at <= now], default=None)
        if last is None:
            return []
        due = [name for name, retry in self._retries.items() if retry.at <= now or retry.priority < last]
        return sorted(due, key=lambda name: self._retries[name].priority)
