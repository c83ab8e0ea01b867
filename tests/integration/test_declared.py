"""The Serve config of the Helm chart on a Ray cluster, changed by a PUT to the dashboard as KubeRay does.

Limits, keys and numbers of replicas change while every other process stays; a wrong `user_config` changes nothing.
"""

import http.client
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from raydix.cli.cluster import SERVE_SWITCHES, free_port, own_places
from raydix.engine.core.tenants import key_hash
from raydix.engine.model.sources import DEFAULT_MODEL, NULL
from tests import helm
from tests.chaos.harness import Stream
from tests.integration.cluster import PARTS
from tests.integration.conftest import WAIT_S, Server, eventually, random_prompt
from tests.integration.local import require_default_model
from tests.integration.test_serve_cli import Marked
from tests.skips import NO_HELM

pytestmark = pytest.mark.skipif(helm.executable() is None, reason=NO_HELM)

STREAM_TOKENS = 1500
LIMIT = 16
"""Of requests under way. A tenant's share of it has room for a stream that begins while the one before is put away."""
VALUES: dict[str, Any] = {
    "model": {"source": f"{NULL}{DEFAULT_MODEL}"},
    "tenants": {"secret": "raydix-tenants"},
    "cache": {"segmentGib": 0.05, "swapGib": 0.05},
    "pools": {"mixed": {"pods": {"min": 1, "max": 2}}},
}
"""Values on top of `values/cpu.yaml`: one worker, which makes its tokens up."""


def write_tenants(file: Path, *names: str) -> None:
    """Replace the file in one step, as Kubernetes does with a Secret's."""
    draft = file.with_suffix(".new")
    tenants = [{"name": name, "key_hashes": [key_hash(f"rdx-{name}")]} for name in names]
    draft.write_text(yaml.safe_dump({"tenants": tenants}))
    draft.replace(file)


class Head(Marked):
    """A Ray node with a dashboard, and a Serve application that the dashboard is given."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._token = secrets.token_hex(32)
        self.dashboard, self.http = free_port(), free_port()
        self.tenants = folder / "tenants.yaml"
        ports = {"port": free_port(), "dashboard-port": self.dashboard, "ray-client-server-port": free_port()}
        ports |= {"dashboard-agent-listen-port": free_port(), "metrics-export-port": free_port()}
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
        command += ["--node-ip-address=127.0.0.1", "--num-cpus=8", f"--object-store-memory={400 << 20}"]
        command += ["--disable-usage-stats", "--labels=raydix-role=node", f"--temp-dir={folder / 'ray'}"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        environment = {**self.environment, **SERVE_SWITCHES, **own_places(folder), "PYTHONPATH": str(Path.cwd())}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token, "RAY_preallocate_plasma_memory": "0"}
        self._command, self._environment, self._log = command, environment, folder / "ray.log"
        self.process = self._start()
        try:
            eventually(self._answers, "the dashboard answers")
        except BaseException:
            self.kill()
            raise

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def _answers(self) -> bool:
        # Nothing of raydix runs yet. On a machine with other work parts of Ray give up by themselves, after 15 or 30 s
        # that no setting changes, and the node with them.
        if self.process.poll() is not None:
            self.process = self._start()
        return self.dashboards("GET")[0] == 200

    @property
    def server(self) -> Server:
        return Server("127.0.0.1", self.http, "rdx-alice")

    def dashboards(self, method: str, body: Any = None) -> tuple[int, bytes]:
        """The dashboard's answer about Serve's applications."""
        connection = http.client.HTTPConnection("127.0.0.1", self.dashboard, timeout=WAIT_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        try:
            connection.request(method, "/api/serve/applications/", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def serve_config(self, **values: Any) -> dict[str, Any]:
        """The chart's `serveConfigV2` with other values, on this one node."""
        text = helm.template(helm.VALUES / "cpu.yaml", self._values(VALUES), overrides=yaml.safe_dump(values))
        [service] = [each for each in yaml.safe_load_all(text) if each and each["kind"] == "RayService"]
        config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
        config["http_options"] = {"host": "127.0.0.1", "port": self.http}
        [application] = config["applications"]
        application["args"]["overrides"]["tenants_file"] = str(self.tenants)
        for deployment in application["deployments"]:
            if "placement_group_bundles" in deployment:
                deployment["placement_group_bundle_label_selector"] = [{"raydix-role": "node"}]
            else:
                deployment["ray_actor_options"]["label_selector"] = {"raydix-role": "node"}
        return config

    def put(self, config: dict[str, Any]) -> None:
        status, answer = self.dashboards("PUT", config)
        assert status == 200, answer

    def is_running(self) -> bool:
        found: dict[str, Any] = json.loads(self.dashboards("GET")[1])["applications"]
        return bool(found) and found["raydix"]["status"] == "RUNNING"

    def parts(self) -> dict[int, str]:
        """The replicas and actors by process id, but for the manager's standby."""
        standbys = {pid for pid, part in self._parts() if part == "KVCacheManager"} - self._pids_of("started")
        return {pid: part for pid, part in self._parts() if pid not in standbys}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of an event in the logs of all processes."""
        files = self._folder.glob("ray/session_2*/logs/raydix-*.log*")
        lines = [line for path in files for line in path.read_text().splitlines()]
        return [entry for line in lines if (entry := json.loads(line)).get("event") == name]

    def told(self, level: str) -> set[int]:
        """The processes that were told to change to a log level."""
        return {event["pid"] for event in self.events("reconfigured") if event["level"] == level}

    def _pids_of(self, event: str) -> set[int]:
        return {entry["pid"] for entry in self.events(event)}

    def _parts(self) -> Iterator[tuple[int, str]]:
        for process in self.processes():
            try:
                match = PARTS.match(" ".join(process.cmdline()))
            except psutil.Error:
                continue
            if match:
                yield process.pid, match.group(1)

    def _values(self, values: dict[str, Any]) -> Path:
        file = self._folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        return file


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    require_default_model()
    folder = Path(tempfile.mkdtemp(prefix="raydix-"))  # a short path: sockets of Ray and HAProxy lie below it
    head = Head(folder)
    try:
        write_tenants(head.tenants, "alice", "carol")
        head.put(head.serve_config())
        eventually(head.is_running, "the application runs")
        yield head
    finally:
        head.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Streaming:
    """A client with one stream after the other, until stopped."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self.streams: list[Stream] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        eventually(lambda: self.streams and self.streams[0].token_ids, "the first token")

    def stop(self) -> list[Stream]:
        self._over.set()
        self._thread.join()
        return self.streams

    def _run(self) -> None:
        while not self._over.is_set():
            self.streams.append(Stream(random_prompt(len(self.streams), 40), STREAM_TOKENS, "s"))
            self.streams[-1].run(self._server)


