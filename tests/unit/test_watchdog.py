"""The watchdog: it tells work that keeps a process to itself from a busy machine."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from raydix.actors.watchdog import LONG_S, Hold, Watchdog, lock_hold, work_for


@pytest.mark.parametrize(
    ("late_s", "waited_s", "used_s", "held_s"),
    [
        (0.5, 0.0, {1: 0.5, 2: 0.1}, 0.5),
        (0.5, 0.48, {1: 0.5}, None),  # the watchdog itself waited for a processor
        (0.5, 0.0, {1: 0.01}, None),  # nobody computed: the process was stopped, or the machine is busy
        (0.5, 0.0, {1: 0.2}, 0.2),
        (0.02, 0.0, {1: 0.5}, None),
        (0.5, 0.0, {}, None),
    ],
)
def test_a_hold_is_what_was_neither_waiting_nor_idle(
    late_s: float, waited_s: float, used_s: dict[int, float], held_s: float | None
) -> None:
    assert lock_hold(late_s, waited_s, used_s) == (None if held_s is None else Hold("lock", held_s, 1))


def compute(seconds: float) -> None:
    """Compute for so much processor time, with the interpreter's lock given to other threads in between."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def hold_the_lock(seconds: float) -> None:
    """Compute in one call of C code after the other, each of which holds the lock for longer than is allowed."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(40_000_000))


@pytest.mark.parametrize(("work", "of"), [(compute, "loop"), (hold_the_lock, "lock")])
def test_a_long_turn_is_reported_with_its_request(
    work: Callable[[float], None], of: str, caplog: pytest.LogCaptureFixture
) -> None:
    def abouts() -> list[dict[str, Any]]:
        return [record.__dict__["about"] for record in caplog.records]

    counted: list[Hold] = []

    async def run() -> None:
        watchdog = Watchdog(asyncio.get_running_loop(), counted.append)
        watchdog.start()
        try:
            work_for("r1")
            async with asyncio.timeout(60):
                while not (
                    any(each["of"] == of and each["request"] for each in abouts())
                    and any(hold.of == of and hold.seconds > 4 * LONG_S for hold in counted)
                ):
                    work(8 * LONG_S)
                    await asyncio.sleep(0)
        finally:
            await asyncio.to_thread(watchdog.stop)

    with caplog.at_level(logging.INFO, "raydix.actors.watchdog"):
        asyncio.run(run())
    for record, about in zip(caplog.records, abouts(), strict=True):
        assert about["event"] == "held" and about["request"] in ("r1", None) and about["held_s"] > LONG_S
        assert record.levelno == (logging.WARNING if about["request"] else logging.INFO)


def test_short_turns_and_idleness_are_not_reported() -> None:
    found: list[Hold] = []

    async def run() -> None:
        watchdog = Watchdog(asyncio.get_running_loop(), found.append)
        watchdog.start()
        end = time.thread_time() + 6 * LONG_S
        while time.thread_time() < end:
            compute(LONG_S / 50)
            await asyncio.sleep(0)
        time.sleep(4 * LONG_S)  # a turn that waits, and uses no processor
        await asyncio.sleep(0)
        await asyncio.to_thread(watchdog.stop)

    asyncio.run(run())
    assert not found
