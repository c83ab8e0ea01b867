"""The applications that most of these tests use, behind real HTTP.

`one_process` computes the default model: what is about texts, fields and their form. `server` has a worker of each
role on a cluster, and computes a thin model (`thin_model`): what is about processes and the KV between them. Each test
leaves it idle and whole. Modules with a configuration of their own run after those, since each of them has the
application on the cluster replaced (`tests/integration/cluster.py`).
"""

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from raydix.actors.names import incarnation_name, namespace
from raydix.actors.rpc import find_manager
from raydix.cli.cluster import APP_NAME
from raydix.configs.sections import MANAGER

if TYPE_CHECKING:
    from tests.integration.cluster import Cluster

MODEL = "SmolLM2-135M-Instruct"
NUM_BLOCKS = 400
LOCAL_MODEL_LEN = 2048
"""Limit of tokens of `one_process`."""
WAIT_S = 290.0
"""After which a wait is hopeless, on a slow and busy machine, too: half of a test's own limit, which stands in
pyproject.toml. No test is about these seconds."""
CALL_S = 60.0
"""After which a call of an actor is given up; `eventually` makes it again."""
ORIGIN = "https://good.example"
"""Origin of pages that may use the server."""


@dataclass(frozen=True)
class Server:
    """The running application, as a client and as an operator see it."""

    host: str
    port: int
    api_key: str = "none"

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "application/json", "authorization": f"Bearer {self.api_key}"}

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, timeout: float = WAIT_S
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one exchange; `body` is JSON unless it is bytes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, self.headers)
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The answer to a greedy completion of fixed length that reports its token ids."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, _, data = self.request("POST", "/v1/completions", {**body, **fields})
        assert status == 200, data
        answer: dict[str, Any] = json.loads(data)
        return answer

    def stream(self, prompt: Any, **fields: Any) -> Generator[dict[str, Any]]:
        """The chunks of a streamed greedy completion, with usage; closing the iterator drops the connection."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **fields}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), self.headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def events(self, path: str) -> Generator[tuple[str, dict[str, Any]]]:
        """Named server-sent events with their data; closing the iterator drops the connection."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        try:
            connection.request("GET", path, headers=self.headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            kind = ""
            for line in response:
                if line.startswith(b"event: "):
                    kind = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    yield kind, json.loads(line[6:])
        finally:
            connection.close()

    def actor(self, actor_id: str) -> Any:
        """The living incarnation of an actor: the manager, or a worker by its id."""
        manager = asyncio.run(find_manager(APP_NAME))
        if manager is None:
            raise LookupError("there is no manager")
        if actor_id == MANAGER:
            return manager.handle
        return self._incarnations(manager.handle)[actor_id]

    def incarnations(self) -> list[Any]:
        """The registered workers."""
        return list(self._incarnations(self.actor(MANAGER)).values())

    def _incarnations(self, manager: Any) -> dict[str, Any]:
        """The registered workers by id."""
        import ray

        membership = ray.get(manager.workers.remote(), timeout=CALL_S)
        names = {worker.worker_id: incarnation_name(worker.worker_id, worker.epoch) for worker in membership.workers}
        return {worker_id: ray.get_actor(name, namespace=namespace(APP_NAME)) for worker_id, name in names.items()}

    def manager(self) -> dict[str, int]:
        import ray

        statistics: dict[str, int] = ray.get(self.actor(MANAGER).statistics.remote(), timeout=CALL_S)
        return statistics

    def all_workers(self) -> list[dict[str, Any]]:
        """Statistics of every registered worker; asking checks each engine's integrity."""
        import ray

        asked = [each.statistics.remote() for each in self.incarnations()]
        result: list[dict[str, Any]] = ray.get(asked, timeout=CALL_S)
        return result

    def workers(self) -> dict[str, dict[str, Any]]:
        """The same by role, where there is one worker of each."""
        return {statistics["role"]: statistics for statistics in self.all_workers()}

    def kill(self, statistics: dict[str, Any]) -> None:
        """End the process that sent these statistics as the kernel would when memory is short."""
        os.kill(statistics["pid"], signal.SIGKILL)

    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, nothing is held: what every test must leave behind."""
        workers = self.workers()
        return (
            {"prefill", "decode"} <= workers.keys()
            and self.manager()["num_reservations"] == 0
            and all(
                worker["num_running"] == worker["num_waiting"] == 0
                and worker["num_available_blocks"] == worker["num_blocks"]
                for worker in workers.values()
            )
        )


def eventually(condition: Callable[[], Any], what: str, pause_s: float = 0.05) -> Any:
    """The first true value of `condition`, asked for again after a pause; fails with `what` where that is hopeless."""
    from ray.exceptions import RayError

    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if value := condition():
                return value
        except (RayError, LookupError, ValueError, OSError):  # parts are away while they are replaced
            pass
        assert time.monotonic() < deadline, f"not in {WAIT_S:g} s: {what}"
        time.sleep(pause_s)


CONFIG: dict[str, Any] = {
    "model": {"max_model_len": 4096},
    "cache": {"num_blocks": NUM_BLOCKS, "segment_gib": 0.25},
    "workers": {
        "prefill": {"token_budget": 256, "max_requests": 16},
        "decode": {"token_budget": 128, "max_requests": 32},
    },
    "ingress": {"max_queued_requests": 40, "max_body_bytes": 1 << 20},
    "batches": {"concurrency": 4},
    "http": {"allowed_origins": [ORIGIN]},
}


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`raydix serve --local` with the limits of `server`."""
    from tests.integration.local import Process, require_default_model

    require_default_model()
    folder = tmp_path_factory.mktemp("one_process")
    sections = {
        **CONFIG,
        "model": {"max_model_len": LOCAL_MODEL_LEN},
        "workers": {"mixed": {"token_budget": 256, "max_requests": 32}},
        "batches": {"folder": str(folder / "batches")},
    }
    file = folder / "server.yaml"
    file.write_text(json.dumps(sections))
    running = Process("--config", str(file))
    try:
        running.until("ready after")
        yield Server("127.0.0.1", running.port)
    finally:
        running.end()


@pytest.fixture(scope="module")
def server(cluster: "Cluster") -> Server:
    batches = {**CONFIG["batches"], "folder": str(cluster.folder / "batches")}
    return cluster.serve({**CONFIG, "batches": batches}).server


LONG = ("test_kills", "test_resuming", "test_live_changes", "test_elastic", "test_tenants")
"""Modules with configurations of their own that take long: they come first, so that no process is left with one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules without a cluster first, for which none idles meanwhile, and modules with configurations of their own
    behind those that share one."""
    sharing = {item.path for item in items if "server" in getattr(item, "fixturenames", ())}
    own = {item.path for item in items if "cluster" in getattr(item, "fixturenames", ())} - sharing

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        return item.path in own, item.path in sharing, item.path in own and item.path.stem not in LONG

    items.sort(key=place)


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        running: Server = request.getfixturevalue("server")
        eventually(running.is_idle, "every block, lease and stream given back")
    if "one_process" in request.fixturenames:
        process: Server = request.getfixturevalue("one_process")
        eventually(
            lambda: json.loads(process.request("GET", "/load")[2])["server_load"] == 0, "every request has ended"
        )


def random_prompt(seed: int, length: int) -> list[int]:
    """Reproducible token ids without special tokens."""
    import random

    generator = random.Random(seed)
    return [generator.randrange(100, 40_000) for _ in range(length)]
