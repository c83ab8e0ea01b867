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

A pause is an answer to a request that asks again by its id alone, so nobody has to be told when it ends; it asks in
full, with its blocks, when it may go on. A pause ends with the last of its requests, and after `SILENT_S` without a
question. While there is no worker nobody is asked anything, and all pauses stay.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from raydix.engine.core.manager.sessions import Session
from raydix.engine.core.types import FinishReason, Paused

FILL = 0.95  # share of a pool for places: the rest is for requests of no session, and for answers
# A session that has been idle for less keeps its place, unless its last answer ended a turn or its client left: tools
# mostly take a few seconds, and people minutes.
PATIENCE_S = 20.0
# A paused session that has not asked for so long has left together with its ingress replica. Longer than a manager or a
# replica may stand still: a session whose pause is forgotten begins another one behind all others.
SILENT_S = 10.0
# A place of a session that has not asked for so long is free, whether or not another one needs the room.
STALE_S = 600.0


class TurnLimits(NamedTuple):
    """Times of turns in seconds."""

    quantum_s: float = 300.0
    """Time after which a session that pauses gets the place of one that has had it for as long; 0: no session ever
    pauses."""


IdleFor: TypeAlias = Callable[[int], Container[str]]
"""Workers that could begin at once to compute a prompt of so many blocks."""


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
    size: int
    since: float
    asked_at: float
    requests: set[str] = field(default_factory=set)
    """Requests of the session that wait: at least one."""


class _Room(NamedTuple):
    worker: str
    leaving: Sequence[int]
    """Sessions that lose their places for it."""


