"""Sessions as the manager knows them: by the blocks of their prompts, with their footprints."""

from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.manager.placement import NO_WORKERS, SessionWorkers
from raydix.engine.core.manager.sessions import Branch, Found, Session, Sessions
from raydix.engine.core.types import AdmitRequest, BlockHash, CacheHints, FinishReason

SYSTEM = [f"system {number}".encode() for number in range(20)]


def blocks(name: str, count: int) -> list[BlockHash]:
    return [f"{name} {number}".encode() for number in range(count)]


def asking(
    request_id: str, hashes: list[BlockHash], *, name: str | None = None, tenant: str = "", attempt: int = 0
) -> AdmitRequest:
    return AdmitRequest(request_id, attempt, tuple(hashes), 16 * len(hashes), name, cache=CacheHints(tenant))


class Scene:
    """Sessions, and the blocks that some prompt has had."""

    def __init__(self, capacity: int = 100) -> None:
        self.sessions = Sessions(capacity)
        self._known: set[BlockHash] = set()
        self._running: set[str] = set()
        self._num_requests = 0

    def begin(self, hashes: list[BlockHash], worker: str = "w", name: str | None = None, tenant: str = "") -> Session:
        self._num_requests += 1
        request = asking(f"r{self._num_requests}", hashes, name=name, tenant=tenant)
        num_known = next((n for n, block in enumerate(hashes) if block not in self._known), len(hashes))
        session = self.sessions.admitted(
            request, self.sessions.find(request), num_known, SessionWorkers(worker, worker), self._num_requests
        )
        self._known.update(hashes)
        self._running.add(request.request_id)
        self.sessions.check_integrity(self._running)
        return session

    def end(self, session: Session) -> None:
        for request_id in [*session.running]:
            self.sessions.ended(request_id, self._num_requests)
            self._running.discard(request_id)
        self.sessions.check_integrity(self._running)

    def last_workers(self, request: AdmitRequest) -> SessionWorkers:
        return self.sessions.workers_of(request, self.sessions.find(request).session)

    def turn(self, hashes: list[BlockHash], name: str | None = None, tenant: str = "") -> Session:
        """A request that ends before anything else happens."""
        session = self.begin(hashes, name=name, tenant=tenant)
        self.end(session)
        return session


def test_a_prompt_that_extends_a_session_belongs_to_it() -> None:
    scene = Scene()
    first = scene.turn(blocks("a", 30))
    assert scene.turn(blocks("a", 40)) is scene.turn(blocks("a", 41)) is first
    assert first.num_requests == 3 and first.prompt_blocks == 41
    assert scene.turn(blocks("b", 30)) is not first


def test_an_edit_near_the_end_stays_in_the_session() -> None:
    scene = Scene()
    first = scene.turn(blocks("a", 300))
    assert scene.turn(blocks("a", 290) + blocks("other", 20)) is first
    assert scene.turn(blocks("a", 20) + blocks("new", 50)) is not first, "nearly everything is another"


def test_a_common_beginning_makes_no_session() -> None:
    """The second agent finds the system prompt known, whose last block no session may take for its own from then on."""
    scene = Scene()
    agents = [scene.turn(SYSTEM + blocks(name, 300)) for name in "abc"]
    assert len({agent.number for agent in agents}) == 3
    for name, agent in zip("abc", agents, strict=True):
        assert scene.turn(SYSTEM + blocks(name, 320)) is agent


def test_a_common_beginning_is_counted_once() -> None:
    scene = Scene()
    agents = [scene.turn(SYSTEM + blocks(name, 300)) for name in "abc"]
    assert [scene.sessions.footprint(agent) for agent in agents] == [321, 301, 301]
    assert scene.sessions.footprint(agents[2], SYSTEM + blocks("c", 380)) == 381


def test_what_one_session_alone_found_known_is_its_own() -> None:
    """The manager is new, and workers have named the blocks of sessions that it never met."""
    scene = Scene()
    scene._known.update(blocks("a", 200))
    session = scene.turn(blocks("a", 210))
    assert scene.sessions.footprint(session) == 211
    assert scene.turn(blocks("a", 220)) is session


