"""Errors of Ray's own threads are logged and not printed; those of other threads are printed as before."""

import logging
import threading
from types import FunctionType

import pytest

from raydix.cli.ray_node import log_errors_of_rays_threads

SOURCE = "def listen():\n    raise ConnectionError('the cluster has ended')\n"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of threads whose errors came to the hook before; the hook of then is back at the end."""
    names: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: names.append(args.thread.name))
    return names


def fail_in(module: str) -> None:
    """Run a thread to its error in a function of a module of this name."""
    made: dict[str, FunctionType] = {}
    exec(compile(SOURCE, "made", "exec"), {"__name__": module}, made)  # nothing but the text above
    thread = threading.Thread(target=made["listen"], name=f"thread of {module}")
    thread.start()
    thread.join()


def test_errors_of_rays_threads_are_logged(printed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    log_errors_of_rays_threads()
    with caplog.at_level(logging.INFO, "raydix.cli.ray_node"):
        fail_in("ray._private.worker")
    assert printed == []
    [record] = caplog.records
    assert record.message == "thread of ray._private.worker of Ray's ended by ConnectionError: the cluster has ended"
    assert record.levelno == logging.INFO and record.exc_info is None, "no traceback, and no line on the screen"


def test_errors_of_other_threads_are_printed(printed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    log_errors_of_rays_threads()
    log_errors_of_rays_threads()
    for module in ("rayon", "raydix.cli.log_lines"):
        fail_in(module)
    assert printed == ["thread of rayon", "thread of raydix.cli.log_lines"], "each once"
    assert not caplog.records


def test_the_hook_is_put_in_once(printed: list[str]) -> None:
    log_errors_of_rays_threads()
    hook = threading.excepthook
    log_errors_of_rays_threads()
    assert threading.excepthook is hook
