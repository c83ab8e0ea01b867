"""Routes of files and batches, and the replica that runs batches, driven as an ASGI application."""

import asyncio
import errno
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from starlette.requests import Request

from raydix.actors.ingress import batches as batches_module
from raydix.actors.ingress.http import CLIENT_CLOSED_REQUEST
from raydix.actors.ingress.routes import batches as batch_routes
from raydix.engine.batches import execution as execution_module
from raydix.engine.batches import runner as runner_module
from raydix.engine.batches.batch_store import BatchStore
from raydix.engine.batches.file_store import FileStore
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.batch_files import line_of, lines_of, objects_in
from tests.unit.ingress import ANSWER, MODEL, Replica, Reply, Served, call
from tests.unit.served_app import app
from tests.unit.test_openapi import validate_reply
from tests.unit.test_upload import END, TYPE, part
from tests.unit.waits import WAIT_S

ROUTE = re.compile("/((file|batch)(?:e?s))/[^/]+")
INPUT = lines_of("one", "two")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.005)
    monkeypatch.setattr(execution_module, "OBSERVE_S", 0.0)
    monkeypatch.setattr(batches_module, "POLL_S", 0.01)


@pytest.fixture
def serving(served: Served, tmp_path: Path) -> Callable[..., Any]:
    """Runs a function while a replica with files and batches serves."""

    def run(work: Callable[[], Awaitable[Any]], replica: Replica | None = None, **config: Any) -> Any:
        section = {"folder": str(tmp_path)} | config.pop("batches", {})
        model = {"name": MODEL}
        return served(replica or Replica(), work, batches=section, model=model, **config)

    return run


async def send(method: str, path: str, body: Any = b"", **headers: str) -> Reply:
    content = body if isinstance(body, bytes | list) else json.dumps(body).encode()
    reply = await call(app, method, path, content, headers=headers)
    if reply.status != CLIENT_CLOSED_REQUEST:
        validate_reply(method.lower(), ROUTE.sub(r"/\1/{\2_id}", path.partition("?")[0]), reply)
    return reply


