"""Stored responses: bytes under names, each of which may go on from an earlier one. Of the bytes only the beginning is
read: data that begins with `UNDER_WAY` is of a response that somebody still generates.

A response and the responses before it are used together. When room is short, the tenant furthest above its share
(`raydix.engine.core.shares`) loses its least recently used response; of responses used together, the last of the
conversation goes first. So every response that an entry goes on from is kept as long as the entry, unless a client
deletes it.

A response under way has a runner, who renews its claim. After `CLAIM_S` without a renewal the response is given to the
next who asks, so that it is generated after the death of its first runner. Two runners may work on one response: the
first to replace the data ends it, and the other finds other data than its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raydix.engine.core.shares import Shares
from raydix.engine.core.tenants import ANONYMOUS

# Bytes of an entry beside its data: names, times and place in the dictionary, some 350 bytes in CPython.
ENTRY_BYTES = 400
UNDER_WAY = b"~"  # begins the data of a response that is being generated
# Seconds without a renewal after which the runner of a response counts as dead, as an ingress replica does.
CLAIM_S = 10.0
MOST_GIVEN = 8  # abandoned responses that are given to one runner at a time


class Abandoned(NamedTuple):
    """A response under way whose runner is gone."""

    name: bytes
    data: bytes
    tenant: str


class KeptEntry(NamedTuple):
    """A response as another store takes it over."""

    name: bytes
    parent: bytes | None
    data: bytes
    used_at: float
    tenant: str = ANONYMOUS.name


@dataclass(slots=True)
class _Entry:
    parent: bytes | None
    data: bytes
    used_at: float
    tenant: str

    @property
    def cost(self) -> int:
        return ENTRY_BYTES + len(self.data)


class ResponseStore:
    """Responses within a budget. `now`, of all methods: seconds of one clock that never goes back."""

    def __init__(self, budget_bytes: int, ttl_s: float, dropped: Callable[[bytes], None] = lambda name: None) -> None:
        """`ttl_s`: a response that was not used for so long is forgotten. `dropped` gets the name of each response that
        is forgotten or deleted."""
        self._budget_bytes = budget_bytes
        self._dropped = dropped
        self._ttl_s = ttl_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._order: dict[str, OrderedDict[bytes, None]] = {}  # the names of each tenant's entries, in the same order
        self._shares = Shares()  # memory of the entries by tenant
        self._renewed_at: dict[bytes, float] = {}  # last renewal of each response under way

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    @property
    def num_bytes(self) -> int:
        """Memory of all entries."""
        return self._shares.total

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Share by other weights of tenants, from the next response on."""
        self._shares.weigh(weights)

    def keep(self, name: bytes, parent: bytes | None, data: bytes, now: float, tenant: str = ANONYMOUS.name) -> bool:
        """Keep a response under a new name; False if there is no room for it in the tenant's share, or the parent is
        gone.

        A name stands for one response for ever: the end of a stream that was resumed may keep the response again, and
        then the first one stays.
        """
        self.forget_expired(now)
        if name in self._entries:
            self._use(name, now)
            return True

        cost = ENTRY_BYTES + len(data)
        # A response that is larger than all of the room, or without those before it, is of no use.
        if cost > self._budget_bytes or (parent is not None and parent not in self._entries):
            return False

        self._add(name, _Entry(parent, data, now, tenant), now)
        self._use(name, now)
        self._make_room()
        return name in self._entries

    def replace(self, name: bytes, beginning: bytes, data: bytes, now: float) -> KeptEntry | None:
        """Put other data in the place of data with this beginning, and return the entry; None where the data begins
        otherwise, since somebody else has replaced it, where the name is unknown, or where there is no room in the
        tenant's share."""
        self.forget_expired(now)
        entry = self._entries.get(name)
        if entry is None or not entry.data.startswith(beginning) or ENTRY_BYTES + len(data) > self._budget_bytes:
            return None
        self._shares.add(entry.tenant, len(data) - len(entry.data))
        entry.data = data
        self._note_runner(name, entry, now)
        self._use(name, now)
        self._make_room()
        return (
            KeptEntry(name=name, parent=entry.parent, data=data, used_at=now, tenant=entry.tenant)
            if name in self._entries
            else None
        )

    def renew(self, claims: Iterable[tuple[bytes, bytes]], now: float) -> list[bool]:
        """Renew claims, each a name and the beginning of the data that its runner knows; False for each that has ended:
        the response is forgotten, or has other data."""
        return [self._is_renewed(name, beginning, now) for name, beginning in claims]

    def abandoned(self, now: float) -> list[Abandoned]:
        """Responses under way whose runners are gone, which are the caller's from now on."""
        # A few at a time: a replica that asks first shall not get all of a dead one's work.
        names = [name for name, renewed_at in self._renewed_at.items() if now >= renewed_at + CLAIM_S][:MOST_GIVEN]
        for name in names:
            self._renewed_at[name] = now
        return [Abandoned(name, self._entries[name].data, self._entries[name].tenant) for name in names]

    def entries(self) -> list[KeptEntry]:
        """All responses as `restore` takes them."""
        return [
            KeptEntry(name=name, parent=entry.parent, data=entry.data, used_at=entry.used_at, tenant=entry.tenant)
            for name, entry in self._entries.items()
        ]

    def restore(self, entries: Iterable[KeptEntry], now: float) -> None:
        """Take over the responses of an earlier store, the least recently used first. They count as used before the
        responses that are here already."""
        # Built anew from the oldest on, as insertions are at the end alone.
        newer, self._entries, self._order = self._entries, OrderedDict(), {}
        self._shares.clear()
        self._renewed_at.clear()
        # The order is that of use, so no restored response may seem younger than those that are here.
        latest = min([entry.used_at for entry in newer.values()], default=now)
        for name, parent, data, used_at, tenant in entries:
            if name not in newer:
                self._add(name, _Entry(parent, data, min(used_at, latest), tenant), now)
                self._use(name, min(used_at, latest))
        for name, entry in newer.items():
            self._add(name, entry, now)
            self._use(name, entry.used_at)
        self._make_room()
        self.forget_expired(now)

    def find(self, name: bytes, now: float, *, with_earlier: bool = False) -> list[bytes]:
        """The data of a response, if `with_earlier` behind the data of the known ones before it, the first one first;
        nothing for an unknown name."""
        self.forget_expired(now)
        self._use(name, now)
        path = self.path(name)
        return [self._entries[each].data for each in reversed(path if with_earlier else path[:1])]

    def delete(self, name: bytes) -> bool:
        """Forget a response; False for an unknown name. Responses that go on from it stay, and cannot be gone on
        from."""
        if name not in self._entries:
            return False
        self._drop(name)
        return True

    def check_integrity(self) -> None:
        """Assert that the memory is the entries' and within the budget, and that the order is that of use."""
        assert self.num_bytes == sum(entry.cost for entry in self._entries.values()) <= self._budget_bytes
        for tenant, order in self._order.items():
            assert list(order) == [name for name, entry in self._entries.items() if entry.tenant == tenant]
            assert self._shares.used(tenant) == sum(self._entries[name].cost for name in order)
        assert sum(map(len, self._order.values())) == len(self._entries)
        under_way = [name for name, entry in self._entries.items() if entry.data.startswith(UNDER_WAY)]
        assert set(self._renewed_at) == set(under_way)
        times = [entry.used_at for entry in self._entries.values()]
        assert times == sorted(times)

    def forget_expired(self, now: float) -> None:
        """Forget what nobody has used for the time to live."""
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if now < entry.used_at + self._ttl_s:
                return
            self._drop(name)

    def path(self, name: bytes) -> list[bytes]:
        """A response and the known ones before it, the last one first. The path ends where a response would come a
        second time, as in files made by hand."""
        path: dict[bytes, None] = {}
        at: bytes | None = name
        while at is not None and at in self._entries and at not in path:
            path[at] = None
            at = self._entries[at].parent
        return list(path)

    def _use(self, name: bytes, now: float) -> None:
        for each in self.path(name):
            self._entries[each].used_at = now
            self._entries.move_to_end(each)
            self._order[self._entries[each].tenant].move_to_end(each)

    def _make_room(self) -> None:
        while self.num_bytes > self._budget_bytes:
            self._drop(next(iter(self._order[self._shares.first_to_give()])))

    def _is_renewed(self, name: bytes, beginning: bytes, now: float) -> bool:
        if name not in self._renewed_at or not self._entries[name].data.startswith(beginning):
            return False
        self._renewed_at[name] = now
        self._use(name, now)  # what is being generated is not forgotten for being old
        return True

    def _note_runner(self, name: bytes, entry: _Entry, now: float) -> None:
        """Give the runner of a new response its time; a response that has ended has no runner."""
        if entry.data.startswith(UNDER_WAY):
            self._renewed_at[name] = now
        else:
            self._renewed_at.pop(name, None)

    def _add(self, name: bytes, entry: _Entry, now: float) -> None:
        self._entries[name] = entry
        self._note_runner(name, entry, now)
        self._order.setdefault(entry.tenant, OrderedDict())[name] = None
        self._shares.add(entry.tenant, entry.cost)

    def _drop(self, name: bytes) -> None:
        entry = self._entries.pop(name)
        self._renewed_at.pop(name, None)
        order = self._order[entry.tenant]
        del order[name]
        if not order:
            del self._order[entry.tenant]
        self._shares.add(entry.tenant, -entry.cost)
        self._dropped(name)
