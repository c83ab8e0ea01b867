"""Requests that every worker would be late with: they wait, are refused, or give way to others."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import LateError
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.objectives import LATE_PRIORITY, Late, Objectives, WhenLate
from raydix.engine.core.types import Admission, AdmitRequest, Role

MakeDirectory = Callable[..., Directory]
COSTS = WorkerCosts(0.0, 1e-3, 0.0, import_s=1.0, spread=0.0)
"""A prompt token takes a millisecond, and nothing else takes any time."""


@pytest.fixture
def worker(make_directory: MakeDirectory) -> Directory:
    """One worker."""
    return with_workers(make_directory(), "a")


def with_workers(directory: Directory, *names: str) -> Directory:
    for name in names:
        directory.register(name, Role.MIXED, 1, 10, ())
        directory.fleet.measured(name, 1, COSTS, num_free_blocks=1000)
    return directory


def admit(
    directory: Directory,
    name: str,
    num_tokens: int,
    when_late: WhenLate | None = None,
    *,
    ttft_s: float | None = 1.0,
    priority: int = 0,
    attempt: int = 0,
) -> Admission:
    objectives = Objectives(ttft_s, when_late=when_late)
    request = AdmitRequest(name, attempt, (), num_tokens, objectives=objectives, priority=priority)
    return directory.admit(request, 0.0)[0]


def explained(directory: Directory, name: str) -> dict[str, Any]:
    [decision] = directory.decisions.of(name)[name]
    return decision.as_json()


def test_a_late_request_waits_unless_it_says_otherwise(worker: Directory) -> None:
    assert not admit(worker, "early", 900).gives_way
    assert not admit(worker, "late", 200).gives_way
    shown = {name: explained(worker, name) for name in ("early", "late")}
    assert [shown[name]["late"] for name in shown] == [None, "wait"]
    assert shown["late"]["objective_ttft_s"] == 1.0 < shown["late"]["predicted_ttft_s"]
    assert not admit(worker, "indifferent", 5000, WhenLate.GIVE_WAY, ttft_s=None).gives_way
    assert explained(worker, "indifferent")["late"] is explained(worker, "indifferent")["objective_ttft_s"] is None


def test_a_request_that_gives_way_makes_nobody_late(worker: Directory) -> None:
    admit(worker, "first", 900)
    assert admit(worker, "long", 5000, WhenLate.GIVE_WAY).gives_way
    assert explained(worker, "long")["late"] == "give_way"
    admit(worker, "short", 50, WhenLate.REFUSE)
    assert explained(worker, "short")["predicted_ttft_s"] == pytest.approx(0.95), "the long one is not counted"
    assert admit(worker, "second", 70, WhenLate.GIVE_WAY).gives_way
    assert explained(worker, "second")["predicted_ttft_s"] == pytest.approx(6.02), "of those behind, all are"
    worker.first_token("long", 0, 1.0)
    worker.end_request("second", 2.0)
    assert worker.fleet["a"].behind_us == 0 < worker.fleet["a"].queued_us


def test_requests_that_give_way_spread(make_directory: MakeDirectory) -> None:
    directory = with_workers(make_directory(), "a", "b")
    for name in ("first", "second"):
        admit(directory, name, 1000)
    admissions = [admit(directory, f"late{number}", 500, WhenLate.GIVE_WAY) for number in range(4)]
    assert all(each.gives_way for each in admissions)
    assert sorted(each.prefill for each in admissions) == ["a", "a", "b", "b"]


def test_lines_of_batches_make_nobody_late(worker: Directory) -> None:
    for number in range(9):
        admit(worker, f"line{number}", 1000, ttft_s=None, priority=2**63 - 1)
    assert explained(worker, "line8")["predicted_ttft_s"] == pytest.approx(9.0)
    admit(worker, "client", 50, WhenLate.REFUSE)
    assert explained(worker, "client")["predicted_ttft_s"] == pytest.approx(0.05)


def test_a_request_under_way_is_neither_refused_nor_put_behind(worker: Directory) -> None:
    admit(worker, "under way", 900, WhenLate.REFUSE)
    admit(worker, "first", 900)
    for when_late in WhenLate:
        assert not admit(worker, "under way", 900, when_late).gives_way, "its worker was not there"
        assert not admit(worker, f"moved {when_late}", 900, when_late, attempt=1).gives_way
    with pytest.raises(LateError, match="later than the objective of 1,000 ms"):
        admit(worker, "new", 900, WhenLate.REFUSE)
    assert "new" not in worker.fleet["a"].requests


def test_a_request_that_gave_way_goes_on_behind_others(worker: Directory) -> None:
    admit(worker, "late", 2000, WhenLate.GIVE_WAY)
    assert not admit(worker, "late", 2000, WhenLate.GIVE_WAY, priority=LATE_PRIORITY, attempt=1).gives_way
    assert worker.fleet["a"].behind_us == worker.fleet["a"].queued_us > 0, "its priority says so by now"


def test_the_refusal_reaches_callers_in_other_processes() -> None:
    error = pickle.loads(pickle.dumps(LateError(Late(predicted_s=3.0, objective_s=1.0))))
    assert isinstance(error, LateError) and error.retry_after_s == 2 and "after 3,000 ms" in error.message