async def upload(content: bytes = INPUT, purpose: str = "batch", extra: bytes = b"", **headers: str) -> Reply:
    body = part("purpose", purpose.encode()) + extra + part("file", content, "in.jsonl") + END
    size = max(100, len(body) // 20)
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return await send("POST", "/v1/files", pieces, **{"content-type": TYPE} | headers)


async def begin(content: bytes = INPUT, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    file_id = (await upload(content, "batch", b"", **(headers or {}))).json["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    reply = await send("POST", "/v1/batches", asked, **(headers or {}))
    assert reply.status == 200, reply.body
    return reply.json


async def ended(batch_id: str, **headers: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = (await send("GET", f"/v1/batches/{batch_id}", **headers)).json
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


def test_a_file(serving: Any) -> None:
    async def work() -> None:
        made = (await upload()).json
        assert (made["object"], made["bytes"], made["filename"], made["purpose"]) == (
            "file",
            len(INPUT),
            "in.jsonl",
            "batch",
        )
        assert made["expires_at"] - made["created_at"] == 30 * 86_400
        path = f"/v1/files/{made['id']}"
        assert (await send("GET", path)).json == made
        assert (await send("GET", f"{path}/content")).body == INPUT
        assert (await send("DELETE", path)).json == {"id": made["id"], "object": "file", "deleted": True}
        assert [(await send("GET", each)).status for each in (path, f"{path}/content", "/v1/files/x")] == [404] * 3

    serving(work)


def test_a_file_that_ends_earlier(serving: Any) -> None:
    async def work() -> None:
        extra = part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"3600")
        made = (await upload(extra=extra)).json
        assert made["expires_at"] - made["created_at"] == 3600

    serving(work)


@pytest.mark.parametrize(
    ("purpose", "extra", "param"),
    [
        ("fine-tune", b"", "purpose"),
        ("batch", part("expires_after[seconds]", b"10"), "expires_after[seconds]"),
        ("batch", part("expires_after[anchor]", b"now"), "expires_after[anchor]"),
        ("batch", part("colour", b"red"), "colour"),
    ],
)
def test_uploads_that_are_refused(serving: Any, tmp_path: Path, purpose: str, extra: bytes, param: str) -> None:
    reply = serving(lambda: upload(purpose=purpose, extra=extra))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not [*tmp_path.rglob("content")]


def test_uploads_that_are_too_large_or_too_many(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = serving(lambda: upload(b"x" * ((1 << 20) + 1)), batches={"max_file_mib": 1})
    assert (reply.status, reply.json["error"]["param"]) == (413, "file")
    monkeypatch.setattr(batches_module, "MAX_UPLOADS", 0)
    assert serving(upload).status == 429


def test_one_tenant_holds_no_more_uploads_than_it_leaves_free(serving: Any) -> None:
    tenants = Tenants([Tenant("a"), Tenant("b")], {key_hash("k"): "a", key_hash("l"): "b"})

    async def work() -> None:
        ingress: Any = serve.get_replica_context().servable_object
        batches = ingress.replica.batches
        with ExitStack() as held:
            for _ in range(4):
                held.enter_context(batches.uploading("a"))
            assert (await upload(authorization="Bearer k")).status == 429
            assert (await upload(authorization="Bearer l")).status == 200
        assert (await upload(authorization="Bearer k")).status == 200

    serving(work, Replica(tenants=tenants))


def test_a_tenant_s_batch_does_not_wait_for_all_of_another_s(serving: Any) -> None:
    """Tenant a has more batches than a replica runs, none of which ends; b's batch runs all the same."""
    tenants = Tenants([Tenant("a"), Tenant("b")], {key_hash("k"): "a", key_hash("l"): "b"})

    async def work() -> None:
        ingress: Any = serve.get_replica_context().servable_object
        batches = ingress.replica.batches
        for _ in range(batches_module.MAX_BATCHES):
            batches._batches.add("a", 1)
        stuck = await begin(headers={"authorization": "Bearer k"})
        own = await begin(headers={"authorization": "Bearer l"})
        assert (await ended(own["id"], authorization="Bearer l"))["status"] == "completed"
        seen = await send("GET", f"/v1/batches/{stuck['id']}", authorization="Bearer k")
        assert seen.json["status"] not in ("completed", "failed")
        batches._batches.add("a", -batches_module.MAX_BATCHES)
        assert (await ended(stuck["id"], authorization="Bearer k"))["status"] == "completed"

    serving(work, Replica(tenants=tenants))


@contextmanager
def receiving(receive: Callable[[], Awaitable[Any]]) -> Iterator[None]:
    """An upload's messages come from `receive`."""
    original = batch_routes._receive

    async def receive_from(request: Request, *args: Any) -> None:
        await original(Request(request.scope, receive), *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_routes, "_receive", receive_from)
        yield


def test_an_upload_whose_client_leaves_or_falls_silent_leaves_nothing(serving: Any, tmp_path: Path) -> None:
    async def stop() -> Reply:
        body = part("purpose", b"batch") + part("file", INPUT, "f")
        return await send("POST", "/v1/files", [body], **{"content-type": TYPE})

    async def leave() -> Reply:
        parts: list[Any] = [part("purpose", b"batch")]

        async def receive() -> Any:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": True}
            return {"type": "http.disconnect"}

        with receiving(receive):
            return await upload()

    async def silent() -> Reply:
        async def receive() -> Any:
            await asyncio.Event().wait()

        with receiving(receive):
            return await upload()

    async def drip() -> Reply:
        async def receive() -> Any:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"", "more_body": True}

        with receiving(receive), pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_routes, "PROGRESS_S", 0.05)
            return await upload()

    assert serving(silent, ingress={"body_timeout_s": 0.01}).status == 408
    assert serving(drip).status == 408, "always something, and never much"
    assert serving(leave).status == CLIENT_CLOSED_REQUEST
    reply = serving(stop)
    assert (reply.status, "ends before the end" in reply.json["error"]["message"]) == (400, True)
    assert not [*tmp_path.rglob("content")]


def test_lists_are_read_in_pages(serving: Any) -> None:
    async def work() -> None:
        made = [(await upload()).json["id"] for _ in range(5)]
        whole = (await send("GET", "/v1/files?order=asc")).json
        assert sorted(each["id"] for each in whole["data"]) == sorted(made) and whole["has_more"] is False
        oldest_first = [each["id"] for each in whole["data"]]
        page = (await send("GET", "/v1/files?limit=2")).json
        assert [each["id"] for each in page["data"]] == oldest_first[:2:-1]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (oldest_first[4], oldest_first[3], True)
        page = (await send("GET", f"/v1/files?limit=3&after={page['last_id']}")).json
        assert [each["id"] for each in page["data"]] == oldest_first[2::-1] and page["has_more"] is False
        assert (await send("GET", "/v1/files?purpose=batch_output")).json["data"] == []
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            reply = await send("GET", f"/v1/files?{query}")
            assert (reply.status, reply.json["error"]["param"]) == (400, param)

    serving(work)


def test_a_batch_runs_and_its_files_are_there(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    lines = line_of("one", prompt="hi") + line_of("two", prompt="hi", temperature=3) + line_of("s", stream=True)

    async def work() -> None:
        made = await begin(lines + line_of("three", prompt="hi"), metadata={"k": "v"})
        assert (made["status"], made["metadata"], made["model"]) == ("validating", {"k": "v"}, MODEL)
        batch = await ended(made["id"])
        assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
        output = objects_in((await send("GET", f"/v1/files/{batch['output_file_id']}/content")).body)
        assert [line["custom_id"] for line in output] == ["one", "three"]
        for line in output:
            response = line["response"]
            assert (response["status_code"], response["body"]["choices"][0]["text"]) == (200, ANSWER)
            assert response["body"]["id"] == f"cmpl-{response['request_id']}" and line["error"] is None
        errors = objects_in((await send("GET", f"/v1/files/{batch['error_file_id']}/content")).body)
        assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("two", 400), ("s", 400)]
        assert [line["response"]["body"]["error"]["param"] for line in errors] == ["temperature", "stream"]
        assert [each["id"] for each in (await send("GET", "/v1/batches")).json["data"]] == [made["id"]]
        while "batch_ended" not in logged():  # the line follows the status, which is there already
            await asyncio.sleep(0.01)

    def logged() -> list[str]:
        return [record.about["event"] for record in caplog.records if hasattr(record, "about")]

    with caplog.at_level(logging.INFO):
        serving(work, replica)
    assert [event.outcome for event in replica.ledger.ended] == ["stop", "stop"]
    assert "batch_started" in logged()
    assert replica.room.num_held == 0


def test_a_batch_that_is_not_valid_says_why(serving: Any) -> None:
    async def work() -> Any:
        return await ended((await begin(INPUT + b"{\n"))["id"])

    batch = serving(work)
    assert batch["status"] == "failed" and batch["errors"]["object"] == "list"
    [problem] = batch["errors"]["data"]
    assert (problem["line"], problem["code"]) == (3, "invalid_json_line")
    assert batch["failed_at"] and batch["output_file_id"] is batch["error_file_id"] is None


def test_a_batch_is_cancelled(serving: Any) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = 2

    async def work() -> Any:
        made = await begin()
        while not replica.dispatcher.begun:
            await asyncio.sleep(0.005)
        reply = (await send("POST", f"/v1/batches/{made['id']}/cancel")).json
        assert reply["status"] in ("cancelling", "cancelled") and reply["cancelling_at"]
        return await ended(made["id"])

    batch = serving(work, replica)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 0)
    assert len(replica.dispatcher.ended) == len(replica.dispatcher.begun)


def test_a_line_that_finds_no_worker_is_tried_again(serving: Any) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 0

    async def work() -> Any:
        made = await begin(lines_of("one"))
        while not replica.dispatcher.ended:
            await asyncio.sleep(0.005)
        replica.dispatcher.fails_after = None
        return await ended(made["id"])

    assert serving(work, replica)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_a_fault_of_raydix_fails_the_line_alone(serving: Any) -> None:
    replica = Replica()
    replica.reader.failure = KeyError("secret")

    async def work() -> bytes:
        batch = await ended((await begin(lines_of("one")))["id"])
        return (await send("GET", f"/v1/files/{batch['error_file_id']}/content")).body

    content = serving(work, replica)
    assert objects_in(content)[0]["response"]["status_code"] == 500 and b"secret" not in content


def test_tenants_have_files_and_batches_of_their_own(serving: Any) -> None:
    tenants = Tenants([Tenant("a", max_requests=1), Tenant("b")], {key_hash("ka"): "a", key_hash("kb"): "b"})
    own: dict[str, Any] = {"authorization": "Bearer ka"}
    other: dict[str, Any] = {"authorization": "Bearer kb"}

    async def work() -> None:
        file_id = (await upload(**own)).json["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        reply = await send("POST", "/v1/batches", asked, **other)
        assert (reply.status, reply.json["error"]["param"]) == (404, "input_file_id")
        batch_id = (await send("POST", "/v1/batches", asked, **own)).json["id"]
        batch = await ended(batch_id, **own)
        assert batch["request_counts"]["completed"] == 2, "the limit of requests is not the batch's"
        for path in (f"batches/{batch_id}", f"files/{file_id}", f"files/{batch['output_file_id']}/content"):
            assert (await send("GET", f"/v1/{path}", **other)).status == 404
            assert (await send("GET", f"/v1/{path}", **own)).status == 200
            assert (await send("GET", f"/v1/{path}")).status == 401
        assert (await send("POST", f"/v1/batches/{batch_id}/cancel", **other)).status == 404
        assert (await send("GET", "/v1/batches", **other)).json["data"] == []

    serving(work, Replica(tenants=tenants))


def test_batches_of_another_model_or_tenant_are_left_alone_until_they_expire(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin_here() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches_module.Batches, "_consider", lambda *_: None)
            return await begin()

    batch = serving(begin_here)
    [folder] = (tmp_path / "open").iterdir()
    record = json.loads((folder / "batch.json").read_bytes())
    (folder / "batch.json").write_text(json.dumps(record | {"model": "other"}))

    num_considered, consider = 0, batches_module.Batches._consider

    def counted(batches: batches_module.Batches, considered: Any) -> None:
        nonlocal num_considered
        num_considered += 1
        consider(batches, considered)

    async def wait() -> Any:
        monkeypatch.setattr(batches_module.Batches, "_consider", counted)
        async with asyncio.timeout(WAIT_S):
            while num_considered < 3:
                await asyncio.sleep(0.001)
        return (await send("GET", f"/v1/batches/{batch['id']}")).json

    assert serving(wait)["status"] == "validating"
    (folder / "batch.json").write_text(json.dumps(record | {"model": "other", "expires_at": 1.0}))
    assert serving(lambda: ended(batch["id"]))["status"] == "expired"


def test_a_batch_whose_files_fail_is_put_off_and_others_go_on(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches_module, "REST_S", 0.05)
    retire, failures = BatchStore.retire, 0

    def fail_first(self: BatchStore, batch: Any) -> None:
        nonlocal failures
        failures += 1
        if failures == 1:
            raise OSError("full")
        retire(self, batch)

    monkeypatch.setattr(BatchStore, "retire", fail_first)

    async def work() -> None:
        made = [await begin(), await begin()]
        for each in made:
            assert (await ended(each["id"]))["status"] == "completed"
        while failures < 3:
            await asyncio.sleep(0.01)

    serving(work)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.about["event"] for record in errors] == ["batch_put_off"]  # type: ignore[attr-defined]


def test_batches_can_be_turned_off(serving: Any) -> None:
    async def work() -> None:
        for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/file-1")):
            reply = await send(method, path)
            assert reply.status == 404 and "batches.gib" in reply.json["error"]["message"]

    serving(work, batches={"gib": 0})


def test_a_disk_that_fails_is_a_service_error(serving: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    reply = serving(upload, batches={"folder": str(tmp_path / "file")})
    assert (reply.status, reply.headers["retry-after"]) == (503, "30")


def test_a_full_disk_is_named(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FileStore, tenant: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileStore, "begin", refuse)
    reply = serving(upload)
    assert (reply.status, reply.json["error"]["message"]) == (503, "The disk for files is full.")


def test_pages_of_other_sites_may_not_upload(serving: Any) -> None:
    assert serving(lambda: upload(origin="http://elsewhere")).status == 403
    assert serving(lambda: send("POST", "/v1/batches", {}, **{"content-type": "text/plain"})).status == 415


def test_lines_of_other_programs(serving: Any) -> None:
    async def work() -> None:
        ingress: Any = serve.get_replica_context().servable_object
        answer = await ingress.answer_line("/v1/completions", json.dumps({"prompt": "hi"}).encode())
        assert (answer.status, json.loads(answer.body)["choices"][0]["text"]) == (200, ANSWER)
        for url, tenant, param in (("/v1/images", None, "url"), ("/v1/completions", "nobody", "tenant")):
            with pytest.raises(Exception, match="There is no") as refused:
                await ingress.answer_line(url, b"{}", tenant)
            assert refused.value.param == param  # type: ignore[attr-defined]

    serving(work)