def test_a_named_session_that_begins_otherwise_counts_all_its_blocks() -> None:
    """One name for all that a program sends: another prompt shares nothing with what the first one found known."""
    scene = Scene()
    for name in "ab":
        scene.turn(SYSTEM + blocks(name, 300))
    session = scene.turn(SYSTEM + blocks("chat", 300), name="chat")
    assert scene.sessions.footprint(session) == 301
    other = blocks("c", 15)
    assert scene.sessions.footprint(session, other) == 16
    assert scene.turn(other, name="chat") is session
    assert scene.sessions.footprint(session) == 16
    assert scene.turn(other + blocks("d", 5)) is session, "by its marks"
    assert scene.turn(SYSTEM + blocks("chat", 300), name="chat") is session
    assert scene.sessions.footprint(session) == 321, "nobody else begins behind so many of them"


def test_a_request_beside_another_one_of_its_session_is_a_branch() -> None:
    scene = Scene()
    agent = scene.begin(blocks("a", 30))
    sub_agent = scene.begin(blocks("a", 30) + blocks("sub", 10))
    assert sub_agent is not agent
    assert agent.branch is None and sub_agent.branch == Branch(min(agent.running), 30)
    scene.end(agent)
    scene.end(sub_agent)
    assert scene.turn(blocks("a", 30) + blocks("sub", 20)) is sub_agent
    assert scene.turn(blocks("a", 30) + blocks("main", 20)) is agent


def test_a_name_helps_where_the_blocks_do_not() -> None:
    scene = Scene()
    session = scene.turn(blocks("a", 300), name="chat")
    assert scene.turn(blocks("summary", 20), name="chat") is session
    assert scene.turn(blocks("summary", 30)) is session
    assert scene.turn(blocks("c", 20), name="chat", tenant="other") is not session
    assert scene.begin(blocks("summary", 40)) is session
    assert scene.begin(blocks("d", 20), name="chat") is not session, "one name for two requests at once"


def test_another_tenants_blocks_are_another_tenants_session() -> None:
    """Public beginnings of prompts have the same names for all tenants."""
    scene = Scene()
    session = scene.turn(blocks("a", 30))
    assert scene.turn(blocks("a", 40), tenant="other") is not session


def test_the_last_workers_are_remembered_by_blocks_and_by_name() -> None:
    scene = Scene()
    session = scene.begin(blocks("a", 30), worker="w1", name="chat")
    assert scene.last_workers(asking("r", blocks("a", 40))) == NO_WORKERS, "a branch"
    scene.end(session)
    assert scene.last_workers(asking("r", blocks("a", 40))) == SessionWorkers("w1", "w1")
    assert scene.last_workers(asking("r", blocks("b", 40), name="chat")) == SessionWorkers("w1", "w1")
    assert scene.last_workers(asking("r", blocks("b", 40))) == NO_WORKERS
    assert scene.last_workers(asking("r", blocks("a", 40), tenant="other")) == NO_WORKERS


def test_another_attempt_is_the_same_request() -> None:
    sessions = Sessions()
    workers = SessionWorkers("w", "w")
    session = sessions.admitted(asking("r", blocks("a", 30)), Found(), 0, workers, 0.0)
    again = asking("r", blocks("a", 31), attempt=1)
    assert sessions.find(again).session is session
    sessions.admitted(again, Found(session), 30, workers, 1.0)
    assert session.num_requests == 1
    sessions.stopped("r", FinishReason.LENGTH)
    sessions.ended("r", 2.0)
    assert session.last_stop is FinishReason.LENGTH and session.used_at == 2.0
    sessions.stopped("r", FinishReason.STOP)
    assert session.last_stop is FinishReason.LENGTH, "the request has ended before"
    sessions.check_integrity([])


def test_the_least_used_session_without_a_request_is_forgotten() -> None:
    scene = Scene(capacity=2)
    running = scene.begin(blocks("a", 30), name="a")
    scene.turn(blocks("b", 30), name="b")
    kept = scene.turn(blocks("c", 30), name="c")
    assert {session.number for session in scene.sessions} == {running.number, kept.number}
    assert scene.sessions.find(asking("r", blocks("b", 40), name="b")).session is None
    scene.begin(SYSTEM)
    scene.begin(SYSTEM[:5])
    assert len(scene.sessions) == 3, "those with requests stay"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans(), st.sampled_from(["", "n"]))))
def test_sums_agree_after_any_requests(turns: list[tuple[str, int, bool, str]]) -> None:
    scene = Scene(capacity=4)
    for name, count, ends, session_name in turns:
        session = scene.begin(SYSTEM[:3] + blocks(name, count), name=session_name or None)
        assert 1 <= scene.sessions.footprint(session) <= count + 4
        if ends:
            scene.end(session)
