"""Log files: every record whole and at once, in a form that a program can search, and without text of requests."""

import asyncio
import json
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raydix.actors.logs import (
    JsonFormatter,
    LogOrigin,
    RotatedFile,
    TextFormatter,
    install,
    keep_refusals_out_of_serves_log,
    log_to_ray,
)
from raydix.engine.core.errors import AuthenticationError, OverloadedError, RequestError, ServiceError
from raydix.engine.core.log_fields import about
from raydix.engine.serving.accounting import Refusals

SECRET = "the gardener did it"
WORKER = LogOrigin("decode", "10.0.0.7", 4711, worker="decode-a1")
INGRESS = LogOrigin("ingress", "10.0.0.7", 4712, sees_text=True)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of the project's, given back as it was found."""
    logger = logging.getLogger("raydix")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    for handler in [handler for handler in logger.handlers if handler not in handlers]:
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def write(logger: logging.Logger, tmp_path: Path) -> Callable[..., RotatedFile]:
    """Sends the project's records to a file in `tmp_path`."""

    def write(formatter: logging.Formatter, max_bytes: int = 0, num_backups: int = 0) -> RotatedFile:
        handler = RotatedFile(tmp_path / "raydix-x-1.log", max_bytes, num_backups)
        handler.setFormatter(formatter)
        install(handler, "INFO")
        return handler

    return write


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail() -> None:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        raise KeyError(SECRET) from error


def test_a_record_says_when_who_what_and_about_what(write: Callable[..., RotatedFile]) -> None:
    path = write(JsonFormatter(WORKER)).path
    log = logging.getLogger("raydix.actors.worker.worker")
    log.info("%d blocks", 3, extra=about("moved", request="r-1", attempt=2))
    log.debug("not written")
    [record] = records(path)
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "INFO",
        "process": "decode",
        "pid": 4711,
        "node": "10.0.0.7",
        "logger": "raydix.actors.worker.worker",
        "worker": "decode-a1",
        "event": "moved",
        "request": "r-1",
        "attempt": 2,
        "message": "3 blocks",
    }


