"""HAProxy as Serve configures and `raydix.cli.haproxy` starts it, before a stand-in for the ingress: who is let
through, who is not, and what they are told. No cluster, real sockets."""

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from benchmarks.hostile import connections
from raydix.cli.cluster import free_port, front
from raydix.configs.schema import HttpSection
from tests.integration.conftest import WAIT_S, eventually

HEADER_TIMEOUT_S = 3
CONNECTIONS = 100
BEGINNING = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


WAITING = threading.Semaphore(0)
"""Released for each request whose client is waited for."""
LEFT = threading.Semaphore(0)
"""Released for each of these clients when the backend hears that it has left."""


class Echo(BaseHTTPRequestHandler):
    """Answers with the headers that it was sent; for a path after how many seconds it says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Wait for the client to leave."""
        self.rfile.read(int(self.headers["content-length"]))
        WAITING.release()
        with contextlib.suppress(ConnectionError):
            self.connection.recv(1)
        LEFT.release()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Front:
    """A running HAProxy."""

    port: int
    other_ports: tuple[int, int]
    """Of its statistics and metrics."""
    process: subprocess.Popen[bytes]

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports."""
        found = psutil.Process(self.process.pid).net_connections()
        return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, headers: dict[str, str] | None = None, path: str = "/") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request("GET", path, headers=headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def send(self, data: bytes) -> bytes:
        """What comes back until the connection is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))


def started(
    folder: Path,
    http_port: int,
    backend_port: int | None,
    host: str = "127.0.0.1",
    header_timeout_s: int = HEADER_TIMEOUT_S,
) -> Front:
    """HAProxy with the configuration that Serve would write for one ingress replica, or before there is an
    application."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    ports = free_port(), free_port()
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=http_port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        stats_port=ports[0],
        metrics_port=ports[1],
        metrics_socket_path=str(folder / "metrics.sock"),
        has_received_routes=True,
        has_received_servers=True,
    )
    backends = {}
    if backend_port is not None:
        servers = [ServerConfig(name="replica", host="127.0.0.1", port=backend_port)]
        backends["app"] = BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
    HAProxyApi(config, backends, str(folder / "haproxy.cfg"))._generate_config_file_internal()
    section = HttpSection(host=host, header_timeout_s=header_timeout_s, connections_per_address=CONNECTIONS)
    environment = os.environ | front(folder, section)
    process = subprocess.Popen(
        [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(folder / "haproxy.cfg")],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    return Front(http_port, ports, process)


@pytest.fixture(scope="module")
def haproxy() -> Iterator[Front]:
    backend = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=backend.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="raydix-") as folder:  # short: sockets' paths are limited
        running = started(Path(folder), free_port(), backend.server_port)
        try:
            eventually(lambda: running.get()[0] == 200, "HAProxy answers")
            yield running
        finally:
            running.stop()
            backend.shutdown()
            backend.server_close()


def test_thousands_of_half_sent_requests_lock_nobody_out(haproxy: Front) -> None:
    """From a few addresses, as many as HAProxy takes in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with contextlib.ExitStack() as stack:
            for address in range(2, 44):
                stack.enter_context(connections(haproxy.port, CONNECTIONS, BEGINNING, f"127.0.0.{address}", 0.2))
            for _ in range(10):
                assert haproxy.get()[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_that_starts_has_clients_wait() -> None:
    """As one that starts again: clients try a 503 again by themselves, and give up after Serve's 404."""
    with tempfile.TemporaryDirectory(prefix="raydix-") as folder:
        running = started(Path(folder), free_port(), None)
        try:
            status, headers, body = eventually(lambda: running.get(path="/v1/models"), "HAProxy answers")
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "service_unavailable"
        finally:
            running.stop()


def test_a_client_that_leaves_while_it_waits_is_noticed(haproxy: Front) -> None:
    """With Serve's own configuration one in four was not, and HAProxy kept a core busy meanwhile."""
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", haproxy.port)) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n")
            connection.sendall(b"x" * 500)
            assert WAITING.acquire(timeout=WAIT_S), "the backend has the request"
    assert all(LEFT.acquire(timeout=WAIT_S) for _ in range(30)), "all are over"


def test_headers_that_do_not_come_end_the_connection(haproxy: Front) -> None:
    assert haproxy.send(BEGINNING).startswith(b"HTTP/1.1 408 ")


def test_one_address_has_a_limited_number_of_connections() -> None:
    """Their headers may take as long as the machine needs to open them all."""

    def is_refused(port: int) -> bool:
        """False while HAProxy's threads have not taken all connections of before."""
        with socket.socket() as connection:
            connection.bind(("127.0.0.3", 0))
            try:
                connection.connect(("127.0.0.1", port))
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return not connection.recv(1)
            except OSError:
                return True

    with tempfile.TemporaryDirectory(prefix="raydix-") as folder:
        front = started(Path(folder), free_port(), None, header_timeout_s=600)
        try:
            eventually(lambda: front.get()[0] == 503, "HAProxy answers")
            with connections(front.port, CONNECTIONS + 20, BEGINNING, "127.0.0.3"):
                eventually(lambda: is_refused(front.port), "one more is refused")
                assert front.get()[0] == 503, "another address is served"
            eventually(lambda: not is_refused(front.port), "its place is free again")
        finally:
            front.stop()


def test_a_request_id_that_is_no_text_is_dropped(haproxy: Front) -> None:
    def seen(request_id: bytes) -> str | None:
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: " + request_id + b"\r\n\r\n"
        headers: dict[str, str] = json.loads(haproxy.send(request).partition(b"\r\n\r\n")[2])
        return headers.get("x-request-id")

    assert seen(b"abc-1") == "abc-1"
    assert seen(b"\xff\xfe") is None
    assert seen(b"caf\xc3\xa9") is None


def test_a_session_id_becomes_text(haproxy: Front) -> None:
    def seen(header: bytes) -> str | None:
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n\r\n"
        headers: dict[str, str] = json.loads(haproxy.send(request).partition(b"\r\n\r\n")[2])
        assert "x_session_id" not in headers
        return headers.get("x-session-id")

    assert seen(b"Accept: */*") is None
    assert seen(b"X-Session-Id: my chat, 1") == "my chat, 1"
    assert seen(b"X-Session-Id: \xff\xfe") == "%FF%FE"
    assert seen(b"X-Session-Id: caf\xc3\xa9") == "caf%C3%A9"
    assert seen(b"X_Session_Id: \xff") is None


def test_a_server_on_loopback_shows_nothing_elsewhere(haproxy: Front) -> None:
    assert haproxy.listening() == {("127.0.0.1", port) for port in (haproxy.port, *haproxy.other_ports)}


def test_without_a_replica_the_error_is_openai_s() -> None:
    with tempfile.TemporaryDirectory(prefix="raydix-") as folder:
        running = started(Path(folder), free_port(), free_port())
        try:
            status, headers, body = eventually(running.get, "HAProxy answers")
            assert (status, json.loads(body)["error"]["code"]) == (503, "service_unavailable")
            assert headers["retry-after"]
        finally:
            running.stop()


def test_on_every_address_so_do_statistics() -> None:
    with tempfile.TemporaryDirectory(prefix="raydix-") as folder:
        running = started(Path(folder), free_port(), free_port(), host="0.0.0.0")
        try:
            eventually(running.get, "HAProxy answers")
            assert running.listening() == {("0.0.0.0", port) for port in (running.port, *running.other_ports)}
        finally:
            running.stop()
