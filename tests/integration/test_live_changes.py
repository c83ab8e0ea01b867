"""`raydix deploy` on a server that runs: what applies in place, what restarts alone, and what is refused. The manager,
in which all else has its place, is replaced and killed last.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.core.tenants import key_hash
from tests.integration.cluster import Cluster, Live, paced
from tests.integration.conftest import Server, eventually, random_prompt

STREAM_TOKENS = 150
PACE_S = 1.0
"""Least time of a step while something is deployed: the stream outlasts that."""
CONFIG: dict[str, Any] = {
    "model": {"max_model_len": 4096},
    "cache": {"num_blocks": 600, "segment_gib": 0.1, "swap_gib": 0.05},
    "workers": {
        "prefill": {"token_budget": 256, "max_requests": 8},
        "decode": {"token_budget": 128, "max_requests": 8},
    },
    "ingress": {"max_queued_requests": 40},
    "tenants": [
        {"name": "alice", "key_hashes": [key_hash("rdx-alice")], "admin": True},
        {"name": "carol", "key_hashes": [key_hash("rdx-carol")]},
    ],
}
NUM_PROMPTS = 20
NUM_AT_ONCE = 5
"""Prompts that are asked right after a kill, whether the next manager is there or not."""
BOB = {"name": "bob", "key_hashes": [key_hash("rdx-bob")], "cache_min": 0.1}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration with other values in some sections."""
    return {**CONFIG, **{name: {**CONFIG.get(name, {}), **values} for name, values in sections.items()}}


@pytest.fixture(scope="module")
def live(cluster: Cluster) -> Live:
    running = cluster.serve(CONFIG)
    return replace(running, server=running.with_key("rdx-alice"))


