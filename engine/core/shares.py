"""Shares of something that tenants use together: memory, places in a queue, running batches.

A tenant may use what the others do not need, and is the first to give back above its share. A share is measured by the
use per weight (`tenants.weight`), so that tenants who want more than there is get parts in the ratio of their weights,
and what one leaves goes to the others.
"""

from collections.abc import Iterable, Mapping

from raydix.engine.core.tenants import Tenant


class Shares:
    """Use by tenant, in any unit. Holds tenants with a use only."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: other ones than 1, by tenant."""
        self._weights = dict(weights or {})
        self._used: dict[str, int] = {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Take other weights, from the next question on."""
        self._weights = dict(weights)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    @property
    def total(self) -> int:
        """Use by all tenants."""
        return sum(self._used.values())

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def add(self, tenant: str, amount: int) -> None:
        """Count a use; a negative amount is given back."""
        left = self.used(tenant) + amount
        assert left >= 0, "more is given back than was taken"
        if left:
            self._used[tenant] = left
        else:
            self._used.pop(tenant, None)

    def clear(self) -> None:
        """Count no use any more."""
        self._used.clear()

    def first_to_give(self) -> str:
        """The tenant with the most use per weight, which gives back first where something that can be taken away is
        short."""
        # The name decides ties, so that a run repeats itself.
        return max(self._used, key=lambda tenant: (self._used[tenant] / self.weight(tenant), tenant))

    def left(self, tenant: str, size: int) -> int:
        """Number of `size` places that a tenant may still take at once, by the rule of `may_take`."""
        free, used = size - self.total, self.used(tenant)
        # After taking n of them: used + n <= free - n. The first ones may take all that is free.
        return max(0, free if used == 0 else (free - used) // 2)

    def may_take(self, tenant: str, count: int, size: int) -> bool:
        """True if a tenant may take `count` more of `size` places, each of which it keeps as long as it likes.

        Nobody can be made to give a place back, so some stay free for tenants that come later: a tenant may hold as
        many as it leaves free (Choudhury and Hahne, "Dynamic queue length thresholds", 1998). Alone a tenant gets half
        of the places, two get a third each. The first ones of a tenant are let in while there are so many. Weights do
        not matter here.
        """
        return count <= self.left(tenant, size)


def weights_of(tenants: Iterable[Tenant]) -> dict[str, float]:
    """The weights other than 1, by tenant."""
    return {tenant.name: tenant.weight for tenant in tenants if tenant.weight != 1}
