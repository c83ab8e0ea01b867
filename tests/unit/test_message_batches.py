"""Anthropic's batches of messages: their routes, on the batches' own folder and runner."""

import asyncio
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.api.anthropic.batches import MAX_CUSTOM_ID, lines_of
from raydix.engine.api.batches import NO_LIMITS, LineLimits
from raydix.engine.batches.beside import BESIDE_BYTES, run_beside
from raydix.engine.core.errors import RequestError
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import ANSWER, Replica, Reply, call
from tests.unit.served_app import app
from tests.unit.test_batch_routes import begin as begin_openai
from tests.unit.test_batch_routes import quick, serving
from tests.unit.test_batch_routes import send as send_openai
from tests.unit.test_openapi import validate_reply
from tests.unit.waits import WAIT_S

__all__ = ["quick", "serving"]

BATCHES = "/v1/messages/batches"
KEYS = {"a": {"x-api-key": "a"}, "b": {"x-api-key": "b"}}
Serving = Callable[..., Any]


def asked(custom_id: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 20, "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "params": params}


async def send(method: str, path: str = "", body: Any = b"", headers: dict[str, str] | None = None) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await call(app, method, BATCHES + path, content, headers=headers)
    route = (BATCHES + path).partition("?")[0]
    if path.startswith("/"):
        route = "/".join([BATCHES, "{message_batch_id}", *path.split("/")[2:]])
    validate_reply(method.lower(), route, reply)
    assert reply.headers["request-id"].startswith("req_")
    return reply


async def begin(*requests: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    reply = await send("POST", "", {"requests": [*requests]}, headers)
    assert reply.status == 200, reply.body
    return reply.json


async def ended(batch_id: str, headers: dict[str, str] | None = None) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = (await send("GET", f"/{batch_id}", headers=headers)).json
            if batch["processing_status"] == "ended":
                return batch
            await asyncio.sleep(0.01)


async def results(batch: Any) -> dict[str, Any]:
    """The results of an ended batch by `custom_id`."""
    path = batch["results_url"].removeprefix(f"http://test{BATCHES}")
    reply = await send("GET", path)
    assert reply.status == 200, reply.body
    lines = [json.loads(line) for line in reply.body.splitlines()]
    return {line["custom_id"]: line["result"] for line in lines}


def counts(batch: Any) -> dict[str, int]:
    return {name: count for name, count in batch["request_counts"].items() if count}


def test_a_batch_from_its_beginning_to_its_end(serving: Serving, tmp_path: Path) -> None:
    async def work() -> None:
        made = await begin(
            asked("one"), asked("two", system="be kind"), asked("bad", temperature=-1), asked("x", stream=True)
        )
        assert (made["type"], made["processing_status"], made["ended_at"], made["results_url"]) == (
            "message_batch",
            "in_progress",
            None,
            None,
        )
        assert made["id"].startswith("msgbatch_") and counts(made) == {"processing": 4}
        lasts = datetime.fromisoformat(made["expires_at"]) - datetime.fromisoformat(made["created_at"])
        assert lasts == timedelta(days=1)
        batch = await ended(made["id"])
        assert counts(batch) == {"succeeded": 2, "errored": 2}
        found = await results(batch)
        for name in ("one", "two"):
            message = found[name]["message"]
            assert (found[name]["type"], message["type"], message["content"][0]["text"]) == (
                "succeeded",
                "message",
                ANSWER,
            )
            assert message["id"].startswith("msg_") and message["usage"]["output_tokens"] == len(ANSWER) + 1
        for name, field in (("bad", "temperature"), ("x", "stream")):
            assert (found[name]["type"], found[name]["error"]["type"]) == ("errored", "error")
            assert field in found[name]["error"]["error"]["message"]
            assert found[name]["error"]["error"]["type"] == "invalid_request_error"

        assert (await send("DELETE", f"/{made['id']}")).json == {"id": made["id"], "type": "message_batch_deleted"}
        for method, rest in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            gone = await send(method, f"/{made['id']}{rest}")
            assert (gone.status, gone.json["error"]["type"]) == (404, "not_found_error")

    serving(work)
    assert not [*tmp_path.rglob("content")], "neither input nor output is left"


def test_a_batch_is_cancelled(serving: Serving) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = 2

    async def work() -> None:
        made = await begin(asked("one"), asked("two"))
        for method, rest in (("GET", "/results"), ("DELETE", "")):
            early = await send(method, f"/{made['id']}{rest}")
            assert (early.status, "not ended" in early.json["error"]["message"]) == (400, True)
        cancelling = (await send("POST", f"/{made['id']}/cancel")).json
        assert cancelling["processing_status"] in ("canceling", "ended") and cancelling["cancel_initiated_at"]
        batch = await ended(made["id"])
        assert counts(batch) == {"canceled": 2}
        assert await results(batch) == {"one": {"type": "canceled"}, "two": {"type": "canceled"}}
        assert (await send("POST", f"/{made['id']}/cancel")).json == batch, "once more is no error"

    serving(work, replica)


def test_what_did_not_run_in_time_has_expired(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.batches.batch_store.MESSAGES_WINDOW", "1m")
    monkeypatch.setattr("raydix.engine.batches.batch_store.window_s", lambda window: 0.05)
    replica = Replica()
    replica.dispatcher.hangs_after = 2

    async def work() -> None:
        batch = await ended((await begin(asked("one")))["id"])
        assert counts(batch) == {"expired": 1} and await results(batch) == {"one": {"type": "expired"}}

    serving(work, replica)


def test_batches_are_listed_in_pages(serving: Serving) -> None:
    async def work() -> None:
        made = [await begin(asked("one")) for _ in range(5)]
        for each in made:
            await ended(each["id"])
        whole = (await send("GET")).json
        ids = [batch["id"] for batch in whole["data"]]
        assert sorted(ids) == sorted(each["id"] for each in made)
        assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, ids[0], ids[-1])

        async def page(query: str) -> tuple[list[str], bool]:
            shown = (await send("GET", f"?{query}")).json
            return [batch["id"] for batch in shown["data"]], shown["has_more"]

        assert await page("limit=2") == (ids[:2], True)
        assert await page(f"limit=2&after_id={ids[1]}") == (ids[2:4], True)
        assert await page(f"limit=2&after_id={ids[3]}") == (ids[4:], False)
        assert await page(f"limit=2&before_id={ids[3]}") == (ids[1:3], True)
        assert await page(f"limit=5&before_id={ids[3]}") == (ids[:3], False)
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("after_id=x", "x"), ("before_id=x", "x")):
            wrong = await send("GET", f"?{query}")
            assert (wrong.status, param in wrong.json["error"]["message"]) == (400, True)

    serving(work)


def test_neither_api_sees_the_other_ones_batches(serving: Serving) -> None:
    async def work() -> None:
        messages, others = await begin(asked("one")), await begin_openai()
        await ended(messages["id"])
        [listed] = (await send_openai("GET", "/v1/batches")).json["data"]
        assert listed["id"] == others["id"]
        assert [batch["id"] for batch in (await send("GET")).json["data"]] == [messages["id"]]
        unique, other = messages["id"].removeprefix("msgbatch_"), others["id"].removeprefix("batch_")
        for path in (f"/v1/batches/batch_{unique}", f"/v1/batches/batch_{unique}/cancel"):
            method = "POST" if path.endswith("cancel") else "GET"
            assert (await call(app, method, path)).status == 404
        for name in (f"msgbatch_{other}", others["id"], messages["id"].removeprefix("msg"), "x"):
            assert (await send("GET", f"/{name}")).status == 404

    serving(work)


def test_tenants_have_batches_of_their_own(serving: Serving) -> None:
    tenants = Tenants([Tenant(name) for name in KEYS], {key_hash(name): name for name in KEYS})

    async def work() -> None:
        made = await begin(asked("one"), headers=KEYS["a"])
        batch = await ended(made["id"], KEYS["a"])
        assert (await send("GET", headers=KEYS["b"])).json["data"] == []
        for method, rest in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            assert (await send(method, f"/{batch['id']}{rest}", headers=KEYS["b"])).status == 404
        reply = await send("GET", f"/{batch['id']}/results", headers=KEYS["a"])
        assert json.loads(reply.body)["result"]["type"] == "succeeded"

    serving(work, Replica(tenants=tenants))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "'requests' must be a list"),
        ({}, "'requests' must be a list"),
        ({"requests": []}, "'requests' must be a list"),
        ({"requests": [3]}, "'requests[0]' must be an object"),
        ({"requests": [asked("a"), {"params": {}}]}, "'requests[1].custom_id'"),
        ({"requests": [asked("x" * (MAX_CUSTOM_ID + 1))]}, "65 characters"),
        ({"requests": [asked("a"), asked("b"), asked("a")]}, "requests[0] has the same"),
        ({"requests": [{"custom_id": "a", "params": []}]}, "'requests[0].params' must be an object"),
        ({"requests": [asked(str(n)) for n in range(4)]}, "at most 3 elements, got 4"),
        pytest.param(
            b'{"requests": [{"custom_id": "a", "params": {"a": %s%s}}]}' % (b"[" * 300, b"]" * 300),
            "'requests[0].params' is nested too deeply",
            id="nested",
        ),
        pytest.param(
            # As deep as the runner's parser does not go, which would refuse all of the file.
            b'{"requests": [{"custom_id": "a", "params": {"a": %s%s}}]}' % (b"[" * 220, b"]" * 220),
            "'requests[0].params' is nested too deeply",
            id="nested for the runner",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_batch_is_named(serving: Serving, tmp_path: Path, body: Any, words: str) -> None:
    reply = serving(lambda: send("POST", "", body), batches={"max_lines": 3})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert words in reply.json["error"]["message"]
    assert not [*tmp_path.rglob("content")]


def test_a_request_that_is_longer_as_a_line_than_any_that_runs_is_named() -> None:
    """The runner would refuse all of the file for it."""
    body = b'{"requests": [{"custom_id": "a", "params": {"a": [1e9, 1e9, 1e9, 1e9]}}]}'
    lines, _ = lines_of(body, NO_LIMITS)
    assert len(lines.strip()) > len(body)
    assert lines_of(body, LineLimits(1, len(lines.strip()))) == (lines, 1)
    with pytest.raises(RequestError, match="as a line") as refused:
        lines_of(body, LineLimits(1, len(body)))
    assert refused.value.param == "requests[0].params"


def test_erased_results_are_named(serving: Serving) -> None:
    async def work() -> None:
        batch = await ended((await begin(asked("one")))["id"])
        for file in (await send_openai("GET", "/v1/files")).json["data"]:
            await send_openai("DELETE", f"/v1/files/{file['id']}")
        gone = await send("GET", f"/{batch['id']}/results")
        assert (gone.status, "erased" in gone.json["error"]["message"]) == (404, True)

    serving(work)


def test_batches_can_be_turned_off(serving: Serving) -> None:
    reply = serving(lambda: send("GET"), batches={"gib": 0})
    assert (reply.status, "batches.gib" in reply.json["error"]["message"]) == (404, True)


def test_large_bodies_are_read_in_a_process_beside(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[object] = []

    async def noted(work: Callable[..., Any], *args: Any) -> Any:
        beside.append(work)
        return await run_beside(work, *args)

    monkeypatch.setattr("raydix.actors.ingress.routes.message_batches.run_beside", noted)

    async def work() -> None:
        await begin(asked("one"))
        assert beside == []
        large = asked("two", "x" * BESIDE_BYTES)
        assert (await begin(large, asked("three")))["request_counts"]["processing"] == 2
        refused = await send("POST", "", {"requests": [large, asked("two")]})
        assert (refused.status, "requests[0] has the same" in refused.json["error"]["message"]) == (400, True)
        assert beside == [lines_of, lines_of]

    serving(work)
