"""Turns of sessions: which of them may run while not all of them fit into the workers' pools.

Sessions that run on too few blocks evict each other's KV. Then requests compute their whole prompts again, queues grow,
and what is cached is evicted before its turn comes: no order of eviction helps. So a session has a *place*: its blocks,
on one worker. While the sum of the places fits, every session gets one at once. Otherwise

| a session | |
|---|---|
| asks, and has a place | goes on at once: its prompt is cached |
| asks without a place | pauses until it is the next one and a worker would be idle without it, or for `quantum_s` |
| asks, and has had its place for `quantum_s` while another session paused for as long | pauses, behind the others |

After its pause a session takes the places of those that have been idle longest, at least for `PATIENCE_S`. So prompts
that are computed again delay those that are cached by no more than one of them. The next session is of the tenant with
the fewest blocks in places, by weight, and there the one that has paused longest. A place moves to another worker where
only that one has room.

A pause is an answer to a request that asks again, so nobody has to be told when it ends: a session whose client has
left asks no more, and is forgotten after `SILENT_S`.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raydix.engine.core.manager.sessions import Session
from raydix.engine.core.types import FinishReason, Paused

FILL = 0.95
"""Share of a pool for places: the rest is for requests of no session, and for answers."""
PATIENCE_S = 20.0
"""A session that has been idle for less keeps its place, unless its last answer ended a turn: tools mostly take a few
seconds, and people minutes."""
SILENT_S = 2.0
"""A paused session that has not asked for so long has left."""
STALE_S = 600.0
"""A place of a session that has not asked for so long is free, whether or not another one needs the room."""


class TurnLimits(NamedTuple):
    """Times of turns in seconds."""

    quantum_s: float = 300.0
    """Time after which a session that pauses gets the place of one that has had it for as long; 0: no session ever
    pauses."""


class PausedError(Exception):
    """A request is not admitted, because its session waits for its turn."""

    def __init__(self, paused: Paused) -> None:
        super().__init__(f"{paused.num_ahead} sessions are to go on before")
        self.paused = paused


NO_TURNS = TurnLimits(quantum_s=0.0)


@dataclass(slots=True, eq=False)
class _Place:
    session: Session
    worker: str
    size: int
    since: float


@dataclass(slots=True, eq=False)
class _Pause:
    session: Session
    request_id: str
    size: int
    since: float
    asked_at: float


class Turns:
    """Places and pauses of sessions, by number.

    `now`, of all methods: seconds since the epoch. `sizes`: all blocks of each worker's pool.
    """

    def __init__(self, limits: TurnLimits, weights: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        self.weights: Mapping[str, float] = weights or {}
        """Weights of tenants other than 1."""
        self._places: OrderedDict[int, _Place] = OrderedDict()
        """The one that asked longest ago first."""
        self._pauses: dict[int, _Pause] = {}
        """In the order in which the pauses began."""
        self._placed: Counter[str] = Counter()
        """Blocks in places, by worker."""
        self._tenants: Counter[str] = Counter()
        """Blocks in places, by tenant."""

    @property
    def num_placed(self) -> int:
        return len(self._places)

    @property
    def num_paused(self) -> int:
        return len(self._pauses)

    def place_of(self, session: Session) -> str | None:
        """The worker of a session's place; None without one."""
        place = self._places.get(session.number)
        return None if place is None else place.worker

    def ask(
        self,
        session: Session,
        request_id: str,
        num_blocks: int,
        sizes: Mapping[str, int],
        idle: Container[str],
        now: float,
    ) -> Paused | None:
        """A request of a session that needs `num_blocks` asks for its turn; None: the session has a place. `idle`:
        workers that could begin to compute its prompt at once."""
        self._forget(sizes, now)
        place = self._places.get(session.number)
        if place is not None:
            self._resize(place, num_blocks)
            self._places.move_to_end(session.number)
            if not self._is_over(place, sizes, now):
                return None
            self._leave(session.number)

        pause = self._pauses.get(session.number)
        if pause is None:
            pause = self._pauses[session.number] = _Pause(session, request_id, num_blocks, now, now)
        pause.asked_at, pause.request_id, pause.size = now, request_id, num_blocks
        order = self._order()
        if order[0] is pause and self._enter(pause, sizes, idle, now):
            session.num_pauses += now > pause.since
            session.paused_s += now - pause.since
            return None
        return self._told(pause, order, now)

    def paused(self, now: float) -> dict[str, tuple[Session, Paused]]:
        """The paused requests by id, each with its session and the answer that it gets."""
        order = self._order()
        return {pause.request_id: (pause.session, self._told(pause, order, now)) for pause in order}

    def check_integrity(self) -> None:
        """Assert that sums agree with the places, and that no session has a place and pauses."""
        assert not self._places.keys() & self._pauses.keys()
        workers, tenants = Counter[str](), Counter[str]()
        for number, place in self._places.items():
            assert place.session.number == number and place.size > 0
            workers[place.worker] += place.size
            tenants[place.session.tenant] += place.size
        assert +self._placed == workers and +self._tenants == tenants

    # Inside

    def _told(self, pause: _Pause, order: list[_Pause], now: float) -> Paused:
        return Paused(order.index(pause), len(self._places), pause.size, now - pause.since)

    def _order(self) -> list[_Pause]:
        """The paused sessions, the next one first."""
        return sorted(
            self._pauses.values(),
            key=lambda pause: self._tenants[pause.session.tenant] / self.weights.get(pause.session.tenant, 1.0),
        )

    def _is_over(self, place: _Place, sizes: Mapping[str, int], now: float) -> bool:
        """True if a session that asks loses its place: for another one that has paused for long, or because the places
        on its worker have grown beyond the pool, and its own is the oldest there."""
        quantum_s = self.limits.quantum_s
        has_paused = any(now - pause.since >= quantum_s for pause in self._pauses.values())
        if has_paused and now - place.since >= quantum_s:
            return True
        if self._room(place.worker, sizes) >= 0 or self._make_room(place.worker, 0, sizes, now, but=place):
            return False
        there = [each for each in self._places.values() if each.worker == place.worker]
        return len(there) > 1 and min(there, key=lambda each: (each.since, each.session.number)) is place

    def _enter(self, pause: _Pause, sizes: Mapping[str, int], idle: Container[str], now: float) -> bool:
        """Give the next session a place, if it can have one: on its last worker, or on the one with most room."""
        last = pause.session.last_workers.decode
        workers = sorted(sizes, key=lambda worker: (worker != last, -self._room(worker, sizes), worker))
        chosen = next((each for each in workers if self._room(each, sizes) >= pause.size), None)
        is_due = now - pause.since >= self.limits.quantum_s
        patience_s = 0.0 if is_due else PATIENCE_S
        for worker in workers:
            if chosen is None and (is_due or worker in idle):
                has_room = self._make_room(worker, pause.size, sizes, now, patience_s=patience_s)
                chosen = worker if has_room else None
        if chosen is None:
            # A session that is larger than a pool shares it with no other one.
            chosen = next((each for each in workers if not self._placed[each]), None)
        if chosen is None:
            return False
        session = pause.session
        del self._pauses[session.number]
        self._places[session.number] = _Place(session, chosen, pause.size, now)
        self._count(self._places[session.number], pause.size)
        return True

    def _make_room(
        self,
        worker: str,
        num_blocks: int,
        sizes: Mapping[str, int],
        now: float,
        *,
        patience_s: float = 0.0,
        but: _Place | None = None,
    ) -> bool:
        """Take the places on a worker of sessions without a request under way, the one that has been idle longest
        first, if that gives room for `num_blocks`. `patience_s`: sessions in a turn that have been idle for less keep
        theirs; so does the session of the place `but`."""
        freed, left = self._room(worker, sizes), list[int]()
        for number, place in sorted(self._places.items(), key=lambda item: item[1].session.used_at):
            session = place.session
            if freed >= num_blocks:
                break
            if place.worker != worker or place is but or session.running:
                continue
            if session.last_stop is FinishReason.STOP or now - session.used_at >= patience_s:
                freed += place.size
                left.append(number)
        if freed < num_blocks:
            return False
        for number in left:
            self._leave(number)
        return True

    def _room(self, worker: str, sizes: Mapping[str, int]) -> int:
        return int(FILL * sizes[worker]) - self._placed[worker]

    def _forget(self, sizes: Mapping[str, int], now: float) -> None:
        """Forget places on workers that are gone or not used for long, and paused sessions that ask no more."""
        for number in [number for number, place in self._places.items() if place.worker not in sizes]:
            self._leave(number)
        while self._places:
            number, place = next(iter(self._places.items()))
            if place.session.running or now - place.session.used_at < STALE_S:
                break
            self._leave(number)
        for number in [number for number, pause in self._pauses.items() if now - pause.asked_at >= SILENT_S]:
            del self._pauses[number]

    def _leave(self, number: int) -> None:
        place = self._places.pop(number)
        self._count(place, -place.size)

    def _resize(self, place: _Place, num_blocks: int) -> None:
        self._count(place, num_blocks - place.size)
        place.size = num_blocks

    def _count(self, place: _Place, num_blocks: int) -> None:
        self._placed[place.worker] += num_blocks
        self._tenants[place.session.tenant] += num_blocks
