"""Every process of a server is killed or stopped while ten clients stream: no token is lost, changed or doubled.

`make test` runs the first few cases; `make chaos` all of them, writes the table of pauses, and holds these to bounds.
"""

import itertools
import os
import signal

import pytest

from tests.chaos.harness import NUM_OPEN, NUM_STREAMS, NUM_WORKERS, STOPPED_S, Case, Load, Outcome, run
from tests.integration.conftest import Server, eventually

ALWAYS = [
    Case(("decode",), "decode"),
    Case(("prefill",), "prefill"),
    Case(("manager",), "hand-over"),
    Case(("prefill", "manager"), "prefill"),
]
MOMENTS = ("prefill", "hand-over", "decode", "idle")
KILLED = ("prefill", "decode", "manager", "prefill host", "decode host", "manager host", "controller", "proxy")
STOPPED = ("prefill", "decode", "manager", "ingress")
STOPPED_ONCE = ("prefill host", "decode host", "manager host", "controller", "proxy", "HAProxy manager", "HAProxy")
"""Stopped while all streams decode, and at no other moment."""
AT_ONCE = (
    ("decode", "manager"),
    ("prefill", "decode"),
    ("decode", "decode"),
    ("decode", "ingress"),
    ("prefill", "decode", "manager"),
)
"""Killed at one instant, so that none can react to another one's death."""
IS_MEASURED = "RAYDIX_CHAOS_JSON" in os.environ
"""True where the table of pauses is written, on a quiet machine: elsewhere a pause may have any length."""
LONGEST_PAUSE_S = 30.0
"""Far above the goals, which the table is for: a request that hangs until something times out is found."""
MORE = [
    *(Case((), moment) for moment in MOMENTS),
    *(Case((victim,), moment) for victim in KILLED for moment in MOMENTS),
    *(Case((victim,), moment, signal.SIGSTOP) for victim in STOPPED for moment in MOMENTS),
    *(Case((victim,), "decode", signal.SIGSTOP) for victim in STOPPED_ONCE),
    Case(("decode", "decode"), "decode", signal.SIGSTOP),
    Case(("prefill", "prefill"), "prefill", signal.SIGSTOP),
    Case(("decode", "manager"), "decode", signal.SIGSTOP),
    *(Case((victim,), moment) for victim in ("ingress", "HAProxy", "HAProxy manager") for moment in ("decode", "idle")),
    Case(("decode", "decode"), "decode"),
    Case(("prefill", "prefill"), "prefill"),
    Case(("decode", "manager"), "decode"),
    Case(("manager", "decode"), "decode"),
    *(Case(victims, "decode", at_once=True) for victims in AT_ONCE),
]
CASES = [*ALWAYS, *(pytest.param(case, marks=pytest.mark.chaos) for case in MORE if case not in ALWAYS)]

_number = itertools.count()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_survive(pairs: Server, load: Load, case: Case, outcomes: list[Outcome]) -> None:
    outcome = run(pairs, case, load, f"case {next(_number)}")
    outcomes.append(outcome)
    if not case.breaks_connections:
        assert outcome.errors == []
        assert outcome.identical == NUM_STREAMS
        assert not IS_MEASURED or outcome.longest_pause_s < bound_s(case)
    assert outcome.unfinished >= NUM_OPEN, "a kill behind the last token tests nothing"
    assert outcome.survivors == [], "a kill that kills nobody tests nothing"
    assert outcome.failovers != 0 or not moves_streams(case), "a kill that no stream notices tests nothing"
    assert outcome.identical_again in (None, NUM_STREAMS)
    assert outcome.ended == [], "a process that stands still for a while was taken for dead"
    eventually(lambda: len(pairs.all_workers()) == NUM_WORKERS, "all workers are back")
    eventually(lambda: is_idle(pairs), "every block, lease and stream is given back")


def moves_streams(case: Case) -> bool:
    """Whether streams that decode lose the worker that has the most of them, and go on elsewhere."""
    return case.moment == "decode" and case.how is signal.SIGKILL and "decode" in case.victims


def bound_s(case: Case) -> float:
    """Bound of the longest pause: streams leave a worker or manager that stands still before the process goes on,
    unless there is no other."""
    if case.how is signal.SIGSTOP:
        return STOPPED_S + LONGEST_PAUSE_S if case.victims == ("ingress",) or len(case.victims) > 1 else STOPPED_S
    return LONGEST_PAUSE_S


def is_idle(server: Server) -> bool:
    """Nothing runs, nothing waits, nothing is held."""
    return server.manager()["num_reservations"] == 0 and all(
        worker["num_running"] == worker["num_waiting"] == 0 and worker["num_available_blocks"] == worker["num_blocks"]
        for worker in server.all_workers()
    )
