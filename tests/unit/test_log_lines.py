"""Warnings of every process in the terminal of `raydix serve`, each once, across rotations."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydix.actors.logs import JsonFormatter, LogOrigin, RotatedFile, TextFormatter
from raydix.cli.log_lines import MAX_LINES, EventHandler, LogFollower, events_of
from raydix.cli.main import parser
from raydix.cli.restart import _command
from raydix.engine.core.log_fields import about


class Writer:
    """A process that logs."""

    def __init__(self, folder: Path, name: str, max_bytes: int = 0, is_json: bool = True) -> None:
        origin = LogOrigin(name, "10.0.0.7", 1)
        self._handler = RotatedFile(folder / f"raydix-{name}-1.log", max_bytes, 1)
        self._handler.setFormatter(JsonFormatter(origin) if is_json else TextFormatter(origin))

    def log(self, level: int, message: str, error: Exception | None = None, event: str | None = None) -> None:
        info = None if error is None else (type(error), error, error.__traceback__)
        record = logging.LogRecord("actors", level, __file__, 1, message, (), info)
        if event is not None:
            vars(record).update(about(event, count=3))
        self._handler.handle(record)

    def close(self) -> None:
        self._handler.close()


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def follower(tmp_path: Path, shown: list[str]) -> Iterator[LogFollower]:
    follower = LogFollower(tmp_path, shown.append)
    follower.start()
    yield follower
    follower.stop()


def messages(lines: list[str]) -> list[str]:
    return [line.split(": ", 1)[1] for line in lines]


@pytest.mark.parametrize("is_json", [True, False])
def test_warnings_of_all_processes(tmp_path: Path, shown: list[str], is_json: bool) -> None:
    follower = LogFollower(tmp_path, shown.append)
    first, second = Writer(tmp_path, "decode", is_json=is_json), Writer(tmp_path, "ingress", is_json=is_json)
    first.log(logging.INFO, "fine")
    first.log(logging.WARNING, "careful")
    second.log(logging.ERROR, "two\nlines", ValueError("bad"))
    follower.look()
    assert len(shown) == 2
    assert "WARNING decode 1: careful" in shown[0]
    assert "ERROR ingress 1: two" in shown[1]
    second.log(logging.WARNING, "later")
    follower.look()
    assert len(shown) == 3 and "later" in shown[2]


@pytest.mark.parametrize("is_json", [True, False])
def test_events_that_are_asked_for(tmp_path: Path, shown: list[str], is_json: bool) -> None:
    follower = LogFollower(tmp_path, shown.append, frozenset({"load"}))
    writer = Writer(tmp_path, "ingress", is_json=is_json)
    writer.log(logging.INFO, "load: 3 requests [so many]", event="load")
    writer.log(logging.INFO, "r stop", event="request")
    writer.log(logging.INFO, "load of another kind")
    writer.log(logging.WARNING, "too much", event="load")
    follower.look()
    assert len(shown) == 2 and "WARNING ingress 1: too much" in shown[0], "a warning is shown as one, and once"
    time, _, message = shown[1].partition(" ")
    assert message == "load: 3 requests [so many]" and len(time.split(":")) == 3
    for number in range(3 * MAX_LINES):
        writer.log(logging.INFO, str(number), event="load")
    follower.look()
    assert len(shown) == 2 + 3 * MAX_LINES, "each request of a busy server"


@pytest.mark.parametrize(
    ("options", "is_terminal", "events"),
    [
        ([], True, ["load"]),
        ([], False, []),
        (["--quiet"], True, []),
        (["--log-requests"], False, ["request"]),
        (["--log-requests"], True, ["load", "request"]),
        (["--log-requests", "--quiet"], True, ["request"]),
    ],
    ids=str,
)
def test_options_choose_the_events(options: list[str], is_terminal: bool, events: list[str]) -> None:
    given = parser().parse_args(["serve", *options])
    assert events_of(given, is_terminal=is_terminal) == set(events)
    words = _command(given)
    assert [word for word in words if word in ("--quiet", "--log-requests")] == sorted(options, reverse=True)


def test_records_of_this_process_are_shown_by_event(shown: list[str]) -> None:
    logger = logging.Logger("accounting")
    logger.addHandler(EventHandler(frozenset({"request"}), shown.append))
    logger.info("%s stop", "r", extra=about("request", request="r"))
    logger.info("other", extra=about("load"))
    logger.info("nothing")
    logger.warning("bad", extra=about("request"))
    assert [line.partition(" ")[2] for line in shown] == ["r stop"]


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path, shown: list[str]) -> None:
    follower = LogFollower(tmp_path, shown.append)
    writer = Writer(tmp_path, "decode")
    writer.log(logging.WARNING, "careful")
    path = tmp_path / "raydix-decode-1.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    follower.look()
    assert shown == []
    with path.open("ab") as file:
        file.write(whole[-20:])
    follower.look()
    assert messages(shown) == ["careful"]


def test_each_warning_once_across_rotations(tmp_path: Path, shown: list[str]) -> None:
    follower = LogFollower(tmp_path, shown.append)
    writer = Writer(tmp_path, "decode", max_bytes=1000)
    for number in range(30):
        writer.log(logging.WARNING, str(number))
        follower.look()
    assert messages(shown) == [str(number) for number in range(30)]


def test_a_flood_is_summed_up(tmp_path: Path, shown: list[str]) -> None:
    follower = LogFollower(tmp_path, shown.append)
    writer = Writer(tmp_path, "decode")
    for number in range(MAX_LINES + 5):
        writer.log(logging.WARNING, str(number))
    follower.look()
    assert len(shown) == MAX_LINES + 1
    assert shown[-1] == f"5 more warnings in {tmp_path}"


def test_nonsense_is_passed_over(tmp_path: Path, shown: list[str]) -> None:
    follower = LogFollower(tmp_path, shown.append)
    (tmp_path / "raydix-x-1.log").write_bytes(b'{"level": \n{}\n{"level": "INFO"}\n\n\xff\xfe\n    in fail\n')
    follower.look()
    assert shown == []


def test_it_ends(follower: LogFollower) -> None:
    follower.stop()
