"""Sessions: which requests belong together, how much KV each session has, and where it lies.

A request belongs to the session whose prompt it extends. A session is found by its *marks*: blocks near the end of its
last prompt, all of them behind the blocks that its first prompt found known, which may be everybody's: a system prompt.

| the request's prompt | it belongs to |
|---|---|
| has a mark of a session, and none further on | that session |
| has no mark, and its session's name is known | the session that had this name last |
| otherwise | a new session |

An edit near the end of a prompt leaves earlier marks in place. A prompt that extends a session while another request of
the session is under way is a branch (a sub-agent, a further choice), and a session of its own: one session has one
footprint. A client's name of a session helps where no mark does, after a compaction for example; it is not trusted
further, since clients give one name to all requests of a user.

Nothing here is needed for correctness: a session that is forgotten begins anew with its next request.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from raydix.engine.core.manager.placement import NO_WORKERS, SessionWorkers
from raydix.engine.core.types import AdmitRequest, BlockHash, FinishReason

MAX_SESSIONS = 1 << 15  # limit of the remembered sessions; the least recently used one is forgotten first
MARK_DISTANCES = (0, 1, 3, 15, 63, 255)  # distances of the marks from the last block of a prompt, in blocks


class Branch(NamedTuple):
    """Where a session left another one, whose request was under way."""

    request_id: str
    """That request."""
    num_blocks: int
    """Leading blocks that both prompts have."""


class Found(NamedTuple):
    """What is known of a request's session before it is admitted."""

    session: "Session | None" = None
    """None for a new one."""
    branch: Branch | None = None
    """Set if the new one is a branch."""


@dataclass(slots=True, eq=False)
class Session:
    """Requests that extend each other's prompts. Only `Sessions` writes to the fields, and `Turns` to `turn`'s."""

    number: int
    """Number of the session, in order of their first requests."""
    tenant: str
    key: bytes | None
    """Digest of the client's name of the session; None without a name."""
    first_own: int
    """Leading blocks that its first prompt found known, or its first one with another beginning: they may belong to
    others, too."""
    trunk: BlockHash | None = None
    """The last of these blocks; None without any."""
    branch: Branch | None = None
    """The beginning of a branch; None where its first prompt extended no session under way."""
    prompt_blocks: int = 0
    """Full blocks of the last prompt."""
    marks: tuple[BlockHash, ...] = ()
    last_workers: SessionWorkers = NO_WORKERS
    """Workers of the last request."""
    running: set[str] = field(default_factory=set)
    """Admitted requests that have not ended."""
    used_at: float = 0.0
    """Begin or end of its last request, whichever came last."""
    last_stop: FinishReason | None = None
    """Reason for the end of its last request; None if it was aborted or has not ended."""
    num_requests: int = 0
    num_pauses: int = 0
    """Requests that had to wait for the session's turn."""
    paused_s: float = 0.0
    """Time that its requests waited for the session's turn."""

    def begins(self, hashes: Sequence[BlockHash]) -> bool:
        """True if a prompt of these blocks begins with what the session found known; only a session's name can bring
        together prompts that do not."""
        return self.first_own == 0 or (len(hashes) > self.first_own and hashes[self.first_own - 1] == self.trunk)


