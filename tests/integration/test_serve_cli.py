"""`raydix serve` in a terminal: gets ready, answers, and leaves nothing behind when it is told to stop."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from raydix.cli.cluster import free_port
from raydix.cli.machine import this_machine
from raydix.configs.choose import choose
from raydix.engine.model.sources import DEFAULT_MODEL, NULL
from tests.integration.conftest import MODEL, WAIT_S, eventually
from tests.integration.local import require_default_model

STILL_S = 30.0
"""Interval in which a server that starts uses a processor, on the busiest machine."""
SHARED_MEMORY = "/dev/shm/"
MARK = "RAYDIX_TEST_MARK"
WITHOUT_MODEL = ("--config", "cpu_mixed", "--model", f"{NULL}{DEFAULT_MODEL}")
"""A server that starts quickly: one worker, which makes its tokens up."""
OPEN_FILES, CONNECTIONS = 256, 64
"""A low limit of the operating system, and the connections that a server takes under it."""


class Marked:
    """Processes that carry a mark in their environment, and so are found under any parent."""

    process: "subprocess.Popen[bytes]"

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """The mark, and no variable of another cluster."""
        return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {MARK: self._mark}

    def processes(self) -> list[psutil.Process]:
        """Every process that it has started, as a child or a grandchild or under another parent by now."""
        found = {process.pid: process for process in psutil.process_iter() if self._is_marked(process)}
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}
        return list(found.values())

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait(WAIT_S)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False


class Terminal(Marked):
    """`raydix serve` on a port of its own, and what it has written to its terminal."""

    def __init__(self, *arguments: str, open_files: int | None = None) -> None:
        """`open_files`: limit of every process."""
        super().__init__()
        self.port = free_port()
        self._output = bytearray()
        raydix = Path(sys.executable).with_name("raydix")
        self._master, slave = os.openpty()
        limited = [] if open_files is None else ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*limited, raydix, "serve", "--port", str(self.port), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**self.environment, "TERM": "xterm", "COLUMNS": "80"},
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def screen(self) -> str:
        """Without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._output.decode(errors="replace"))

    def shows(self, words: str) -> bool:
        assert self.process.poll() is None, self.screen
        return words in self.screen

    def until(self, words: str, count: int = 1) -> None:
        """Wait until the screen shows the words so many times, for as long as the server lives and uses a processor:
        a busy machine may need any time for a start."""
        used_s, look_at = -1.0, 0.0
        while not self.shows(words) or self.screen.count(words) < count:
            if time.monotonic() >= look_at:
                before_s, used_s, look_at = used_s, self.processor_s(), time.monotonic() + STILL_S
                assert used_s != before_s, f"stands still before {words!r}: {self.screen}"
            time.sleep(0.1)

    def processor_s(self) -> float:
        """Processor time of its processes that live."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    def log_files(self) -> list[Path]:
        """The files that it said its processes log to."""
        [folder] = re.findall(r"^logs: (\S+)/raydix-\*\.log", self.screen, re.MULTILINE)
        return sorted(Path(folder).glob("raydix-*.log*"))

    def shared_memory(self) -> set[Path]:
        """The files in shared memory that its processes have open or mapped."""
        paths = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                paths |= {Path(item.path) for item in process.memory_maps() if item.path.startswith(SHARED_MEMORY)}
                paths |= {file.readlink() for file in Path(f"/proc/{process.pid}/fd").iterdir()}
        return {path for path in paths if str(path).startswith(SHARED_MEMORY) and path.exists()}

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def close(self) -> None:
        self.kill()
        self._reader.join(WAIT_S)
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed when the process ends
            while data := os.read(self._master, 4096):
                self._output += data


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """With the arguments and the limit of open files that the test is parametrized with, or without a model's work."""
    require_default_model()
    arguments, open_files = getattr(request, "param", (WITHOUT_MODEL, None))
    terminal = Terminal(*arguments, open_files=open_files)
    try:
        yield terminal
    finally:
        terminal.close()


def assert_nothing_left(terminal: Terminal, processes: list[psutil.Process], shared_memory: set[Path]) -> None:
    """A process whose parent in Ray has died ends by itself, when it notices."""
    _, left = psutil.wait_procs([*processes, *terminal.processes()], timeout=WAIT_S)
    assert not left
    assert not [path for path in shared_memory if path.exists()]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", terminal.port)) != 0
    assert is_free(terminal.port)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    return True


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_quiet(screen: str) -> None:
    """No library writes on the terminal. A part may warn that another has no time for it, on a busy machine."""
    lines = [line.rpartition("\r")[2] for line in screen.replace("\r\n", "\n").splitlines()]
    disturbing = [line for line in lines if re.search(r"traceback|warn|error|exception", line, re.IGNORECASE)]
    # A host's line, that somebody does not answer and is killed, is none of these.
    assert [line for line in disturbing if not line.endswith(("does not answer", "does not answer a heartbeat"))] == []


def assert_killing_frees_its_port(terminal: Terminal) -> None:
    """Kill a running server. Of Ray's processes two notice the end only after a minute."""
    processes = [process for process in terminal.processes() if not process.name().startswith("ray::")]
    terminal.process.kill()
    eventually(lambda: is_free(terminal.port), "HAProxy has ended, too")
    eventually(lambda: not any(map(is_alive, processes)), "nor is anything else left")


def ctrl_c(terminal: Terminal) -> None:
    """The terminal sends it to every process of the group."""
    os.killpg(terminal.process.pid, signal.SIGINT)