def status_of(head: Head, name: str) -> int:
    return replace(head.server, api_key=f"rdx-{name}").request("GET", "/v1/models")[0]


def refusal(head: Head) -> bytes:
    """The answer to a request with more choices than a replica takes at a time."""
    return head.server.request("POST", "/v1/completions", {"prompt": "a", "n": LIMIT + 1, "max_tokens": 1})[2]


def test_a_put_changes_limits_keys_and_numbers_in_place(head: Head) -> None:
    before = head.parts()
    replicas = [f"ServeReplica:raydix:{name}" for name in ("ingress", "kv_cache_manager", "mixed")]
    assert sorted(before.values()) == ["KVCacheManager", "MixedWorker", *replicas]
    streaming = Streaming(head.server)
    try:
        limit = {"ingress": {"max_queued_requests": LIMIT}, "logging": {"level": "DEBUG"}}
        head.put(head.serve_config(overrides=limit))
        eventually(lambda: f"at most {LIMIT}".encode() in refusal(head), "the limit holds")
        eventually(lambda: len(head.told("DEBUG")) == 2, "the manager and the worker are told")

        assert [status_of(head, name) for name in ("alice", "bob", "carol")] == [200, 401, 200]
        write_tenants(head.tenants, "alice", "bob")
        eventually(lambda: (status_of(head, "bob"), status_of(head, "carol")) == (200, 401), "the keys are rotated")
        head.tenants.write_text("tenants: []")
        eventually(lambda: head.events("change_refused"), "no tenants are refused")
        assert [status_of(head, name) for name in ("alice", "bob", "nobody")] == [200, 200, 401]
        write_tenants(head.tenants, "alice", "bob")
        assert head.parts() == before

        head.put(head.serve_config(overrides=limit, pools={"mixed": {"replicas": 2}}))
        eventually(lambda: len(head.parts()) == len(before) + 2 and head.is_running(), "one worker more")
        assert before.items() <= head.parts().items()
    finally:
        streams = streaming.stop()
    assert not [stream.error for stream in streams if stream.error]
    print(f"{len(streams)} streams, longest pause {max(stream.longest_pause_s(0) for stream in streams):.3f} s")


def test_a_user_config_that_needs_a_restart_is_refused_by_name(head: Head) -> None:
    before = head.parts()
    config = head.serve_config(pools={"mixed": {"replicas": 2}})
    deployments = config["applications"][0]["deployments"]
    for deployment in deployments:
        deployment["user_config"]["cache"] = {"eviction": "lru"}
    head.put(config)

    def refused() -> set[str]:
        words = "user_config: cache.eviction restarts all workers"
        return {event["part"].split("-")[0] for event in head.events("change_refused") if words in event["message"]}

    eventually(lambda: refused() == {"ingress", "kv_cache_manager", "mixed"}, "refused by all of them")
    assert head.parts() == before and status_of(head, "alice") == 200

    head.put(head.serve_config(pools={"mixed": {"replicas": 2}}))
    eventually(head.is_running, "the application runs")
    assert head.parts() == before
