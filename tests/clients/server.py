"""`raydix serve` for clients: a process of its own, since their environments do not have raydix."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv/bin"
CONFIG = ROOT / "configs/cpu_mixed.yaml"
URL_VARIABLE = "RAYDIX_CLIENTS_URL"
"""Server to be used instead of one of these tests' own."""
MODEL = "SmolLM2-135M-Instruct"
READY_S = 300
STOPPED_S = 60


@dataclass(frozen=True, slots=True)
class Server:
    """A server as clients know it: an address and a model."""

    url: str
    model: str = MODEL

    @property
    def openai_url(self) -> str:
        """The address that OpenAI's clients want."""
        return f"{self.url}/v1"


@contextmanager
def serving(folder: Path, *options: str, model: str = MODEL) -> Iterator[Server]:
    """Serve the default model, or what the options of `raydix serve` say, until the end of the block. Log,
    configuration and batches lie in `folder`.

    Raises:
        RuntimeError: the server ended before it was ready, or was not ready in time.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    port = _free_port()
    server = Server(f"http://127.0.0.1:{port}", model)
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [BIN / "raydix", "serve", "--config", str(_configuration(folder)), "--port", str(port), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**own, "PYTHONPATH": str(ROOT)},  # this checkout's code, where several share an environment
            start_new_session=True,
        )
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        _stop(process)


def model_folder() -> Path:
    """The folder of the default model, with its tokenizer."""
    script = "from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model; print(resolve_model(DEFAULT_MODEL))"
    command: list[str | Path] = [BIN / "python", "-c", script]
    found = subprocess.check_output(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    return Path(found.strip().splitlines()[-1])


def _configuration(folder: Path) -> Path:
    """The configuration `cpu_mixed`, with batches in a folder that nobody else uses."""
    path = folder / "cpu_mixed.yaml"
    path.write_text(f"{CONFIG.read_text()}batches:\n  folder: {folder / 'batches'}\n")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not _is_healthy(server):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server is not ready:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.5)


def _is_healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop the server in order, or all that it has started where it takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOPPED_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
