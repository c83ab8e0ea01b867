"""Ray's worker processes, forked from one process that has imported what they need.

A Ray cluster with Serve and the application has about ten worker processes, and each would import Ray, Serve and the
application for itself. Here the *template* imports them once, and the workers are forked from it, which takes some
milliseconds. The raylet starts `raydix.cli.worker_start` for each worker; that program hands the worker's arguments,
environment and open files over.

* The template computes nothing and has neither threads of its own nor a connection to Ray, so that a fork has all that
  it needs.
* It imports a part at a time, and forks in between: a worker that is asked for early imports the rest for itself.
* A worker is no child of the raylet, but in everything else like one that Ray starts: it registers by its id, has a
  process group of its own, and ends when it loses the raylet.
* Ray starts its workers itself on other nodes, with a `runtime_env`, when the template has died, when code has changed
  since it was imported, as before an update (`raydix deploy`), and where `RAYDIX_FORK_WORKERS` is 0.
"""

import contextlib
import gc
import marshal
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from raydix.cli import worker_start

# Environment variable: with 0 Ray starts its workers itself, as it also does on other systems than Linux.
FORK_WORKERS = "RAYDIX_FORK_WORKERS"
FIRST_WORKER = "-"
# Modules that workers import, in the order of their need; a function behind a colon is called. torch comes last: the
# tokenizer's libraries are to be imported without it. What stands behind `FIRST_WORKER` waits for the first worker to
# be forked: before, Ray's agents start, which need both cores.
PARTS = (
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.replica",
    "ray.serve._private.proxy",
    "ray.serve._private.haproxy",
    FIRST_WORKER,
    "raydix.actors.ingress.app",
    "raydix.actors.host",
    "raydix.engine.model.tokenizer:forgo_torch",
    "raydix.engine.model.build",
    "raydix.engine.model.loop",
    "raydix.configs",
    "raydix.kernels",
)
# Environment of the template beyond this process's: what libraries read where they are loaded, not where a worker
# begins.
FIXED = {
    "SPT_NOENV": "1",  # titles of processes leave the environment alone
    "OMP_WAIT_POLICY": "passive",  # read where torch is loaded; see `raydix.actors.worker.worker.compute_with`
    "RAY_JOB_ID": "ffffffff",  # none: a worker belongs to no job until it gets work
}
# Ray's setting of how soon the system ends a worker when memory runs out: by default before any other process. The
# raylet sets this for the process that it starts.
OOM_SCORE, RAYS_OOM_SCORE = "RAY_worker_oom_score_adjustment", "1000"
BACKLOG = 128  # workers that may be asked for while the template imports something
NUM_FILES = 3  # standard input, output and error
# Last argument of the template: room for the titles of workers, which are written over the arguments.
TITLE_ROOM = " " * 200


class Order(NamedTuple):
    """A worker as it is to be: what `raydix.cli.worker_start` was started with."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    blocked_signals: list[int]
    niceness: int
    open_files: tuple[int, int]
    """Soft and hard limit, which Ray raises before it starts the raylet."""
    files: list[int]


class WorkerTemplate:
    """The template of one cluster's workers, which ends with the process that started it."""

    def __init__(self, folder: Path, parts: Sequence[str] = PARTS) -> None:
        """`folder`: of this server alone. `parts`: what the template imports."""
        self._path = folder / "workers"
        # The socket listens before the template runs: whoever connects early is answered when it does.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(BACKLOG)
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), ",".join(parts), TITLE_ROOM],
                stdin=subprocess.PIPE,  # closed when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # workers have files of their own
                pass_fds=[listener.fileno()],
                # Ray has a worker look whether this process lives: the raylet, which does not exist yet (`_end_with`).
                env={**os.environ, **FIXED, worker_start.RAYLET_PID: str(os.getpid())},
            )

    @contextmanager
    def starts_workers(self) -> Iterator[None]:
        """Have a raylet that is started while the block runs take its workers from this template. There is no public
        way to name the program that a raylet starts."""
        from ray._private.node import Node

        start_raylet = Node.start_raylet

        def started(node: Any, *arguments: Any, **named: Any) -> None:
            parameters = node._ray_params
            os.environ |= self.environment(Path(parameters.worker_path).parent)
            # Python itself is to start quickly, too: the place of the first program gets its options.
            parameters.setup_worker_path, parameters.worker_path = "-IS", worker_start.__file__
            start_raylet(node, *arguments, **named)

        setattr(Node, start_raylet.__name__, started)
        try:
            yield
        finally:
            setattr(Node, start_raylet.__name__, start_raylet)

    def environment(self, rays_programs: Path) -> dict[str, str]:
        """Variables by which `raydix.cli.worker_start` finds the template, and the folder of Ray's own programs."""
        return {worker_start.TEMPLATE: str(self._path), worker_start.RAYS_PROGRAMS: str(rays_programs)}

    def communicate(self) -> None:
        """End the template; its workers go on."""
        self.process.kill()
        self.process.communicate()