class Sessions:
    """The most recent `capacity` sessions.

    `now`, of all methods: seconds since the epoch.
    """

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # by number; the least recently used first
        self._by_mark: dict[BlockHash, Session] = {}  # the session that has set a mark last
        self._by_key: dict[bytes, Session] = {}  # the session that had a name last
        self._by_request: dict[str, Session] = {}  # sessions of the requests under way
        self._by_trunk: Counter[BlockHash] = Counter()  # number of sessions that began behind a block
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """The sessions, the least recently used first."""
        return iter(self._sessions.values())

    def __reversed__(self) -> Iterator[Session]:
        """The sessions, the latest first."""
        return reversed(self._sessions.values())

    def of_request(self, request_id: str) -> Session | None:
        """The session of a request under way."""
        return self._by_request.get(request_id)

    def footprint(self, session: Session, hashes: Sequence[BlockHash] | None = None) -> int:
        """Blocks of a session, with one for its answer, when its prompt has the blocks `hashes` (None: as its last
        one).

        What several sessions found known is counted with the session that brought it only. What one session alone found
        known is its own: the manager may have forgotten that session, or be a new one.
        """
        length = session.prompt_blocks if hashes is None else len(hashes)
        # A beginning that a single session has is not shared with anybody, so its blocks count.
        is_shared = session.trunk is not None and self._by_trunk[session.trunk] > 1
        if hashes is not None and not session.begins(hashes):
            is_shared = False
        return length + 1 - (session.first_own if is_shared else 0)

    def find(self, request: AdmitRequest) -> Found:
        """The session that a request belongs to, as the module says."""
        own = self._by_request.get(request.request_id)
        if own is not None:
            return Found(own)  # another attempt
        extended, num_common = self._extended(request.cache.tenant, request.hashes)
        if extended is not None:
            # The session is at work on an earlier prompt: two requests at a time are two sessions.
            if extended.running:
                return Found(branch=Branch(min(extended.running), num_common))  # the same one of several each time
            return Found(extended)
        named = self._named(request)
        return Found(None if named is None or named.running else named)

    def workers_of(self, request: AdmitRequest, session: Session | None) -> SessionWorkers:
        """The workers where a request's session was last: that of its name, or the one that was found for it.
        `NO_WORKERS` if unknown: a branch without a name goes where it costs least."""
        last = self._named(request) or session
        return NO_WORKERS if last is None else last.last_workers

    def admitted(
        self, request: AdmitRequest, found: Found, num_known: int, workers: SessionWorkers, now: float
    ) -> Session:
        """Note a placed request, which belongs to the session that was found, or begins one. `num_known`: leading
        blocks of its prompt that were known before."""
        session = found.session
        key = None if request.session is None else _key(request.cache.tenant, request.session)
        if session is None:
            self._num_begun += 1
            session = Session(self._num_begun, request.cache.tenant, key, first_own=0, branch=found.branch)
            self._sessions[session.number] = session
            self._set_trunk(session, request.hashes, num_known)
        elif not session.begins(request.hashes):
            self._set_trunk(session, request.hashes, num_known)
        if key is not None:
            # The client has given the session another name: the former one finds it no more.
            if session.key not in (None, key) and self._by_key.get(session.key) is session:
                del self._by_key[session.key]
            session.key = key
            self._by_key[key] = session

        # A failover is the same request; it counts where the manager that counted it first is gone.
        session.num_requests = max(1, session.num_requests + (request.attempt == 0))
        session.prompt_blocks = len(request.hashes)
        session.last_workers, session.used_at, session.last_stop = workers, now, None
        session.running.add(request.request_id)
        self._by_request[request.request_id] = session
        self._mark(session, request.hashes)
        self._sessions.move_to_end(session.number)
        self._forget_oldest()
        return session

    def ended(self, request_id: str, now: float) -> None:
        """A request is over, or will be admitted anew."""
        session = self._by_request.pop(request_id, None)
        if session is not None:
            session.running.discard(request_id)
            session.used_at = now

    def stopped(self, request_id: str, stop: FinishReason | None) -> None:
        """Note why the answer of a request under way has ended."""
        session = self._by_request.get(request_id)
        if session is not None:
            session.last_stop = stop

    def check_integrity(self, requests: Iterable[str]) -> None:
        """Assert that the sessions agree with each other, and with the admitted `requests`."""
        assert self._by_request.keys() == set(requests)
        assert len(self._sessions) <= self._capacity + len(self._by_request)
        for request_id, session in self._by_request.items():
            assert request_id in session.running and self._sessions[session.number] is session
        for session in self._sessions.values():
            assert session.running <= self._by_request.keys()
        trunks = Counter(session.trunk for session in self._sessions.values() if session.trunk is not None)
        assert self._by_trunk == trunks
        for mark, session in self._by_mark.items():
            assert mark in session.marks and self._sessions[session.number] is session
        for key, session in self._by_key.items():
            assert session.key == key and self._sessions[session.number] is session

    # Inside

    def _extended(self, tenant: str, hashes: Sequence[BlockHash]) -> tuple[Session | None, int]:
        """The session with the last mark in a prompt, and the number of blocks up to that mark."""
        # From the end on: the mark that lies furthest on belongs to the session that shares most.
        for num_behind, session in enumerate(map(self._by_mark.get, reversed(hashes))):
            if session is not None and session.tenant == tenant:
                return session, len(hashes) - num_behind
        return None, 0

    def _named(self, request: AdmitRequest) -> Session | None:
        if request.session is None:
            return None
        return self._by_key.get(_key(request.cache.tenant, request.session))

    def _set_trunk(self, session: Session, hashes: Sequence[BlockHash], num_known: int) -> None:
        """Note what a session finds known with its first prompt, or with one of another beginning."""
        self._drop_trunk(session)
        # The last block of a prompt is its session's own, also where an equal prompt came before.
        session.first_own = max(0, min(num_known, len(hashes) - 1))
        session.trunk = hashes[session.first_own - 1] if session.first_own else None
        if session.trunk is not None:
            self._by_trunk[session.trunk] += 1

    def _drop_trunk(self, session: Session) -> None:
        if session.trunk is not None:
            self._by_trunk[session.trunk] -= 1
            if not self._by_trunk[session.trunk]:
                del self._by_trunk[session.trunk]

    def _mark(self, session: Session, hashes: Sequence[BlockHash]) -> None:
        """Set the marks of a session near the end of a prompt."""
        self._unmark(session)
        last = len(hashes) - 1
        # No mark within the common beginning: it would take every session with that beginning for this one.
        places = [last - distance for distance in MARK_DISTANCES if last - distance >= session.first_own]
        session.marks = tuple(hashes[place] for place in places)
        self._by_mark.update(dict.fromkeys(session.marks, session))

    def _unmark(self, session: Session) -> None:
        for mark in session.marks:
            # Another session may have set the same mark since, and keeps it.
            if self._by_mark.get(mark) is session:
                del self._by_mark[mark]
        session.marks = ()

    def _forget_oldest(self) -> None:
        """Forget the least recently used sessions without a request above the capacity."""
        # Bounded: where every session has a request under way the loop would not end.
        num_looked = 0
        while len(self._sessions) > self._capacity and num_looked < len(self._sessions):
            number, session = next(iter(self._sessions.items()))
            num_looked += 1
            if session.running:
                self._sessions.move_to_end(number)
                continue
            del self._sessions[number]
            self._unmark(session)
            if session.key is not None and self._by_key.get(session.key) is session:
                del self._by_key[session.key]
            self._drop_trunk(session)


def _key(tenant: str, session: str) -> bytes:
    """Names have any length; a digest has a fixed one."""
    # The length of the tenant's name keeps apart names that are the same when joined.
    return blake2b(f"{len(tenant)} {tenant}{session}".encode(), digest_size=16).digest()
