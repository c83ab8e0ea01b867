"""The attempts of requests under way at one worker, and the ingress replicas that read their events.

The calls of a replica may come in another order than they were sent, and the events of a broken stream are lost. So
each ping of a replica names the attempts that the replica has sent to this worker, and both sides compare:

| the attempt is | seen from the replica |
|---|---|
| here, and named | under way |
| named, and not here | lost, if it stays so (`engine.core.ingress.dispatch.Dispatch.ping_answered`) |
| here, and not named for `ORPHAN_S` | over: the call that ended it came before the submission, or not at all |
"""

from collections.abc import Iterable, Sequence

from engine.core.types import Assignment, Attempt

ORPHAN_S = 2.0
"""An attempt that its replica's pings have not named for so long runs for nobody. Longer than the time between two
pings: a ping may have been sent before the attempt."""


class Attempts:
    """The latest attempt of each request of a worker. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._readers: dict[str, tuple[int, str]] = {}
        """Attempt and ingress replica of each request."""
        self._unnamed_since: dict[Attempt, float] = {}
        """Since when the pings of its replica have not named an attempt."""

    def begin(self, assignments: Iterable[Assignment]) -> list[str]:
        """Note new attempts; returns their replicas. Nobody reads what is computed at idle priority."""
        replicas = []
        for each in assignments:
            known, _ = self._readers.get(each.request_id, (each.attempt, ""))
            if not each.is_idle and each.attempt >= known:
                self._readers[each.request_id] = (each.attempt, each.reply_to)
                replicas.append(each.reply_to)
        return replicas

    def end(self, request_id: str, attempt: int) -> None:
        """An attempt has had its last event."""
        if self._readers.get(request_id, (None, ""))[0] == attempt:
            del self._readers[request_id]

    def forget(self, request_id: str, attempt: int) -> bool:
        """Drop a request, unless a later attempt than `attempt` has begun; returns False then."""
        if self._readers.get(request_id, (0, ""))[0] > attempt:
            return False
        self._readers.pop(request_id, None)
        return True

    def reader(self, request_id: str, attempt: int) -> str | None:
        """The replica that reads the events of an attempt; None if the attempt is over."""
        known, replica = self._readers.get(request_id, (None, ""))
        return replica if known == attempt else None

    @property
    def under_way(self) -> frozenset[Attempt]:
        return frozenset(Attempt(request_id, attempt) for request_id, (attempt, _) in self._readers.items())

    def read_by(self, replica: str) -> list[Attempt]:
        """The attempts of a replica."""
        return [Attempt(request_id, attempt) for request_id, (attempt, by) in self._readers.items() if by == replica]

    def compare(
        self, replica: str, named: Iterable[Attempt], now: float
    ) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
        """Take a ping; returns the `named` attempts that are not here, and the ones here that run for nobody."""
        here, there = dict.fromkeys(self.read_by(replica)), dict.fromkeys(named)
        unnamed = {each: self._unnamed_since.get(each, now) for each in here if each not in there}
        of_others = {each: at for each, at in self._unnamed_since.items() if self.reader(*each) not in (None, replica)}
        self._unnamed_since = of_others | unnamed
        orphans = [each for each, since in unnamed.items() if now - since >= ORPHAN_S]
        return [each for each in there if each not in here], orphans