def ctrl_c_twice(terminal: Terminal) -> None:
    ctrl_c(terminal)
    eventually(lambda: terminal.shows("stopping"), "it says that it stops")
    ctrl_c(terminal)


def terminate(terminal: Terminal) -> None:
    terminal.process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [((), None)], indirect=True, ids=["as it starts by itself"])
def test_it_serves_until_it_is_told_to_stop(terminal: Terminal) -> None:
    """By Ctrl-C, twice; a server that was started again is ended by SIGTERM."""
    terminal.until("ready after")
    terminal.until("}'")  # the end of the example, which may come in a later piece
    [line] = [line for line in terminal.screen.splitlines() if line.startswith("curl ")]
    words = shlex.split(line)
    request = urllib.request.Request(
        words[1], words[words.index("-d") + 1].encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        answer = json.load(response)
    assert answer["model"] == MODEL
    assert answer["choices"][0]["message"]["content"].strip()
    assert f"configuration {choose(this_machine()).config} for " in terminal.screen
    [(host, port)] = re.findall(r"Ray at (\S+):(\d+)", terminal.screen)
    socket.create_connection((host, int(port)), timeout=WAIT_S).close()

    processes, shared_memory = terminal.processes(), terminal.shared_memory()
    assert len(processes) > 8
    commands = [" ".join(process.cmdline()) for process in processes if process.is_running()]
    assert not [command for command in commands if re.search(r"/(monitor|log_monitor|dashboard)\.py", command)]
    ctrl_c_twice(terminal)
    assert terminal.wait() == 0
    assert_nothing_left(terminal, processes, shared_memory)
    assert_quiet(terminal.screen)
    assert terminal.screen.rstrip().endswith("stopping")


@pytest.mark.slow
def test_it_can_be_stopped_while_it_starts(terminal: Terminal) -> None:
    terminal.until("starting Ray")
    ctrl_c(terminal)
    assert terminal.wait() == 0
    assert_nothing_left(terminal, [], set())
    assert_quiet(terminal.screen)


def the_process(terminal: Terminal, name: str) -> psutil.Process:
    """The one of its processes whose name matches; others may end while their names are read."""
    [process] = [process for process in terminal.processes() if re.match(name, name_of(process))]
    return process


def name_of(process: psutil.Process) -> str:
    """Empty when the process has ended."""
    try:
        return process.name() if is_alive(process) else ""
    except psutil.NoSuchProcess:
        return ""


def ask(terminal: Terminal) -> int:
    """The status of a small request."""
    body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
    url = f"http://127.0.0.1:{terminal.port}/v1/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        status: int = response.status
        return status


def assert_few_open_files_cost_connections_and_no_answer(terminal: Terminal) -> None:
    """Four times as many clients as HAProxy takes: the others wait for their turn. HAProxy once took so many clients
    that it had no descriptor left for a replica, declared the replica dead, and answered 503."""
    words = " ".join(terminal.screen.split())
    assert f"may open {OPEN_FILES} files (ulimit -Hn): the server takes {CONNECTIONS} connections" in words
    num_clients = 4 * CONNECTIONS
    with ThreadPoolExecutor(num_clients) as clients:
        assert Counter(clients.map(lambda _: ask(terminal), range(num_clients))) == {200: num_clients}


@pytest.mark.slow
def test_a_raylet_that_dies_while_the_cluster_starts_ends_it(terminal: Terminal) -> None:
    terminal.until("starting the actors")
    processes = terminal.processes()
    died = the_process(terminal, "raylet")
    died.kill()
    assert terminal.wait() == 1
    words = " ".join(terminal.screen.split())
    assert f"raydix: Ray's raylet (process {died.pid}) has died; the server has ended with it" in words
    assert "Traceback" not in terminal.screen
    assert_nothing_left(terminal, processes, set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "terminal", [(("--restart", *WITHOUT_MODEL), OPEN_FILES)], indirect=True, ids=["with few open files"]
)
def test_it_shows_warnings_and_starts_again_when_ray_dies(terminal: Terminal) -> None:
    """A worker's death is a line, that of Ray's control store the end of all, with a reason; then all begins again. Few
    open files change none of that."""
    terminal.until("ready after")
    assert_few_open_files_cost_connections_and_no_answer(terminal)
    assert any(re.match("raydix-(decode|mixed)-", path.name) for path in terminal.log_files())
    the_process(terminal, "ray::(Decode|Mixed)Worker").kill()
    lost = r"WARNING kv_cache_manager \d+: lost (decode|mixed)"
    eventually(lambda: re.search(lost, terminal.screen), "a warning")

    processes = [process for process in terminal.processes() if process.pid != terminal.process.pid]
    shared_memory = terminal.shared_memory()
    died = the_process(terminal, "gcs_server")
    died.kill()
    terminal.until("starts again in 1 s")
    words = " ".join(terminal.screen.split())
    assert f"raydix: Ray's gcs_server (process {died.pid}) has died; the server has ended with it" in words
    assert "Traceback" not in terminal.screen
    assert not [process for process in processes if is_alive(process)]
    assert not [path for path in shared_memory if path.exists()]

    terminal.until("ready after", 2)
    assert ask(terminal) == 200
    processes, shared_memory = terminal.processes(), terminal.shared_memory()
    terminate(terminal)
    assert terminal.wait() == 0
    assert_nothing_left(terminal, processes, shared_memory)
