"""Shares a limit of running lines among the batches under way."""

from collections import Counter


class Allowance:
    """A limit of `limit` running lines, less the requests of clients, in equal shares."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()
        """Running lines by batch, batches without running lines included."""

    def change(self, limit: int) -> None:
        """Take another limit; lines that run beyond a lower one run to their end."""
        self._limit = limit

    @property
    def num_running(self) -> int:
        """Running lines of all batches."""
        return self._running.total()

    def join(self, batch: str) -> None:
        """Give a batch a share."""
        assert batch not in self._running
        self._running[batch] = 0

    def leave(self, batch: str) -> None:
        """Take the share of a batch without running lines."""
        assert self._running.pop(batch) == 0

    def free(self, batch: str, num_others: int) -> int:
        """Lines with room to begin for a batch: a share of the limit less `num_others` requests of clients. All batches
        together always have room for one line, so no batch waits for ever."""
        left = max(self._limit - num_others, 1)
        share = -(-left // len(self._running))
        return max(min(share - self._running[batch], left - self.num_running), 0)

    def begin(self, batch: str, count: int) -> None:
        """Count lines at the begin."""
        self._running[batch] += count

    def end(self, batch: str) -> None:
        """Count a line less."""
        assert self._running[batch] > 0
        self._running[batch] -= 1
