"""Divides a replica's memory for large answers among the requests for them.

An answer may have up to a million log-probabilities, or thousands of vectors. Their memory is claimed before the answer
is begun, and given back when it has been sent, so that any number of such requests at once needs no more memory than a
few. A claim that does not fit waits; none is refused.

Of what is free, a tenant gets at most as much as stays free for others: one tenant alone fills half of the memory, and
the next one finds room at once.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class RoomClaim:
    """A claim of one answer. `granted` is called once, when there is room."""

    tenant: str
    num_bytes: int
    granted: Callable[[], None]
    is_held: bool = False


class AnswerRoom:
    """A limit of `budget_bytes`. A claim above the limit is granted when it is alone."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held: Counter[str] = Counter()  # bytes granted, by tenant
        # Claims by tenant, each tenant's in the order of their arrival; no tenant without any.
        self._waiting: dict[str, deque[RoomClaim]] = {}

    @property
    def num_bytes(self) -> int:
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        """Claims that are not granted yet."""
        return sum(map(len, self._waiting.values()))

    def limit(self, budget_bytes: int) -> None:
        """Take another limit. What is granted stays."""
        self._budget_bytes = budget_bytes
        self._grant()

    def ask(self, claim: RoomClaim) -> None:
        """Grant the claim now or later, after the earlier ones of its tenant."""
        self._waiting.setdefault(claim.tenant, deque()).append(claim)
        self._grant()

    def leave(self, claim: RoomClaim) -> None:
        """Give back what was granted, or stop waiting."""
        if claim.is_held:
            claim.is_held = False
            self._held[claim.tenant] -= claim.num_bytes
            if not self._held[claim.tenant]:
                del self._held[claim.tenant]
        else:
            self._remove(claim)
        self._grant()

    def _grant(self) -> None:
        """Grant what fits, the claims of those first who hold least. The first claim that waits for memory, and not for
        its tenant's own answers, keeps later ones from taking that memory."""
        while self._waiting:
            # Who holds least comes first, and of those the tenant that began to wait first.
            for tenant in sorted(self._waiting, key=lambda name: self._held[name]):
                claim, free = self._waiting[tenant][0], self._budget_bytes - self.num_bytes
                own = self._held[tenant]
                # A tenant waits for its own answers where it would hold more than it leaves free for others.
                if own and own + claim.num_bytes > free:
                    continue
                # Memory is short for a claim that is next: smaller ones behind it must not take what becomes free.
                if self.num_bytes and claim.num_bytes > free:
                    return
                self._remove(claim)
                self._held[tenant] += claim.num_bytes
                claim.is_held = True
                claim.granted()
                break
            else:
                return

    def _remove(self, claim: RoomClaim) -> None:
        queue = self._waiting[claim.tenant]
        queue.remove(claim)
        if not queue:
            del self._waiting[claim.tenant]

    def check_integrity(self) -> None:
        """Assert that nobody waits while nothing is held, and that more than the limit is held by one claim alone."""
        assert all(count > 0 for count in self._held.values()), "a claim was given back twice"
        assert self.num_bytes or not self._waiting