class Turns:
    """Places and pauses of sessions, by number.

    `now`, of all methods: seconds since the epoch. `sizes`: all blocks of each worker's pool.
    """

    def __init__(self, limits: TurnLimits, weights: Mapping[str, float] | None = None) -> None:
        self.limits = limits
        self.weights: Mapping[str, float] = weights or {}
        """Weights of tenants other than 1."""
        self.num_pauses = 0
        """Pauses that ended with a turn, of all sessions so far."""
        self.paused_s = 0.0
        """Seconds of these pauses."""
        self._places: OrderedDict[int, _Place] = OrderedDict()  # the one that asked longest ago first
        self._pauses: dict[int, _Pause] = {}  # in the order in which the pauses began
        self._waiting: dict[str, _Pause] = {}  # the pause of each request that waits
        self._placed: Counter[str] = Counter()  # blocks in places, by worker
        self._tenants: Counter[str] = Counter()  # blocks in places, by tenant
        self._is_suspended = False  # there has been no worker since the last question

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

    def moved(self, session: Session, worker: str, sizes: Mapping[str, int]) -> None:
        """A session's request has gone to a worker: its place follows, if there is room. Only while nobody pauses does
        a request go elsewhere than to its session's place."""
        place = self._places.get(session.number)
        if place is None or place.worker == worker or worker not in sizes or self._room(worker, sizes) < place.size:
            return
        self._count(place, -place.size)
        place.worker = worker
        self._count(place, place.size)

    def ask(
        self,
        session: Session,
        request_id: str,
        num_blocks: int,
        sizes: Mapping[str, int],
        idle_for: IdleFor,
        now: float,
    ) -> Paused | None:
        """A request of a session that needs `num_blocks` asks for its turn; None: the session has a place."""
        self._forget(sizes, now)
        place = self._places.get(session.number)
        if place is not None:
            self._resize(place, num_blocks)
            self._places.move_to_end(session.number)
            if not self._is_over(place, sizes, now):
                return None
            # The session goes to the end of the queue: it pauses from now on like one that has just come.
            self._leave(session.number)

        waiting = self._waiting.get(request_id)
        # The same request may belong to another session by now, as blocks decide that: its old pause must not outlive
        # it.
        if waiting is not None and waiting.session is not session:
            self.gone(request_id)
        pause = self._pauses.get(session.number)
        if pause is None:
            pause = self._pauses[session.number] = _Pause(session, num_blocks, now, now)
        # The latest request's size counts: the session grows from call to call, and its place is to hold the last one.
        pause.asked_at, pause.size = now, num_blocks
        pause.requests.add(request_id)
        self._waiting[request_id] = pause
        order = self._order()
        # Nobody overtakes, not even a small session into a gap: otherwise a large one would wait for ever.
        room = self._room_for(pause, sizes, idle_for, now) if order[0] is pause else None
        if room is not None:
            self._enter(pause, room, now)
            return None
        return self._told(pause, order.index(pause), now)

    def ask_again(
        self, request_ids: Sequence[str], sizes: Mapping[str, int], idle_for: IdleFor, now: float
    ) -> list[Paused | None]:
        """Waiting requests ask again; None: the request is to ask in full, since its session may have a place then, or
        its pause is not known."""
        # All askers are noted before any is forgotten for silence.
        for pause in map(self._waiting.get, request_ids):
            if pause is not None:
                pause.asked_at = now
        self._forget(sizes, now)
        order = self._order()
        # Only the next session is promised a place, so that no other one takes it before the request asks in full.
        is_next_due = bool(order) and self._room_for(order[0], sizes, idle_for, now) is not None
        ranks = {pause.session.number: rank for rank, pause in enumerate(order)}

        def answer(pause: _Pause | None) -> Paused | None:
            rank = 0 if pause is None else ranks[pause.session.number]
            return None if pause is None or (rank == 0 and is_next_due) else self._told(pause, rank, now)

        return [answer(self._waiting.get(request_id)) for request_id in request_ids]

    def gone(self, request_id: str) -> None:
        """A request waits no longer; with the last one of its session the pause ends."""
        pause = self._waiting.pop(request_id, None)
        if pause is not None:
            pause.requests.discard(request_id)
            if not pause.requests:
                del self._pauses[pause.session.number]

    def suspend(self) -> None:
        """There is no worker any more: requests wait for one, and no silence counts until the next question."""
        self._is_suspended = True

    def clear(self) -> None:
        """Forget all places and pauses: nobody takes turns any more."""
        for each in (self._places, self._pauses, self._waiting, self._placed, self._tenants):
            each.clear()

    def paused(self, now: float) -> dict[str, tuple[Session, Paused]]:
        """The paused requests by id, each with its session and the answer that it gets."""
        order = [pause for pause in self._order() if self._is_suspended or now - pause.asked_at < SILENT_S]
        return {
            request_id: (pause.session, self._told(pause, rank, now))
            for rank, pause in enumerate(order)
            for request_id in sorted(pause.requests)
        }

    def check_integrity(self) -> None:
        """Assert that sums agree with the places, that no session has a place and pauses, and that each pause is that
        of its requests."""
        assert not self._places.keys() & self._pauses.keys()
        assert all(pause.requests for pause in self._pauses.values())
        assert self._waiting == {name: pause for pause in self._pauses.values() for name in pause.requests}
        workers, tenants = Counter[str](), Counter[str]()
        for number, place in self._places.items():
            assert place.session.number == number and place.size > 0
            workers[place.worker] += place.size
            tenants[place.session.tenant] += place.size
        assert dict(self._placed) == dict(workers) and dict(self._tenants) == dict(tenants)

    # Inside

    def _told(self, pause: _Pause, rank: int, now: float) -> Paused:
        return Paused(rank, len(self._places), pause.size, now - pause.since)

    def _order(self) -> list[_Pause]:
        """The paused sessions, the next one first."""
        return sorted(
            self._pauses.values(),
            # The sort is stable, so that within a tenant the order of the pauses' beginnings stays.
            key=lambda pause: self._tenants[pause.session.tenant] / self.weights.get(pause.session.tenant, 1.0),
        )

    def _is_over(self, place: _Place, sizes: Mapping[str, int], now: float) -> bool:
        """True if a session that asks loses its place: for another one that has paused for long, or because the places
        on its worker have grown beyond the pool, and its own is the oldest there."""
        quantum_s = self.limits.quantum_s
        has_paused = any(now - pause.since >= quantum_s for pause in self._pauses.values())
        if has_paused and now - place.since >= quantum_s:
            return True
        # Room may be negative: prompts grow in their places, and a configuration may shrink a pool.
        if self._room(place.worker, sizes) >= 0:
            return False
        leaving = self._make_room(place.worker, 0, sizes, now, but=place)
        if leaving is not None:
            for number in leaving:
                self._leave(number)
            return False
        # Nobody idle can leave. The oldest place ends when its session asks, and the last one on a worker stays: a
        # session larger than the pool is served alone.
        there = [each for each in self._places.values() if each.worker == place.worker]
        return len(there) > 1 and min(there, key=lambda each: (each.since, each.session.number)) is place

    def _room_for(self, pause: _Pause, sizes: Mapping[str, int], idle_for: IdleFor, now: float) -> _Room | None:
        """The place that the next session can have, if any: on its last worker, or on the one with most room."""
        last = pause.session.last_workers.decode
        # The last worker may still hold the session's blocks; the name makes equal workers a fixed order.
        workers = sorted(sizes, key=lambda worker: (worker != last, -self._room(worker, sizes), worker))
        for worker in workers:
            if self._room(worker, sizes) >= pause.size:
                return _Room(worker, [])
        # Who has paused for a quantum takes a place also where no worker is idle, and from sessions that were just
        # active.
        is_due = now - pause.since >= self.limits.quantum_s
        patience_s = 0.0 if is_due else PATIENCE_S
        idle = idle_for(pause.size)
        for worker in workers:
            if is_due or worker in idle:
                leaving = self._make_room(worker, pause.size, sizes, now, patience_s=patience_s)
                if leaving is not None:
                    return _Room(worker, leaving)
        # A session that is larger than a pool shares it with no other one.
        return next((_Room(worker, []) for worker in workers if not self._placed[worker]), None)

    def _enter(self, pause: _Pause, room: _Room, now: float) -> None:
        """Give a paused session its place."""
        for number in room.leaving:
            self._leave(number)
        session = pause.session
        self._end_pause(pause)
        # A session that got its place at once has not paused, though it went through the queue.
        session.num_pauses += now > pause.since
        session.paused_s += now - pause.since
        self.num_pauses += now > pause.since
        self.paused_s += now - pause.since
        self._places[session.number] = _Place(session, room.worker, pause.size, now)
        self._count(self._places[session.number], pause.size)

    def _make_room(
        self,
        worker: str,
        num_blocks: int,
        sizes: Mapping[str, int],
        now: float,
        *,
        patience_s: float = 0.0,
        but: _Place | None = None,
    ) -> list[int] | None:
        """The places on a worker whose end gives room for `num_blocks`, None if too few can end: those of sessions
        without a request under way, the one that has been idle longest first. `patience_s`: sessions in a turn that
        have been idle for less keep theirs; so does the session of the place `but`."""
        freed, leaving = self._room(worker, sizes), list[int]()
        for number, place in sorted(self._places.items(), key=lambda item: item[1].session.used_at):
            session = place.session
            if freed >= num_blocks:
                break
            if place.worker != worker or place is but or session.running:
                continue
            # An answer that stopped by itself ends a turn of the conversation, and so does a client that leaves before
            # the end: a person reads or thinks now, where a call would be back soon.
            has_ended = session.last_stop in (FinishReason.STOP, None)
            if has_ended or now - session.used_at >= patience_s:
                freed += place.size
                leaving.append(number)
        return leaving if freed >= num_blocks else None

    def _room(self, worker: str, sizes: Mapping[str, int]) -> int:
        return int(FILL * sizes[worker]) - self._placed[worker]

    def _forget(self, sizes: Mapping[str, int], now: float) -> None:
        """Forget places on workers that are gone or not used for long, and paused sessions that ask no more."""
        for number, place in [*self._places.items()]:
            is_stale = not place.session.running and now - place.session.used_at >= STALE_S
            if is_stale or place.worker not in sizes:
                self._leave(number)
        for pause in [*self._pauses.values()]:
            if self._is_suspended:
                pause.asked_at = now
            elif now - pause.asked_at >= SILENT_S:
                self._end_pause(pause)
        self._is_suspended = False

    def _end_pause(self, pause: _Pause) -> None:
        del self._pauses[pause.session.number]
        for request_id in pause.requests:
            del self._waiting[request_id]

    def _leave(self, number: int) -> None:
        place = self._places.pop(number)
        self._count(place, -place.size)

    def _resize(self, place: _Place, num_blocks: int) -> None:
        self._count(place, num_blocks - place.size)
        place.size = num_blocks

    def _count(self, place: _Place, num_blocks: int) -> None:
        for counts, name in ((self._placed, place.worker), (self._tenants, place.session.tenant)):
            counts[name] += num_blocks
            # Workers come and go under new names.
            if not counts[name]:
                del counts[name]
