"""The attempts of requests under way at one worker, and the ingress replicas that read their events.

The calls of a replica may come in another order than they were sent, and the events of a broken stream are lost. So
each ping of a replica names its attempts at this worker, and both sides compare:

| the attempt is | and so |
|---|---|
| here, and named | under way |
| named as taken on by this worker, and not here | over; the token stream says so, behind the last event |
| here, and not named for `ORPHAN_S` | an orphan: the call that ended it came before the submission, or not at all |

A replica that still waits for an attempt which the stream calls over has lost events.
"""

from collections.abc import Iterable, Sequence

from raydix.engine.core.types import Assignment, AttemptName

# Time without its name in its replica's pings after which an attempt runs for nobody. Longer than the time between two
# pings: a ping may have been sent before the attempt.
ORPHAN_S = 2.0


class Attempts:
    """The latest attempt of each request of a worker. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._readers: dict[str, tuple[int, str]] = {}  # attempt and ingress replica of each request
        # Time since which the pings of its replica have not named an attempt.
        self._unnamed_since: dict[AttemptName, float] = {}

    def begin(self, assignments: Iterable[Assignment]) -> set[str]:
        """Note new attempts; returns their replicas. Nobody reads what is computed at idle priority."""
        replicas = set()
        for each in assignments:
            # Without a known attempt the new one counts as the latest.
            known, _ = self._readers.get(each.request_id, (each.attempt, ""))
            if not each.is_idle and each.attempt >= known:
                self._readers[each.request_id] = (each.attempt, each.reply_to)
                replicas.add(each.reply_to)
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
    def under_way(self) -> frozenset[AttemptName]:
        return frozenset(AttemptName(request_id, attempt) for request_id, (attempt, _) in self._readers.items())

    def read_by(self, replica: str) -> list[AttemptName]:
        return [
            AttemptName(request_id, attempt) for request_id, (attempt, by) in self._readers.items() if by == replica
        ]

    def compare(
        self, replica: str, taken: Sequence[AttemptName], sent: Iterable[AttemptName], now: float
    ) -> tuple[Sequence[AttemptName], Sequence[AttemptName]]:
        """Take a ping; returns the ones of `taken` that are not here, and the orphans. `taken`: attempts known to the
        replica as taken on by this worker; `sent`: others on their way."""
        here, named = dict.fromkeys(self.read_by(replica)), {*taken, *sent}
        # A name takes an attempt off the list; an attempt that is over is not kept there either.
        unnamed = {each: self._unnamed_since.get(each, now) for each in here if each not in named}
        of_others = {each: at for each, at in self._unnamed_since.items() if self.reader(*each) not in (None, replica)}
        self._unnamed_since = of_others | unnamed
        orphans = [each for each, since in unnamed.items() if now - since >= ORPHAN_S]
        return [each for each in taken if each not in here], orphans

    def stood_still(self, late_s: float) -> None:
        """Count the time since pings anew where this process was stopped and received none."""
        if late_s:
            self._unnamed_since.clear()
