"""Token ids of answers that clients may name. Holds ids, never text, and may forget any entry."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

ENTRY_BYTES = 256
"""Bytes of an entry beside its ids: key, array and place in the dictionary, some 210 bytes in CPython."""


class TranscriptStore:
    """Token ids of answers by name; the least recently used go first when `budget_bytes` are exceeded."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._token_ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self.num_bytes = 0
        """Memory of all entries."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def keep(self, name: bytes, token_ids: "array[int]") -> bool:
        """Keep ids under a new name; False if the ids exceed the budget."""
        assert name not in self._token_ids, "a name stands for the same ids for ever"
        cost = _cost(token_ids)
        if cost > self._budget_bytes:
            return False
        self._token_ids[name] = token_ids
        self.num_bytes += cost
        while self.num_bytes > self._budget_bytes:
            self.num_bytes -= _cost(self._token_ids.popitem(last=False)[1])
        return True

    def find(self, name: bytes) -> "array[int] | None":
        """The ids under a name."""
        token_ids = self._token_ids.get(name)
        if token_ids is not None:
            self._token_ids.move_to_end(name)
        return token_ids

    def entries(self) -> "list[tuple[bytes, array[int]]]":
        """All names with their ids, the least recently used first."""
        return list(self._token_ids.items())

    def restore(self, entries: "Iterable[tuple[bytes, array[int]]]") -> None:
        """Take over the entries of an earlier store, the least recently used first."""
        for name, token_ids in entries:
            if name not in self._token_ids:
                self.keep(name, token_ids)

    def clear(self) -> None:
        """Forget everything."""
        self._token_ids.clear()
        self.num_bytes = 0

    def check_integrity(self) -> None:
        """Assert that the memory is the entries' and within the budget."""
        assert self.num_bytes == sum(map(_cost, self._token_ids.values()))
        assert self.num_bytes <= self._budget_bytes


def _cost(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + len(token_ids) * token_ids.itemsize
