"""Prometheus against a live server under load: every query of the dashboards and of the alerts finds something."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml

from raydix.cli.cluster import free_port
from raydix.engine.model.sources import DEFAULT_MODEL
from tests.integration.conftest import WAIT_S, Server, eventually, random_prompt
from tests.integration.local import Process, require_default_model
from tests.integration.test_local_server import small
from tests.skips import NO_PROMETHEUS, has_no_prometheus
from tests.unit.test_monitoring import FOLDER, queries

WINDOW = "30s"
UNWATCHED = {"cluster, Processes held up, A"}
"""Panels of the watchdog, which watches no process that all actors share."""
COMPARISON = re.compile(r" [<>]=? [0-9.]+$")

pytestmark = pytest.mark.skipif(has_no_prometheus(), reason=NO_PROMETHEUS)


class Prometheus:
    """Prometheus, which scrapes one server."""

    def __init__(self, folder: Path, target: int) -> None:
        self.port = free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "alerts.yaml")],
            "scrape_configs": [{"job_name": "raydix", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return json.load(reply)["data"]

    def results(self, query: str) -> list[Any]:
        found: list[Any] = self.get("query", query=query)["result"]
        return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that answers requests again and again, and refuses some; its model computes nothing."""
    require_default_model()
    running = Process("--config", str(small(tmp_path_factory.mktemp("local"))), "--model", f"null:{DEFAULT_MODEL}")
    is_over = Event()
    try:
        running.until("ready after")
        with ThreadPoolExecutor(2) as pool:
            server, wrong = Server("127.0.0.1", running.port), Server("127.0.0.1", running.port)
            loads = [pool.submit(_ask, server, is_over), pool.submit(_ask_wrongly, wrong, is_over)]
            yield running.port
            is_over.set()
            for load in loads:
                load.result()
    finally:
        is_over.set()
        running.end()


def _ask(server: Server, is_over: Event) -> None:
    while not is_over.wait(0.1):
        server.complete(random_prompt(5, 200), max_tokens=20)
        server.complete(random_prompt(6, 20), max_tokens=5)


def _ask_wrongly(server: Server, is_over: Event) -> None:
    while not is_over.wait(0.5):
        assert server.request("POST", "/v1/completions", {"prompt": 1})[0] == 400


@pytest.fixture(scope="module")
def prometheus(loaded: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), loaded)
    try:
        eventually(lambda: running.results("up == 1"), "the server is scraped", 0.5)
        yield running
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.slow
def test_every_query_finds_something(prometheus: Prometheus) -> None:
    # Of an alert the side that is compared: the alert itself finds something only when it fires.
    asked = {place: COMPARISON.sub("", query.replace("$__rate_interval", WINDOW)) for place, query in queries().items()}
    assert sum(query != asked[place] for place, query in queries().items()) > len(asked) // 2
    empty = set(asked)

    def are_answered() -> bool:
        empty.difference_update([place for place in empty if prometheus.results(asked[place])])
        return empty <= UNWATCHED

    try:
        eventually(are_answered, "every query finds something", 1.0)
    finally:
        assert empty == UNWATCHED
    # A quantile of nothing is NaN, which is found, too.
    first_tokens = asked["serving, Time to the first token, B"]
    eventually(lambda: float(prometheus.results(first_tokens)[0]["value"][1]) > 0, "first tokens are measured", 1.0)


@pytest.mark.slow
def test_every_alert_is_evaluated(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]] | None:
        [group] = prometheus.get("rules")["groups"]
        is_done = all(rule["health"] != "unknown" for rule in group["rules"])
        return group["rules"] if is_done else None

    rules = eventually(evaluated, "the rules are evaluated", 1.0)
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["name"]: "ok" for rule in rules}
    [written] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in written["rules"]]
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert firing == set(), "nothing is wrong"
