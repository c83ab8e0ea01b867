"""Ray's node as `raydix serve` needs it, where no setting of Ray's says so.

* `with_agent_ports`: A raylet waits until the agent that it starts has written its ports down, and dies where that
  takes more than 15 s: a machine with other work may need longer for what the agent imports. A raylet that finds the
  ports written down goes on, and reaches its agents once they listen (`RAY_agent_register_timeout_ms`).
* `without_spare_processes`: A cluster of one machine and one server has no use for some processes, which cost seconds
  of its start.
* `secure_token`: Ray writes its token, which lets other programs into the cluster, with the permissions that the
  process's umask happens to leave, mostly for everybody to read; its readers may run any code in the cluster.
* `log_errors_of_rays_threads`: Ray's client starts threads that follow the cluster's messages. Where the cluster is
  stopped while it starts, they lose their connections in whatever way, and would print a traceback over the messages of
  `raydix serve`; the process itself notices and tells of the end.
* `StorePages`: The first touch of a page of shared memory takes some microseconds: a segment of KV would be written
  several times more slowly than later. Ray can take all pages at once (`RAY_preallocate_plasma_memory`), but its raylet
  answers nobody meanwhile, for 2.5 s with 1.75 GiB.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

# Parameters of Ray's node.
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
START = "start_raylet"  # method of Ray's node that starts its raylet


@contextmanager
def with_agent_ports(free_port: Callable[[], int]) -> Iterator[None]:
    """Have a raylet that is started while the block runs know the ports of its agents. There is no public way to name
    all of them."""
    from ray import _raylet
    from ray._private.node import Node

    library: Any = _raylet  # has no stubs for these names
    start_raylet = getattr(Node, START)

    def started(node: Any, *arguments: Any, **named: Any) -> None:
        for name in AGENT_PORTS:
            setattr(node._ray_params, name, free_port())
        # The raylet waits for this one although it is given, since the agent may fail to listen at it. The agent writes
        # the same file again.
        listen_port = node._ray_params.dashboard_agent_listen_port
        library.persist_port(node._session_dir, node._node_id, library.DASHBOARD_AGENT_LISTEN_PORT_NAME, listen_port)
        start_raylet(node, *arguments, **named)

    setattr(Node, START, started)
    try:
        yield
    finally:
        setattr(Node, START, start_raylet)


# Methods of Ray's node that start these processes. There is no public way to leave them out.
SPARED = (
    "start_monitor",  # asks a cloud for more machines
    "start_api_server",  # the dashboard's, started even without the dashboard; reports usage statistics, which are off
    "start_log_monitor",  # sends what workers print to programs that want it; `raydix` has log files instead
)


@contextmanager
def without_spare_processes() -> Iterator[None]:
    """Have Ray start none of them while the block runs."""
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in SPARED if hasattr(Node, name)}
    for name in before:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _start_nothing(*_: object, **__: object) -> None: ...


TOKEN_FILE = Path(".ray") / "auth_token"  # path under the user's home at which Ray looks for the token
TOKEN_BYTES = 32
OWNER_ONLY = 0o600


def secure_token(home: Path) -> None:
    """Make the token if there is none yet, and take an existing one's permissions from everybody but the owner.

    Does nothing if the environment names another mode, a token, or another file.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path = home / TOKEN_FILE
    with contextlib.suppress(OSError):  # a home without write permission, or of another user: Ray says so itself
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path)
        if path.stat().st_mode & 0o077:
            path.chmod(OWNER_ONLY)


def _create(path: Path) -> None:
    """Write a new token, whole or not at all; where two servers start at once the first one's counts."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def log_errors_of_rays_threads() -> None:
    """Have errors that end one of Ray's threads logged, and no longer printed; those of other threads stay as they
    are."""
    before = threading.excepthook
    if isinstance(before, _Hook):
        return
    threading.excepthook = _Hook(before)


class _Hook:
    """A `threading.excepthook` in front of another one."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._before = before

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        own = next((name for name in _modules(args.exc_traceback) if name != threading.__name__), "")
        if own.partition(".")[0] != "ray" or issubclass(args.exc_type, SystemExit):
            self._before(args)
            return
        thread = "a thread" if args.thread is None else args.thread.name
        logger.info(
            "%s of Ray's ended by %s: %s",
            thread,
            args.exc_type.__name__,
            args.exc_value,
            extra=about("ray_thread_ended", thread=thread, reason=args.exc_type.__name__),
        )


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """The modules whose functions an error passed through."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next


STORE = "/dev/shm/plasma"  # beginning of the name of the store's file, which Ray removes once it is open
# Taken by one call of the system, which ends some milliseconds later also where other processes leave little time.
PIECE_BYTES = 1 << 20
LOWEST = 19  # niceness of the thread: requests go first


class StorePages:
    """Takes the pages of the object store of a raylet from the system, in a thread of the lowest priority, from `start`
    to `stop`, while the server already serves. What already lies in the store stays as it is."""

    def __init__(self, raylet: int) -> None:
        """`raylet`: its process."""
        self._raylet = raylet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take, name="pages of the object store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more pages. The thread lets go of the store soon, which nobody waits for on a busy machine."""
        self._over.set()

    def join(self) -> None:
        """Wait until all pages are taken."""
        self._thread.join()

    def _take(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)  # of this thread alone, on Linux
        # Where the raylet has ended, or the system has no more memory, pages are taken when they are touched.
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{self._raylet}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if str(link.readlink()).startswith(STORE):
                        self._take_of(link)

    def _take_of(self, path: Path) -> None:
        with path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for begin in range(0, size, PIECE_BYTES):
                if self._over.is_set():
                    return
                os.posix_fallocate(file.fileno(), begin, min(PIECE_BYTES, size - begin))
