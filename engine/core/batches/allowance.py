"""Shares a limit of running lines among the tenants with batches under way, and each share among the batches."""

from collections import Counter


class Allowance:
    """A limit of `limit` running lines, less the requests of clients, in equal shares."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()
        """Running lines by batch, batches without running lines included."""
        self._tenant_of: dict[str, str] = {}

    def change(self, limit: int) -> None:
        """Take another limit; lines that run beyond a lower one run to their end."""
        self._limit = limit

    @property
    def num_running(self) -> int:
        """Running lines of all batches."""
        return self._running.total()

    def join(self, batch: str, tenant: str) -> None:
        """Give a batch a share of its tenant's."""
        assert batch not in self._running
        self._running[batch] = 0
        self._tenant_of[batch] = tenant

    def leave(self, batch: str) -> None:
        """Take the share of a batch without running lines."""
        assert self._running.pop(batch) == 0
        del self._tenant_of[batch]

    def free(self, batch: str, num_others: int) -> int:
        """Lines with room to begin for a batch: a share of the limit less `num_others` requests of clients. All batches
        together always have room for one line, so no batch waits for ever."""
        left = max(self._limit - num_others, 1)
        num_batches = Counter(self._tenant_of.values())
        share = -(-left // len(num_batches))
        share = -(-share // num_batches[self._tenant_of[batch]])
        return max(min(share - self._running[batch], left - self.num_running), 0)

    def begin(self, batch: str, count: int) -> None:
        """Count lines at the begin."""
        self._running[batch] += count

    def end(self, batch: str) -> None:
        """Count a line less."""
        assert self._running[batch] > 0
        self._running[batch] -= 1
