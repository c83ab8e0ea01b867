"""`raydix batch`, up to the server that answers, and the client that asks one."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from rich.console import Console

from raydix import client as client_module
from raydix.cli import batch as command
from raydix.cli import serve
from raydix.cli.main import main
from raydix.client import Client
from raydix.engine.api.batches import LineAnswer
from raydix.engine.batches import runner as runner_module
from raydix.engine.core.errors import RequestError, StartupError
from tests.unit.batch_files import Server, lines_of, objects_in, prompts_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.005)
    monkeypatch.setattr(command, "LOOK_S", 0.005)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines_of("a", "b", "c"))
    return path


Answer = Callable[[str, bytes, str | None], Awaitable[LineAnswer]]


def client_of(answer: Answer) -> Client:
    """A client of a handle whose `answer_line` is this."""
    remote = SimpleNamespace(answer_line=SimpleNamespace(remote=answer), options=lambda **_: None)
    return Client(remote)


def server_client(server: Server) -> Client:
    async def answer(url: str, body: bytes, tenant: str | None) -> LineAnswer:
        return await server.answer(url, body)

    return client_of(answer)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that `--address` finds."""
    import raydix

    server = Server()
    monkeypatch.setattr(raydix, "connect", lambda *_, **__: server_client(server))
    return server


SPLIT = ("--config", "cpu")
"""A configuration of several workers, which needs a cluster."""


def run(source: Path, *options: str) -> int:
    return main(["batch", str(source), "-o", str(source.with_name("out.jsonl")), *options])


def test_a_file_is_answered_by_a_running_server(source: Path, running: Server, capsys: Any) -> None:
    running.fails["b"] = 400
    assert run(source, "--address", "auto") == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"2 of 3 lines answered in {source.with_name('out.jsonl')}" in shown
    assert f"1 failed, in {source.with_name('out.errors.jsonl')}" in shown
    running.asked.clear()
    assert run(source) == 1 and running.asked == [], "nothing is left to do, so no server is started"


def test_all_lines_are_answered(source: Path, running: Server) -> None:
    assert run(source, "--address", "auto", "--concurrency", "1") == 0
    assert prompts_of(objects_in(source.with_name("out.jsonl").read_bytes())) == ["a", "b", "c"]
    assert running.most_running == 1


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (["--concurrency", "0"], None, "--concurrency must be at least 1"),
        ([], b"{", "line 1: This line is not valid JSON"),
        ([], b"", "has no lines"),
    ],
)
def test_what_cannot_begin_says_why_before_a_server_is_started(
    source: Path, options: list[str], content: bytes | None, message: str, capsys: Any
) -> None:
    if content is not None:
        source.write_bytes(content)
    assert run(source, *options) == 2
    assert message in capsys.readouterr().err
    assert run(source.with_name("none.jsonl")) == 2
    assert "No such file" in capsys.readouterr().err


def test_there_is_no_server(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import raydix

    def fail(*_: object) -> None:
        raise ConnectionError("none")

    monkeypatch.setattr(raydix, "connect", fail)
    assert run(source, "--address", "auto") == 2
    assert "there is no server at auto: none" in capsys.readouterr().err


class Cluster:
    """Stands in for `raydix.cli.serve.run_with`: runs the work in a thread, as with a server of its own."""

    def __init__(self, stop_when: Callable[[], bool] = lambda: False) -> None:
        self.overrides: dict[str, Any] = {}
        self._stop_when = stop_when

    def run_with(self, configs: Sequence[str] | None, overrides: Any, use: Any, *, stopped: int) -> int:
        self.overrides = overrides
        assert stopped == command.INTERRUPTED
        stop = threading.Event()

        def submit(work: Callable[[], None]) -> Any:
            thread = threading.Thread(target=work)
            thread.start()
            while thread.is_alive():
                thread.join(0.005)
                if self._stop_when():
                    stop.set()

        console = Console(stderr=True)
        use(SimpleNamespace(ray_thread=SimpleNamespace(submit=submit), console=console, stop=stop))
        return 0


def start(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setattr(serve, "run_with", cluster.run_with)
    monkeypatch.setattr(serve, "finish", lambda running, work: None)


def test_a_server_is_started_for_the_file_alone(source: Path, running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    start(monkeypatch, cluster)
    assert run(source, "--model", "other", *SPLIT) == 0
    assert cluster.overrides["model"] == {"source": "other"} and cluster.overrides["batches"] == {"gib": 0}
    assert cluster.overrides["http"]["host"] == "127.0.0.1"


def test_an_interruption_leaves_the_rest_to_the_next_call(
    source: Path, running: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    running.hangs.add("c")
    journal = source.with_name("out.jsonl.journal")
    start(monkeypatch, Cluster(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 3))
    assert run(source, *SPLIT) == command.INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err
    running.hangs.clear()
    running.asked.clear()
    start(monkeypatch, Cluster())
    assert run(source, *SPLIT) == 0 and running.asked == ["c"]


def test_the_client_runs_a_batch(source: Path, tmp_path: Path) -> None:
    summary = server_client(Server()).batch(source, tmp_path / "out.jsonl")
    assert (summary.num_lines, summary.num_completed, summary.num_failed) == (3, 3, 0)


def test_a_line_waits_for_a_server_that_is_away(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, failures = Server(), [RayActorError(), RayServeException("no replica")]
    tenants: list[str | None] = []

    async def answer(url: str, body: bytes, tenant: str | None) -> LineAnswer:
        tenants.append(tenant)
        if failures:
            raise failures.pop()
        return await server.answer(url, body)

    monkeypatch.setattr("raydix.engine.core.batches.lines.FIRST_PAUSE_S", 0.01)
    summary = client_of(answer).batch(source, tmp_path / "out.jsonl", tenant="t")
    assert summary.num_completed == 3 and len(tenants) == 5 and set(tenants) == {"t"}


def test_an_error_of_the_caller_ends_the_batch(source: Path, tmp_path: Path) -> None:
    async def answer(url: str, body: bytes, tenant: str | None) -> LineAnswer:
        raise RequestError("There is no tenant 't'.")

    with pytest.raises(RequestError, match="no tenant"):
        asyncio.run(client_of(answer).batch_async(source, tmp_path / "out.jsonl", tenant="t"))
    options = SimpleNamespace(source=source, output=tmp_path / "x", tenant="t", concurrency=None, address=None)
    console: Any = Console(stderr=True)
    given: Any = options
    with pytest.raises(StartupError, match="no tenant"):
        command._answer(client_of(answer), given, console, threading.Event())
    assert client_module.CONCURRENCY < command.OWN_CONCURRENCY
