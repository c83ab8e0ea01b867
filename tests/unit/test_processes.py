"""Processes that hold their interpreter lock compute; stopped, dead and waiting ones do not."""

import os

import pytest

from raydix.actors.processes import ProcessWatch, own_process
from tests.unit.processes import WAITS, Process, running
from tests.unit.waits import until_outside

NODE = "node"


def has_computed(watch: ProcessWatch, process: Process, node: str = NODE) -> bool:
    """Two looks, a second apart by the watch's clock; in truth there is no time in which anybody begins to compute."""
    name = process.name(node)
    watch.computes(name, 0.0)
    return watch.computes(name, 1.0)


def test_a_process_that_holds_its_interpreter_lock_computes() -> None:
    with running() as process:
        # It has said that it begins, and is runnable from then on, however busy the machine is.
        until_outside(lambda: has_computed(ProcessWatch(NODE), process))


def test_a_process_that_waits_does_not() -> None:
    with running(WAITS) as process:
        until_outside(lambda: process.state() == "S")
        assert not has_computed(ProcessWatch(NODE), process)


def test_a_stopped_process_does_not_until_it_goes_on() -> None:
    with running() as process:
        process.stop()
        assert not has_computed(ProcessWatch(NODE), process)


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_dead_process_does_not(is_reaped: bool) -> None:
    watch = ProcessWatch(NODE)
    with running() as process:
        name = process.name(NODE)
        assert watch.computes(name, 0.0) or watch.computes(name, 0.1)
        process.kill(is_reaped=is_reaped)
        assert not watch.computes(name, 1.0)


def test_processes_that_cannot_be_seen_do_not() -> None:
    watch = ProcessWatch(NODE)
    with running() as process:
        assert not has_computed(watch, process, "another node")
        later = process.name(NODE)._replace(started=process.name(NODE).started + 1)
        assert not watch.computes(later, 0.0) and not watch.computes(later, 1.0), "another process had the id"
    assert not watch.computes(None, 0.0)


def test_a_process_knows_its_name() -> None:
    own = own_process(NODE)
    assert (own.node, own.pid) == (NODE, os.getpid()) and own.started > 0
    assert not ProcessWatch(NODE).computes(own, 0.0), "nobody vouches for itself"
