"""Where sessions were last."""

from raydix.engine.core.hashing import preferred
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel, Demand, place
from raydix.engine.core.manager.session_workers import NO_WORKERS, Sessions, SessionWorkers
from raydix.engine.core.types import AdmitRequest, CacheHints, Role
from tests.unit.test_placement import MODEL, worker


def test_the_latest_workers_count_and_the_least_used_is_forgotten() -> None:
    sessions = Sessions(capacity=2)
    for session, name in (("a", "w1"), ("b", "w1"), ("a", "w2"), ("c", "w1")):
        sessions.moved("", session, SessionWorkers(name, name))
    assert sessions.of("", "a") == SessionWorkers("w2", "w2")
    assert sessions.of("", "b") == NO_WORKERS
    assert sessions.of("", None) == sessions.of("other", "a") == NO_WORKERS


def test_a_session_stays_while_nothing_speaks_for_another_worker() -> None:
    last_workers = SessionWorkers("a", "a")
    session = next(str(number) for number in range(100) if preferred(str(number), "ab") == "b")
    for queued, expected in ((0, "a"), (5000, "b")):
        workers = [worker("a", queued=queued), worker("b")]
        assert place(Demand(1000, session=session, last_workers=last_workers), workers, MODEL).prefill == expected


def test_a_session_that_had_to_move_does_not_move_back() -> None:
    """The worker that its name hashes to is busy at first; then the blocks are on the other one."""
    directory = Directory(CostModel(block_size=16), segment_budget_bytes=1 << 20)
    for name in ("a", "b"):
        directory.register(name, Role.MIXED, 1, 1, ())
    session = next(str(number) for number in range(100) if preferred(str(number), "ab") == "a")
    directory.admit(AdmitRequest("busy", 0, (), 5000, session), 0.0)
    assert directory.fleet["a"].num_queued == 1
    used = []
    for number in range(3):
        request = AdmitRequest(f"r{number}", 0, (), 100, session, cache=CacheHints("" if number else "other tenant"))
        used.append(directory.admit(request, 0.0)[0].prefill)
        directory.end_request(f"r{number}", 0.0)
        if number == 1:
            directory.end_request("busy", 0.0)
    assert used == ["b", "b", "b"]
    directory.check_integrity()