class Background:
    """Work in a thread until it is stopped; what it raises is raised by `result`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.token_ids: list[int] = []
        self.statuses: list[int] = []
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._stream, self._ask)]
        for thread in self._threads:
            thread.start()

    def stop_asking(self) -> list[int]:
        """The statuses of all short requests."""
        self._over.set()
        self._threads[1].join()
        return self.statuses

    def result(self) -> list[int]:
        """All tokens of the stream."""
        for thread in self._threads:
            thread.join()
        assert not self._errors, self._errors
        return self.token_ids

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def _stream(self) -> None:
        for token_ids in streamed(self._server):
            self.token_ids += token_ids

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            body = {"model": "SmolLM2-135M-Instruct", "prompt": [5, 6, 7], "max_tokens": 1}
            self.statuses.append(self._server.request("POST", "/v1/completions", body)[0])


def streamed(server: Server) -> Iterator[list[int]]:
    """The tokens of a long answer as they come."""
    for chunk in server.stream(random_prompt(1, 200), max_tokens=STREAM_TOKENS, speculation=False):
        for choice in chunk["choices"]:
            yield choice.get("token_ids") or []


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_limits_tenants_and_budgets_change_under_a_stream(live: Live, tmp_path: Path) -> None:
    alice, bob, carol = live.server, live.with_key("rdx-bob"), live.with_key("rdx-carol")
    prompt = random_prompt(2, 160)
    alice.complete(prompt, max_tokens=1)
    expected = [token_id for token_ids in streamed(alice) for token_id in token_ids]
    assert len(expected) == STREAM_TOKENS
    assert carol.request("GET", "/load")[0] == 200 and bob.request("GET", "/load")[0] == 401
    before = live.parts()
    assert sorted({*before.values()}) == [
        "DecodeWorker", "KVCacheManager", "PrefillWorker", *(f"ServeReplica:raydix:{name}" for name in (
            "decode", "ingress", "kv_cache_manager", "prefill"))
    ]  # fmt: skip

    new = changed(
        ingress={"max_queued_requests": 5},
        placement={"piggyback_tokens": 0},
        workers={"decode": {"token_budget": 96, "max_requests": 8}},
        logging={"level": "DEBUG"},
    )
    with paced(alice, tmp_path / "gate", PACE_S):
        work = Background(alice)
        eventually(lambda: work.token_ids, "the stream begins")
        done = live.deploy_by_command({**new, "tenants": [CONFIG["tenants"][0], BOB]})
        num_streamed = len(work.token_ids)
    assert done.returncode == 0, done.stderr
    assert "restarts: nothing" in done.stdout and "tenants.carol" in done.stdout, done.stdout
    assert re.search(r"ingress\.max_queued_requests +40 -> 5 +applies in place", done.stdout)
    assert num_streamed < STREAM_TOKENS, "the stream goes on meanwhile"

    assert {*work.stop_asking()} == {200}
    assert bob.request("GET", "/load")[0] == 200 and carol.request("GET", "/load")[0] == 401
    status, _, data = alice.request(
        "POST", "/v1/completions", {"model": "SmolLM2-135M-Instruct", "prompt": "a", "n": 6}
    )
    assert status == 400 and b"at most 5" in data, data
    assert work.result() == expected
    assert cached(alice.complete(prompt, max_tokens=1)) >= 144, "the cache is as before"
    assert live.parts() == before

    shown = live.settings()
    assert shown["workers"]["decode"]["token_budget"] == 96 and shown["logging"]["level"] == "DEBUG"
    told = {name.split("-")[1] for name, text in live.cluster.logs().items() if '"reconfigured"' in text}
    assert told == {"ingress", "kv_cache_manager", "prefill", "decode"}


def test_a_role_grows_and_shrinks_without_the_others(live: Live) -> None:
    live.deploy(CONFIG)
    before = live.parts()
    done = live.deploy(changed(workers={"decode": {**CONFIG["workers"]["decode"], "replicas": 2}}))
    assert done.returncode == 0, done.stderr
    assert "restarts: nothing" in done.stdout
    more = live.parts()
    assert before.items() <= more.items()
    assert sorted(more[pid] for pid in more.keys() - before.keys()) == ["DecodeWorker", "ServeReplica:raydix:decode"]

    assert live.deploy(CONFIG).returncode == 0
    stay = {pid: part for pid, part in before.items() if "ecode" not in part}
    eventually(lambda: len(live.parts()) == len(before), "one decode worker less")
    assert stay.items() <= live.parts().items()
    assert len(live.server.complete(random_prompt(3, 40), max_tokens=4)["choices"][0]["token_ids"]) == 4


def test_only_the_deployment_concerned_restarts(live: Live) -> None:
    live.deploy(CONFIG)
    prompt = random_prompt(4, 160)
    live.server.complete(prompt, max_tokens=1)
    before = live.parts()
    done = live.deploy(changed(model={"pooling": "last"}))
    assert done.returncode == 0, done.stderr
    assert "restarts: ingress" in done.stdout.splitlines()
    eventually(lambda: live.server.request("GET", "/health")[0] == 200, "the next ingress")
    after = live.parts()
    old, new = ({pid: part for pid, part in parts.items() if part.endswith(":ingress")} for parts in (before, after))
    assert not old.keys() & new.keys()
    assert before.items() - old.items() == after.items() - new.items()
    assert cached(live.server.complete(prompt, max_tokens=1)) >= 144


def test_explain_names_an_answer_that_may_have_reasoned_as_the_place_of_a_miss(live: Live) -> None:
    """The client sends another answer than was generated, as a template that leaves reasoning out does. The first turn
    has two answers, so that nobody computes the second turn's prompt beforehand."""
    assert live.deploy(changed(model={"reasoning_parser": "think"})).returncode == 0
    eventually(lambda: live.server.request("GET", "/health")[0] == 200, "the next ingress")

    def chat(messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        status, _, data = live.server.request("POST", "/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, data
        answer: dict[str, Any] = json.loads(data)
        return answer

    question = {"role": "user", "content": "Name the largest planet, and say in a few words what it is made of."}
    chat([question], n=2, max_tokens=40)
    shown = {"role": "assistant", "content": "It is Jupiter, which is made of hydrogen and helium above all."}
    second = chat([question, shown, question], max_tokens=4)
    _, _, data = live.server.request("GET", f"/v1/requests/{second['id']}/explain")
    *hits, first_miss, rest = json.loads(data)["choices"][0]["attempts"][0]["blocks"]
    assert hits and all(run["hit"] for run in hits)
    assert (first_miss["source"], rest["source"]) == ("reasoning_left_out", "never_seen")


def test_bad_configurations_change_nothing(live: Live) -> None:
    assert live.deploy(CONFIG).returncode == 0
    before, settings = live.parts(), live.settings()
    refused = live.deploy(changed(ingress={"max_queued_requests": 0}))
    assert refused.returncode == 2 and "ingress.max_queued_requests" in refused.stderr, refused
    for wrong, words in (
        (changed(model={"source": "/nowhere"}), "there is no model at /nowhere"),
        (changed(cache={"segment_gib": 10_000.0}), "the object store of a node of the cluster has "),
    ):
        lacks = live.deploy(wrong)
        assert lacks.returncode == 2 and words in lacks.stderr, lacks
    dry = live.deploy(changed(ingress={"max_queued_requests": 9}), is_dry_run=True)
    assert dry.returncode == 0 and "40 -> 9" in dry.stdout
    assert live.deploy(CONFIG).stdout.startswith("restarts: nothing\n")
    assert live.parts() == before and live.settings() == settings


def test_the_manager_is_replaced_under_a_stream(live: Live, tmp_path: Path) -> None:
    """By another one, as an upgrade does: nothing breaks, and what was cached is hit."""
    live.deploy(CONFIG)
    prompt = random_prompt(50, 320)
    live.server.complete(prompt, max_tokens=1)
    expected = [token_id for token_ids in streamed(live.server) for token_id in token_ids]
    before = live.parts()

    with paced(live.server, tmp_path / "gate", PACE_S):
        work = Background(live.server)
        eventually(lambda: work.token_ids, "the stream begins")
        done = live.deploy(changed(cache={"transcript_mib": 17}))
        num_streamed = len(work.token_ids)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarts: kv_cache_manager" in done.stdout, done.stdout
    assert num_streamed < STREAM_TOKENS, "the stream goes on meanwhile"
    assert {*work.stop_asking()} == {200}
    assert work.result() == expected and len(expected) == STREAM_TOKENS

    eventually(lambda: len(live.parts()) == len(before), "the old manager's host is gone")
    replaced = {part for pid, part in before.items() - live.parts().items()}
    assert replaced == {"KVCacheManager", "ServeReplica:raydix:kv_cache_manager"}
    [took_over] = live.events("took_over")
    assert took_over["segments"] > 0, took_over
    print(took_over)
    assert not live.events("failover")
    assert cached(live.server.complete(prompt, max_tokens=1)) >= 304


def test_hits_from_pools_return_after_the_manager_is_killed(live: Live) -> None:
    """Each prompt is asked once after the kill: one that missed is cached again."""
    prompts = [random_prompt(100 + number, 320) for number in range(NUM_PROMPTS)]
    for prompt in prompts:
        live.server.complete(prompt, max_tokens=1)
    eventually(live.standbys, "the manager has a standby")
    known = num_cached_blocks(live)
    [pid] = [pid for pid, part in live.parts().items() if part == "KVCacheManager"]
    os.kill(pid, signal.SIGKILL)
    since = time.monotonic()
    hits = [cached(live.server.complete(prompt, max_tokens=1)) for prompt in prompts[:NUM_AT_ONCE]]
    eventually(lambda: live.num_workers() == 2 and num_cached_blocks(live) >= known, "the next manager knows all")
    print(f"{sum(hit >= 304 for hit in hits)} of {NUM_AT_ONCE} hit; all known after {time.monotonic() - since:.2f} s")
    for prompt in prompts[NUM_AT_ONCE:]:
        assert cached(live.server.complete(prompt, max_tokens=1)) >= 304


def num_cached_blocks(live: Live) -> int:
    """Blocks in the pools of all workers, as far as the manager knows."""
    status, _, data = live.server.request("GET", "/v1/cache")
    return sum(worker["cached_blocks"] for worker in json.loads(data)["workers"]) if status == 200 else 0