def test_a_line_is_a_record_whatever_the_message_holds(
    write: Callable[..., RotatedFile], logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", False)  # pytest keeps messages, and xdist can send no half pair
    path = write(JsonFormatter(WORKER)).path
    message = 'two\nlines, a "quote", \x1b[31m and half a pair \ud83d'
    logging.getLogger("raydix.actors").warning(message, extra=about("odd", value=object()))
    assert len(path.read_bytes().splitlines()) == 1


def test_a_worker_tells_what_an_error_said_and_the_process_that_sees_text_does_not(
    write: Callable[..., RotatedFile],
) -> None:
    for origin in (WORKER, INGRESS):
        path = write(JsonFormatter(origin)).path
        try:
            fail()
        except KeyError:
            logging.getLogger("raydix.actors").exception("failed")
    told, kept = (record["exception"] for record in records(path))
    assert SECRET in told
    assert SECRET not in kept
    assert "ValueError" in kept and "KeyError" in kept and "in fail" in kept
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task exception=%s>", SECRET)
    assert SECRET not in path.read_text().splitlines()[-1]


def test_a_record_that_does_not_fit_on_the_disk_leaves_no_half_line(
    write: Callable[..., RotatedFile], tmp_path: Path
) -> None:
    """A limit of the size of files stands in for a full disk: the last write is cut short in the same way."""
    handler, log = write(JsonFormatter(INGRESS)), logging.getLogger("raydix.actors.x")
    log.info("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (handler.path.stat().st_size + 20, limits[1]))
    try:
        log.info("too long")
        log.info("too long, too")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.info("after")
    assert [record["message"] for record in records(handler.path)] == ["before", "after"]


def test_text_has_the_same_fields(write: Callable[..., RotatedFile]) -> None:
    path = write(TextFormatter(WORKER)).path
    logging.getLogger("raydix.actors.worker.worker").warning("slow", extra=about("slow", request="r-1"))
    [line] = path.read_text().splitlines()
    assert line.endswith("Z WARNING decode 4711: slow [raydix.actors.worker.worker event=slow request=r-1]")


def test_files_rotate_by_size_and_lose_only_the_oldest(write: Callable[..., RotatedFile]) -> None:
    path = write(JsonFormatter(WORKER), max_bytes=1000, num_backups=2).path
    for number in range(50):
        logging.getLogger("raydix.actors").info("%d", number)
    files = [path.with_name(path.name + ending) for ending in (".2", ".1", "")]
    assert sorted(path.parent.iterdir()) == sorted(files)
    assert all(0 < file.stat().st_size <= 1000 for file in files)
    kept = [int(record["message"]) for file in files for record in records(file)]
    assert kept == list(range(kept[0], 50))


def test_a_full_disk_stops_nobody(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    handler = RotatedFile(Path("/dev/full"), 0, 0)
    handler.setFormatter(JsonFormatter(WORKER))
    install(handler, "INFO")
    logging.getLogger("raydix.actors").error("lost")
    logging.getLogger("raydix.actors").error("lost, too")
    assert capsys.readouterr() == ("", "")


def test_a_killed_process_has_written_all_that_it_logged(tmp_path: Path) -> None:
    """In a process of its own, since what SIGKILL takes along cannot be seen in this one."""
    program = f"""
import logging, os, signal
from pathlib import Path
from raydix.actors.logs import JsonFormatter, LogOrigin, RotatedFile, install
handler = RotatedFile(Path({str(tmp_path)!r}) / "log", 0, 0)
handler.setFormatter(JsonFormatter(LogOrigin("x", "n", 1)))
install(handler, "INFO")
for number in range(100):
    logging.getLogger("raydix.actors").info("%d", number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [record["message"] for record in records(tmp_path / "log")] == [str(number) for number in range(100)]


def test_serve_s_log_leaves_out_refused_calls_of_a_handle(caplog: pytest.LogCaptureFixture) -> None:
    serves = logging.getLogger("ray.serve")
    before = list(serves.filters)
    serves.addHandler(caplog.handler)
    keep_refusals_out_of_serves_log()
    try:
        for error in (RequestError("a prompt"), ServiceError("no room"), OSError("a fault")):
            try:
                raise error
            except Exception:
                serves.exception("Request failed.")
    finally:
        serves.removeHandler(caplog.handler)
        serves.filters[:] = before
    assert "a prompt" not in caplog.text and "no room" not in caplog.text and "a fault" in caplog.text


def test_nothing_is_written_where_ray_does_not_run(logger: logging.Logger) -> None:
    handlers = list(logger.handlers)
    assert log_to_ray("decode") is None
    assert logger.handlers == handlers


@pytest.mark.parametrize("request_id", ["r-1", None])
def test_the_id_in_the_body_of_a_500_finds_the_record(
    write: Callable[..., RotatedFile], request_id: str | None
) -> None:
    from starlette.requests import Request

    from raydix.actors.ingress.application import unexpected_error

    path = write(JsonFormatter(INGRESS)).path
    request = Request({"type": "http", "method": "POST", "path": f"/v1/{SECRET}", "headers": [], "state": {}})
    if request_id is not None:
        request.state.request_id = request_id
    try:
        fail()
    except KeyError as error:
        response = asyncio.run(unexpected_error(request, error))
    assert response.status_code == 500
    [record] = records(path)
    assert json.loads(bytes(response.body))["error"]["message"].endswith(f"logged as {record['error']}.")
    assert record["request"] == request_id
    assert "in fail" in record["exception"]
    assert SECRET not in path.read_text()


class TestRefusals:
    """The first is told at once, the others together."""

    def test_counts_by_code_and_at_most_one_line_in_an_interval(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "raydix")

        async def refuse() -> None:
            refusals = Refusals(interval_s=0.05)
            for _ in range(100):
                refusals.add(OverloadedError(SECRET))
                refusals.add(RequestError(SECRET))
            while len(caplog.records) < 2:
                await asyncio.sleep(0.005)

        asyncio.run(refuse())
        first, second = caplog.records
        assert first.about["counts"] == {"overloaded": 1}  # type: ignore[attr-defined]
        assert second.about["counts"] == {"overloaded": 99, "invalid_request": 100}  # type: ignore[attr-defined]
        assert SECRET not in caplog.text

    @pytest.mark.parametrize(
        ("error", "level"),
        [
            (OverloadedError("busy"), logging.WARNING),
            (AuthenticationError("who"), logging.WARNING),
            (RequestError("bad"), logging.INFO),
        ],
    )
    def test_only_what_concerns_the_operator_is_a_warning(
        self, caplog: pytest.LogCaptureFixture, error: Any, level: int
    ) -> None:
        caplog.set_level(logging.INFO, "raydix")

        async def refuse() -> None:
            Refusals().add(error)

        asyncio.run(refuse())
        assert [record.levelno for record in caplog.records] == [level]
