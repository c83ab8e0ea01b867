"""What one worker and the pings of the ingress replicas tell each other about attempts."""

from dataclasses import replace

from raydix.engine.core.types import Assignment, AttemptName
from raydix.engine.core.worker.attempts import ORPHAN_S, Attempts
from tests.unit.builders import make_assignment

INGRESS = "ingress"


def assigned(request_id: str, attempt: int = 0) -> Assignment:
    return replace(make_assignment(request_id), attempt=attempt, reply_to=INGRESS)


def test_an_attempt_that_both_sides_know_is_under_way() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a"), assigned("b", attempt=2)])
    named = [AttemptName("a", 0), AttemptName("b", 2)]
    for now in (1.0, 100.0):
        assert attempts.compare(INGRESS, named, [], now) == ([], [])


def test_an_attempt_that_is_not_here_is_told() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a", attempt=1), assigned("b")])
    attempts.end("b", 0)
    named = [AttemptName("a", 1), AttemptName("b", 0), AttemptName("c", 0)]
    assert attempts.compare(INGRESS, named, [], 1.0) == ([AttemptName("b", 0), AttemptName("c", 0)], [])


def test_an_attempt_that_is_not_named_for_long_runs_for_nobody() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a")])
    assert attempts.compare(INGRESS, [], [], 1.0) == ([], []), "the ping may have been sent before the attempt"
    assert attempts.compare(INGRESS, [], [], 1.0 + ORPHAN_S / 2) == ([], [])
    assert attempts.compare(INGRESS, [], [], 1.0 + ORPHAN_S) == ([], [AttemptName("a", 0)])


def test_pings_that_were_held_up_and_come_together_end_nothing() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a")])
    for late in (6.0, 6.0, 6.1):
        assert attempts.compare(INGRESS, [], [], late) == ([], [])
    assert attempts.compare(INGRESS, [AttemptName("a", 0)], [], 7.0) == ([], [])
    assert attempts.compare(INGRESS, [], [], 8.5) == ([], []), "counted anew"


def test_the_pings_of_one_replica_say_nothing_of_anothers_attempts() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a"), replace(assigned("b"), reply_to="other")])
    assert attempts.compare("other", [], [], 1.0) == ([], [])
    assert attempts.compare(INGRESS, [AttemptName("a", 0)], [], 1.5) == ([], [])
    assert attempts.compare("other", [], [], 1.0 + ORPHAN_S) == ([], [AttemptName("b", 0)])
    assert attempts.compare(INGRESS, [AttemptName("a", 0)], [], 9.0) == ([], [])


def test_what_is_computed_at_idle_priority_belongs_to_nobody() -> None:
    attempts = Attempts()
    assert attempts.begin([replace(assigned("a"), is_idle=True)]) == set()
    assert attempts.compare(INGRESS, [], [], 1.0) == ([], [])
    assert attempts.compare(INGRESS, [], [], 9.0) == ([], [])


def test_an_attempt_on_its_way_is_neither_told_nor_an_orphan() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a")])
    sent = [AttemptName("a", 0), AttemptName("b", 0)]
    for now in (1.0, 9.0):
        assert attempts.compare(INGRESS, [], sent, now) == ([], [])


def test_a_worker_that_stood_still_counts_anew() -> None:
    attempts = Attempts()
    attempts.begin([assigned("a")])
    attempts.compare(INGRESS, [], [], 1.0)
    attempts.stood_still(9.0)
    assert attempts.compare(INGRESS, [], [], 10.0) == ([], [])
