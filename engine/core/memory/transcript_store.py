"""Token ids of answers that clients may name. Holds ids, never text, and may forget any entry."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from raydix.engine.core.shares import Shares
from raydix.engine.core.tenants import ANONYMOUS

ENTRY_BYTES = 256  # bytes of an entry beside its ids: key, array and place in the dictionary, some 210 bytes in CPython


class TranscriptStore:
    """Token ids of answers by name. When `budget_bytes` are exceeded, the tenant furthest above its share loses its
    least recently used entry."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._tenant_of: dict[bytes, str] = {}
        # Token ids by tenant and name; of each tenant the least recently used first.
        self._token_ids: dict[str, OrderedDict[bytes, array[int]]] = {}
        self._shares = Shares()  # memory of the entries by tenant

    def __len__(self) -> int:
        return len(self._tenant_of)

    @property
    def num_bytes(self) -> int:
        """Memory of all entries."""
        return self._shares.total

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Share by other weights of tenants, from the next entry on."""
        self._shares.weigh(weights)

    def keep(self, name: bytes, token_ids: "array[int]", tenant: str = ANONYMOUS.name) -> bool:
        """Keep ids under a new name; False if there is no room for them in the tenant's share."""
        assert name not in self._tenant_of, "a name stands for the same ids for ever"
        cost = _cost(token_ids)
        if cost > self._budget_bytes:
            return False
        self._tenant_of[name] = tenant
        self._token_ids.setdefault(tenant, OrderedDict())[name] = token_ids
        self._shares.add(tenant, cost)
        # The new entry itself may be what goes, where its tenant is the one furthest above its share.
        while self.num_bytes > self._budget_bytes:
            self._drop_oldest(self._shares.first_to_give())
        return name in self._tenant_of

    def find(self, name: bytes) -> "array[int] | None":
        """The ids under a name."""
        tenant = self._tenant_of.get(name)
        if tenant is None:
            return None
        self._token_ids[tenant].move_to_end(name)
        return self._token_ids[tenant][name]

    def entries(self) -> "list[tuple[bytes, array[int], str]]":
        """All names with their ids and tenants, of each tenant the least recently used first."""
        return [(name, ids, tenant) for tenant, own in self._token_ids.items() for name, ids in own.items()]

    def restore(self, entries: "Iterable[tuple[bytes, array[int], str]]") -> None:
        """Take over the entries of an earlier store, as `entries` gives them."""
        for name, token_ids, tenant in entries:
            if name not in self._tenant_of:
                self.keep(name, token_ids, tenant)

    def clear(self) -> None:
        """Forget everything."""
        self._tenant_of.clear()
        self._token_ids.clear()
        self._shares.clear()

    def check_integrity(self) -> None:
        """Assert that the memory is the entries' and within the budget, and that each entry is its tenant's."""
        assert self._tenant_of == {name: tenant for name, _, tenant in self.entries()}
        for tenant, own in self._token_ids.items():
            assert own and self._shares.used(tenant) == sum(map(_cost, own.values()))
        assert self.num_bytes <= self._budget_bytes

    def _drop_oldest(self, tenant: str) -> None:
        own = self._token_ids[tenant]
        name, token_ids = own.popitem(last=False)
        if not own:
            del self._token_ids[tenant]
        del self._tenant_of[name]
        self._shares.add(tenant, -_cost(token_ids))


def _cost(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + len(token_ids) * token_ids.itemsize
