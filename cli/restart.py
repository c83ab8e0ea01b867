"""`raydix serve --restart`: runs the server in a process of its own, and starts another after a failure.

Ray's GCS and raylet cannot be replaced in a running cluster, so the server ends when one of them dies; a new one begins
with the same configuration, port and folder of KV on disk. A server that fails again and again is given up.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from raydix.cli.flags import given

POLL_S = 0.25
# Environment variable with the supervisor's process id: a server whose parent has another id ends.
SUPERVISOR = "RAYDIX_SUPERVISOR"
CANNOT_START = 2  # exit code of a server whose configuration, model or port cannot be used
GIVEN_UP = 1
MAX_FAILURES = 5
WINDOW_S = 600.0  # period in which `MAX_FAILURES` failures make the supervisor give up
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0


@dataclass(slots=True)
class Restarts:
    """Decides when a failed server is started again, and when it is given up."""

    num_failures: int = 0
    _failed_at: list[float] = field(default_factory=list)
    """Within the window."""

    def failed(self, now: float) -> float | None:
        """Seconds to wait before the next start, doubled by each failure in the window; None to give up."""
        self.num_failures += 1
        self._failed_at = [at for at in self._failed_at if now - at < WINDOW_S] + [now]
        if len(self._failed_at) >= MAX_FAILURES:
            return None
        return min(FIRST_DELAY_S * 2.0 ** (len(self._failed_at) - 1), MAX_DELAY_S)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, across failures; returns the exit code."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    restarts = Restarts()
    while True:
        code = _serve(options, stop)
        if stop.is_set() or code == 0:
            return max(code, 0)
        if code == CANNOT_START and restarts.num_failures == 0:
            return code

        delay_s = restarts.failed(time.monotonic())
        if delay_s is None:
            _say(f"the server ended {MAX_FAILURES} times in {WINDOW_S:.0f} s; it is not started again")
            return GIVEN_UP

        _say(f"the server ended ({_how(code)}) and starts again in {delay_s:.0f} s")
        if stop.wait(delay_s):
            return 0


def is_orphaned() -> bool:
    """True if this server's supervisor has ended."""
    supervisor = os.environ.get(SUPERVISOR)
    return supervisor is not None and os.getppid() != int(supervisor)


def _serve(options: argparse.Namespace, stop: threading.Event) -> int:
    """Run one server to its end, which `stop` asks for; returns its exit code, minus the signal's number after a
    kill."""
    server = subprocess.Popen(_command(options), env={**os.environ, SUPERVISOR: str(os.getpid())})
    while server.poll() is None:
        if stop.wait(POLL_S):
            server.terminate()  # which does no harm to one that has heard Ctrl-C itself
            return server.wait()
    return server.returncode


def _command(options: argparse.Namespace) -> list[str]:
    options_given = {"--model": options.model, "--host": options.host, "--port": options.port}
    arguments = [str(word) for name, value in options_given.items() if value is not None for word in (name, value)]
    configs = [word for config in options.config or () for word in ("--config", config)]
    named = {"--quiet": getattr(options, "quiet", False), "--log-requests": getattr(options, "log_requests", False)}
    flags = [name for name, is_given in named.items() if is_given]
    return [sys.executable, "-m", "raydix.cli.main", "serve", *configs, *arguments, *flags, *given(options)]


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _say(text: str) -> None:
    print(f"raydix: {text}", file=sys.stderr, flush=True)