def forks_workers() -> bool:
    return sys.platform == "linux" and os.environ.get(FORK_WORKERS) != "0"


def main() -> None:
    """Be the template until standard input is closed, or a worker that was forked."""
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        order = _be_template(listener)
    if order is not None:
        _be_worker(order)


def _be_template(listener: socket.socket) -> Order | None:
    """Import and fork until standard input is closed; returns an order in the worker that is to carry it out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal, for the server: the template ends with the server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: the system forgets those that have ended
    if sys.argv[2].startswith("ray."):
        _keep_rays_random_numbers_unused()
    left = list(filter(None, sys.argv[2].split(",")))
    imported = ImportedModules(left)
    while True:
        has_work = bool(left) and left[0] != FIRST_WORKER
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0 if has_work else None)
        if sys.stdin in ready:
            return None
        if not ready:
            imported.add(left.pop(0))
            if not left:
                gc.collect()
                gc.freeze()  # collections of workers are not to write to what the workers share
        elif order := _forked(listener, imported):
            return order
        elif left[:1] == [FIRST_WORKER]:
            left.pop(0)


def _keep_rays_random_numbers_unused() -> None:
    """Have classes of actors that are declared while the template imports get ids from the system. Ray's generator
    would otherwise be seeded here, and all forked workers would draw the same ids: two that start at the same time
    fail, with the same id for an object."""
    from ray import actor

    module: Any = actor
    original: Any = module.ActorClassID

    class FromSystem:
        @staticmethod
        def from_random() -> Any:
            return original(os.urandom(original.size()))

    module.ActorClassID = FromSystem


class ImportedModules:
    """What the template has imported, and whether the files are still the same: an update of a server that runs starts
    workers of other code."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._packages = {part.partition(".")[0] for part in parts}
        # Time of the last change of each file of these packages that was imported, in nanoseconds since the epoch.
        self._changed_at: dict[Path, int] = {}

    def add(self, part: str) -> None:
        """Import a module; call a function."""
        with contextlib.suppress(Exception):  # whoever needs this part will meet the same error, and tell of it
            found = pkgutil.resolve_name(part)
            if ":" in part:
                found()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in self._packages and (path := getattr(module, "__file__", None)):
                file = Path(path)
                self._changed_at.setdefault(file, file.stat().st_mtime_ns)

    def is_current(self) -> bool:
        """Whether no file has changed."""
        try:
            return all(file.stat().st_mtime_ns == time for file, time in self._changed_at.items())
        except FileNotFoundError:
            return False


def _forked(listener: socket.socket, imported: ImportedModules) -> Order | None:
    """Fork a worker for the process that connects; returns its order in the worker."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        order = _received(connection)
        if order is None:
            return None
        is_current = imported.is_current()
        if is_current and not os.fork():
            return order
        for file in order.files:
            os.close(file)
        if is_current:
            connection.send(b"1")
    return None


def _received(connection: socket.socket) -> Order | None:
    """The order of a connection; None if it is not whole."""
    head, files, _, _ = socket.recv_fds(connection, worker_start.FRAME.size, NUM_FILES, socket.MSG_WAITALL)
    with connection.makefile("rb") as rest:
        (length,) = worker_start.FRAME.unpack(head)
        content = rest.read(length)
    if len(content) < length:
        return None
    return Order(files=files, **marshal.loads(content))


def _be_worker(order: Order) -> None:
    """Run Ray's own program for workers, as the raylet would have started it."""
    os.setpgid(0, 0)  # the raylet ends the group of a worker that has ended
    os.nice(order.niceness - os.nice(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, order.open_files)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(order.environment.get(OOM_SCORE, RAYS_OOM_SCORE))
    for number, file in enumerate(order.files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    if (library := sys.modules.get("ray._raylet")) is not None:
        library.Config.initialize("")  # reads Ray's settings from the environment again
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked_signals)

    programs = order.environment[worker_start.RAYS_PROGRAMS]
    program = f"{programs}/{worker_start.WORKER}"
    sys.argv = [program, *order.arguments]
    sys.path[0] = programs
    threading.Thread(target=_end_with, args=[int(order.environment[worker_start.RAYLET_PID])], daemon=True).start()
    runpy.run_path(program, run_name="__main__")


def _end_with(pid: int) -> None:
    """End this process when another one has ended."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    os._exit(1)


if __name__ == "__main__":
    main()
