"""Routes that count, report and describe, on a running server."""

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, ORIGIN, WAIT_S, Server, eventually, random_prompt
from tests.integration.test_metrics import COUNTERS


def ask(server: Server, method: str, path: str, body: object = None) -> Any:
    status, _, data = server.request(method, path, body)
    assert status == 200, data
    return json.loads(data)


@dataclass(frozen=True)
class Scrape:
    """Samples of `/metrics`."""

    samples: tuple[Sample, ...]

    @classmethod
    def now(cls, server: Server) -> "Scrape":
        status, headers, data = server.request("GET", "/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        metrics = list(text_string_to_metric_families(data.decode()))
        assert len({metric.name for metric in metrics}) == len(metrics), "each name once"
        return cls(tuple(sample for metric in metrics for sample in metric.samples))

    def total(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"raydix_{name}" and labels.items() <= sample.labels.items()
        )

    def grown(self, since: "Scrape", name: str, **labels: str) -> float:
        return self.total(name, **labels) - since.total(name, **labels)


def test_a_chat_s_tokens_are_those_that_its_answer_reports(server: Server) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Grüße aus <|im_end|> Berlin."}]}
    counted = ask(server, "POST", "/tokenize", chat)
    answered = ask(server, "POST", "/v1/chat/completions", chat | {"max_tokens": 1, "return_token_ids": True})
    assert counted["tokens"] == answered["prompt_token_ids"]
    assert counted["count"] == answered["usage"]["prompt_tokens"]


@pytest.mark.parametrize("num_words", [5, 5000], ids=["read here", "read beside"])
def test_a_text_s_tokens_lead_back_to_it(server: Server, num_words: int) -> None:
    text = "Ein Wort, " * num_words
    counted = ask(server, "POST", "/tokenize", {"prompt": text, "return_token_strs": True})
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert ask(server, "POST", "/detokenize", {"tokens": counted["tokens"]}) == {"prompt": text}


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_names_its_request_in_a_header(server: Server, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2, "stream": stream}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    [request_id] = response.headers.get_all("x-request-id") or []
    assert f'"cmpl-{request_id}"'.encode() in data
    assert response.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


def test_what_balancers_and_operators_ask(server: Server, tmp_path: Path) -> None:
    assert ask(server, "GET", "/ping") == ask(server, "POST", "/ping") == {"status": "ok"}
    assert eventually(lambda: ask(server, "GET", "/load") == {"server_load": 0}, "nothing is under way")
    with paced(server, tmp_path / "gate"):
        running = server.stream(random_prompt(90, 50), max_tokens=2000)
        next(running)
        assert ask(server, "GET", "/load") == {"server_load": 1}
        running.close()
        assert eventually(lambda: ask(server, "GET", "/load") == {"server_load": 0}, "the stream has gone")
    info = ask(server, "GET", "/server_info")
    assert info["model"]["id"] == MODEL and info["raydix_config"]["workers"]["prefill"]["replicas"] >= 1


def test_metrics_of_all_processes_have_counted_what_just_happened(server: Server) -> None:
    before = Scrape.now(server)
    server.complete(random_prompt(91, 500), max_tokens=20)
    after = Scrape.now(server)
    assert after.grown(before, "requests_total", outcome="length") == 1
    assert after.grown(before, "generation_tokens_total") == 20
    assert after.grown(before, "prompt_tokens_total") == 500
    names = {sample.name for sample in after.samples}
    assert {f"raydix_{name}_total" for name in COUNTERS} <= names
    assert {"raydix_ttft_seconds_bucket", "raydix_queue_seconds_count", "raydix_placement_regret_seconds_sum"} <= names
    up = {sample.labels["kind"]: sample.value for sample in after.samples if sample.name == "raydix_process_up"}
    assert up == {"ingress": 1, "kv_cache_manager": 1, "prefill": 1, "decode": 1}
    eventually(lambda: Scrape.now(server).grown(before, "prefill_tokens_total") >= 500, "workers report twice a second")


def test_the_prefix_cache_is_reset(server: Server) -> None:
    prompt = random_prompt(92, 100)
    server.complete(prompt, max_tokens=1)
    assert ask(server, "POST", "/reset_prefix_cache")["object"] == "cache.reset"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    answer = ask(server, "POST", "/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_server_describes_itself(server: Server) -> None:
    document = ask(server, "GET", "/openapi.json")
    assert {"/v1/chat/completions", "/metrics"} <= document["paths"].keys()
    status, headers, page = server.request("GET", "/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"ChatCompletionRequest" in page and b"<script" not in page


def send(server: Server, method: str, origin: str, **headers: str) -> tuple[int, str | None]:
    """Status, and the origin whose pages may read the answer."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode() if method == "POST" else None
    try:
        connection.request(method, "/v1/completions", body, {**server.headers, "origin": origin, **headers})
        response = connection.getresponse()
        response.read()
        return response.status, response.getheader("access-control-allow-origin")
    finally:
        connection.close()


def test_pages_of_allowed_origins_alone_may_use_the_server(server: Server) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    assert send(server, "OPTIONS", ORIGIN, **preflight) == (200, ORIGIN)
    assert send(server, "POST", ORIGIN) == (200, ORIGIN)
    assert send(server, "OPTIONS", "https://evil.example", **preflight) == (405, None)
    assert send(server, "POST", "https://evil.example") == (403, None)
