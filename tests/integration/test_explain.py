"""What the server tells of its decisions and its cache, and how the cache is reset."""

import json
from pathlib import Path
from typing import Any

import pytest

from raydix.actors.ingress.cache_control import MAX_FOLLOWERS
from tests.integration.cluster import paced
from tests.integration.conftest import Server, eventually, random_prompt


def get(server: Server, path: str) -> dict[str, Any]:
    status, _, body = server.request("GET", path)
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def last_attempt(server: Server, request_id: str) -> dict[str, Any]:
    explained = get(server, f"/v1/requests/{request_id}/explain")
    assert explained["id"] == request_id
    attempt: dict[str, Any] = explained["choices"][0]["attempts"][-1]
    return attempt


def test_a_request_is_explained(server: Server) -> None:
    prompt = random_prompt(7400, 200)
    cold = server.complete(prompt, max_tokens=2, cache_salt="explain")
    eventually(server.is_idle, "the first request is over")
    warm = server.complete(prompt, max_tokens=2, cache_salt="explain")
    eventually(lambda: last_attempt(server, warm["id"])["ended"] == "finished", "its end is known")

    first = last_attempt(server, cold["id"])
    assert first["blocks"] == [{"source": "never_seen", "hit": False, "count": 12}]
    assert first["prompt_tokens"] == 200 and first["unhashed_tokens"] == 8
    again = last_attempt(server, warm["id"])
    assert all(run["hit"] for run in again["blocks"]) and sum(run["count"] for run in again["blocks"]) == 12
    for attempt in (first, again):
        assert attempt["predicted_ttft_s"] > 0 and attempt["actual_ttft_s"] > 0
        chosen, actual_s = attempt["prefill_worker"], attempt["actual_ttft_s"]
        others_s = [candidate["ttft_s"] for candidate in attempt["candidates"] if candidate["worker"] != chosen]
        regret_s = max(0.0, actual_s - min(others_s, default=actual_s))
        assert attempt["regret_s"] == pytest.approx(regret_s, abs=2e-6), "all of them are rounded"
        assert attempt["prefill_worker"] in {candidate["worker"] for candidate in attempt["candidates"]}
        assert attempt["preemptions"] == 0 and attempt["attempt"] == 0


def test_a_prompt_without_a_block_and_one_that_parts(server: Server) -> None:
    short = server.complete(random_prompt(7401, 9), max_tokens=1)
    assert last_attempt(server, short["id"])["note"] == "shorter than a block: nothing to share"
    prompt = random_prompt(7402, 64)
    server.complete(prompt, max_tokens=1, cache_salt="fork")
    eventually(server.is_idle, "the first request is over")
    fork = server.complete([*prompt[:32], *random_prompt(7403, 32)], max_tokens=1, cache_salt="fork")
    runs = last_attempt(server, fork["id"])["blocks"]
    assert [(run["hit"], run["count"]) for run in runs] == [(True, 2), (False, 1), (False, 1)]
    assert runs[1]["source"] == "diverged"


def test_a_late_request_gives_way_where_it_asks_for_that(server: Server) -> None:
    asked: list[dict[str, Any]] = [
        {"slo_ttft_ms": 0.1, "slo_when_late": "give_way"},
        {"slo_ttft_ms": 0.1},
        {"slo_ttft_ms": 600_000},
    ]
    prompt = random_prompt(7404, 60)
    answers = [server.complete(prompt, max_tokens=2, cache_salt="way", **each) for each in asked]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    attempts = [last_attempt(server, answer["id"]) for answer in answers]
    assert [attempt["late"] for attempt in attempts] == ["give_way", "wait", None]
    assert [attempt["objective_ttft_s"] for attempt in attempts] == [0.0001, 0.0001, 600.0]


@pytest.mark.parametrize("request_id", ["cmpl-unknown", "unknown", "chatcmpl-"])
def test_an_unknown_request_is_not_found(server: Server, request_id: str) -> None:
    status, _, body = server.request("GET", f"/v1/requests/{request_id}/explain")
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (404, "not_found", "id")
    assert request_id in error["message"]


def test_the_cache_is_shown_and_reset(server: Server, tmp_path: Path) -> None:
    prompt = random_prompt(7404, 300)
    for _ in range(2):
        server.complete(prompt, max_tokens=2)
    eventually(server.is_idle, "the requests are over")
    report = get(server, "/v1/cache")
    assert 0 < report["hit_rate"] < 1 and report["tenants"]["anonymous"]["hit_tokens"] >= 288
    assert {worker["role"] for worker in report["workers"]} == {"prefill", "decode"}
    assert report["hit_blocks"] and report["missed_blocks"] and report["object_store"]["bytes"] > 0
    assert any(prefix["hit_tokens"] >= 288 and prefix["preview"] for prefix in report["hottest_prefixes"])

    with paced(server, tmp_path / "gate"):
        running = server.stream(random_prompt(7405, 100), max_tokens=120)
        seen = [next(running)]
        status, _, body = server.request("POST", "/v1/cache/reset")
    dropped = json.loads(body)
    assert status == 200 and dropped["pool_blocks"] > 0
    choices = [choice for chunk in [*seen, *running] for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids", ())]
    assert len(tokens) == 120, "what was under way went on"
    cold = server.complete(prompt, max_tokens=2)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stop_string_is_an_end(server: Server) -> None:
    prompt = random_prompt(7407, 40)
    text = server.complete(prompt, max_tokens=60)["choices"][0]["text"]
    stopped = server.complete(prompt, max_tokens=60, stop=text[10:13])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    eventually(lambda: last_attempt(server, stopped["id"])["ended"] == "finished", "its end is known")


def test_not_too_many_follow_the_cache(server: Server) -> None:
    followers = [server.events("/v1/cache/events") for _ in range(MAX_FOLLOWERS)]
    assert {next(events)[0] for events in followers} == {"snapshot"}
    status, headers, body = server.request("GET", "/v1/cache/events")
    assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded") and headers["retry-after"]
    followers.pop().close()

    def has_room() -> bool:
        events = server.events("/v1/cache/events")
        try:
            return next(events)[0] == "snapshot"
        except AssertionError:
            return False
        finally:
            events.close()

    eventually(has_room, "room for another")
    for events in followers:
        events.close()


def test_events_of_the_cache_can_be_followed(server: Server) -> None:
    events = server.events("/v1/cache/events")
    kind, first = next(events)
    assert kind == "snapshot"
    server.complete(random_prompt(7406, 48), max_tokens=1, cache_salt="events")
    kind, stored = next(events)
    assert kind == "stored" and stored["next"] > first["next"] and stored["blocks"][0] not in first["blocks"]
    events.close()
    resumed = server.events(f"/v1/cache/events?since={first['next']}")
    assert next(resumed) == (kind, stored)
    resumed.close()
    assert server.request("GET", f"/v1/cache/events?since={'9' * 5000}")[0] == 400
    status, _, body = server.request("GET", "/v1/cache/events?since=now")
    assert status == 400 and json.loads(body)["error"]["param"] == "since"
