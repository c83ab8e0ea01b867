"""Responses in the background: generated whether their clients wait or not, ended by whoever may, taken over."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from raydix.engine.api.openai_responses.stored import StoredResponse
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.memory.response_store import CLAIM_S, UNDER_WAY
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.serving.background_responses import Listener
from tests.unit.ingress import ANSWER, FakeLink, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_responses_app import events_of, text_of
from tests.unit.waits import until

RESPONSES = "/v1/responses"
TENANTS = {"a": {"authorization": "Bearer a"}, "b": {"authorization": "Bearer b"}}


async def post(headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    return await call(app, "POST", RESPONSES, body_of("responses", background=True, **fields), headers=headers)


async def send(method: str, path: str, headers: dict[str, str] | None = None) -> Reply:
    return await call(app, method, f"{RESPONSES}/{path}", headers=headers)


async def ended(response_id: str, headers: dict[str, str] | None = None) -> Any:
    """The response when it has ended."""
    shown: Any = None

    async def has_ended() -> bool:
        nonlocal shown
        shown = (await send("GET", response_id, headers)).json
        return shown["status"] not in ("queued", "in_progress")

    await until(has_ended)
    return shown


def test_a_response_is_answered_at_once_and_generated_afterwards(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        reply = await post(metadata={"a": '"status":"in_progress","error":null,'})
        queued = reply.json
        assert (reply.status, queued["status"], queued["output"], queued["background"]) == (200, "queued", [], True)
        under_way = (await send("GET", queued["id"])).json
        assert under_way == queued | {"status": "in_progress"}
        shown = await ended(queued["id"])
        assert (shown["status"], text_of(shown), shown["store"]) == ("completed", ANSWER, True)
        same = ("id", "created_at", "metadata", "background")
        assert {name: shown[name] for name in same} == {name: queued[name] for name in same}
        later = await call(app, "POST", RESPONSES, body_of("responses", previous_response_id=queued["id"]))
        assert later.status == 200
        assert replica.dispatcher.begun[-1].prompt[: len(replica.dispatcher.begun[0].prompt)] == (
            replica.dispatcher.begun[0].prompt
        ), "the conversation goes on from the response"

    served(replica, run)
    assert replica.room.num_held == 0


def test_what_is_still_being_generated_cannot_be_gone_on_from(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = 2

    async def run() -> Reply:
        response_id = (await post()).json["id"]
        reply = await call(app, "POST", RESPONSES, body_of("responses", previous_response_id=response_id))
        await send("POST", f"{response_id}/cancel")
        gone = await call(app, "POST", RESPONSES, body_of("responses", previous_response_id=response_id))
        assert (gone.status, "cancelled" in gone.json["error"]["message"]) == (400, True)
        return reply

    refused = served(replica, run)
    assert (refused.status, refused.json["error"]["param"]) == (400, "previous_response_id")
    assert "being generated" in refused.json["error"]["message"]


def test_a_response_is_cancelled_and_gives_its_place_back(served: Served) -> None:
    replica = Replica(max_requests=1)
    replica.dispatcher.hangs_after = 2

    async def run() -> None:
        response_id = (await post()).json["id"]
        assert (await post()).status == 429, "the place is taken"
        cancelled = (await send("POST", f"{response_id}/cancel")).json
        assert (cancelled["id"], cancelled["status"], cancelled["output"]) == (response_id, "cancelled", [])
        await until(lambda: _is(replica.room.num_held == 0))
        assert (await send("GET", response_id)).json == cancelled
        assert (await send("POST", f"{response_id}/cancel")).json == cancelled, "once more is no error"
        replica.dispatcher.hangs_after = None
        whole = await ended((await post()).json["id"])
        assert (await send("POST", f"{whole['id']}/cancel")).json == whole, "what has ended stays as it is"

    served(replica, run)


def test_a_deleted_response_is_not_generated_any_more(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = 2

    async def run() -> None:
        response_id = (await post()).json["id"]
        assert (await send("DELETE", response_id)).status == 200
        await replica.frontend.background.look()
        await until(lambda: _is(replica.room.num_held == 0))
        assert (await send("GET", response_id)).status == 404

    served(replica, run)


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_response_that_fails_says_so(is_foreseen: bool, served: Served) -> None:
    replica = Replica()
    if is_foreseen:
        replica.dispatcher.fails_after = 2
    else:
        replica.dispatcher.error = RuntimeError("secret")

    async def run() -> Any:
        return await ended((await post()).json["id"])

    shown = served(replica, run)
    assert (shown["status"], shown["error"]["code"], shown["output"]) == ("failed", "server_error", [])
    assert "secret" not in shown["error"]["message"]
    assert replica.room.num_held == 0


def test_the_body_is_checked_before_the_answer(served: Served) -> None:
    for fields, param in (({"temperature": -1}, "temperature"), ({"previous_response_id": "resp_0"}, None)):
        reply = served(Replica(), lambda fields=fields: post(**fields))
        assert reply.status in (400, 404)
        assert param in (None, reply.json["error"]["param"])


def test_a_manager_that_keeps_nothing_has_the_request_refused(served: Served) -> None:
    replica = Replica()
    replica.manager.is_away = True
    assert served(replica, post).status == 503
    replica = Replica()
    replica.manager.responses._budget_bytes = 0
    reply = served(replica, post)
    assert (reply.status, "no room" in reply.json["error"]["message"]) == (503, True)
    assert replica.room.num_held == 0


def test_an_answer_waits_for_a_manager_that_is_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.serving.stored_responses.RETRY_S", 0.001)
    replica = Replica()

    async def run() -> Any:
        response_id = (await post()).json["id"]
        replica.manager.is_away = True
        await until(lambda: _is(bool(replica.dispatcher.ended)))
        assert (await send("GET", response_id)).status == 503
        replica.manager.is_away = False
        return await ended(response_id)

    assert served(replica, run)["status"] == "completed"


def test_a_stream_goes_on_without_its_reader_and_is_read_again(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.draws = True
    replica.dispatcher.together = 3

    async def run() -> None:
        whole = await call(app, "POST", RESPONSES, body_of("responses", background=True, stream=True))
        events = events_of(whole.body)
        final = events[-1]["response"]
        assert (final["status"], final["background"]) == ("completed", True)

        left = Reply()
        body = body_of("responses", background=True, stream=True)
        await call(app, "POST", RESPONSES, body, leaves_at=lambda reply: b"delta" in reply.body, reply=left)
        response_id = json.loads(left.body.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        shown = await ended(response_id)
        assert shown["status"] == "completed", "the response was generated to its end"

        again = events_of((await send("GET", f"{response_id}?stream=true")).body)
        assert text_of(again[-1]["response"]) == text_of(shown), "the same seed"
        for number in (0, 5, len(again) - 2):
            reply = await send("GET", f"{response_id}?stream=true&starting_after={number}")
            rest = [
                json.loads(part.split("data: ")[1]) for part in reply.body.decode().removesuffix("\n\n").split("\n\n")
            ]
            assert [event["sequence_number"] for event in rest] == [*range(number + 1, len(again))]
            assert rest[:-1] == again[number + 1 : -1]
        assert (await send("GET", response_id)).json == shown, "readers change nothing"

    served(replica, run)
    assert replica.room.num_held == 0


def test_a_response_without_a_stream_has_none_to_be_read(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        response_id = (await post()).json["id"]
        await ended(response_id)
        for query, param in (("stream=true", "stream"), ("starting_after=1", "starting_after"), ("stream=x", "stream")):
            reply = await send("GET", f"{response_id}?{query}")
            assert (reply.status, reply.json["error"]["param"]) == (400, param), query
        with_ids = await call(
            app,
            "POST",
            RESPONSES,
            body_of("responses", background=True, stream=True),
            headers={"last-event-id": "0"},
        )
        assert (with_ids.status, with_ids.json["error"]["param"]) == (400, "Last-Event-ID")

    served(replica, run)
    assert replica.room.num_held == 0


def test_another_replica_takes_over_what_a_dead_one_has_begun(served: Served) -> None:
    dead, alive = Replica(), Replica()
    dead.dispatcher.hangs_after = 2
    dead.dispatcher.draws = alive.dispatcher.draws = True
    share_memory(alive, dead)

    async def begin() -> str:
        response_id: str = (await post()).json["id"]
        return response_id

    response_id = served(dead, begin)  # the event loop ends, and with it the task

    async def go_on() -> Any:
        await alive.frontend.background.look()
        assert (await send("GET", response_id)).json["status"] == "in_progress", "its claim stands for a while"
        alive.manager.now += CLAIM_S
        await alive.frontend.background.look()
        return await ended(response_id)

    shown = served(alive, go_on)
    assert shown["status"] == "completed"
    [first], [second] = dead.dispatcher.begun, alive.dispatcher.begun
    assert (first.prompt, first.sampling) == (second.prompt, second.sampling), "the same bits: the same seed, too"


def test_a_replica_without_room_leaves_it_for_later(served: Served) -> None:
    dead, alive = Replica(), Replica(max_requests=1)
    dead.dispatcher.hangs_after = alive.dispatcher.hangs_after = 2
    share_memory(alive, dead)
    response_id = served(dead, lambda: _id_of(post()))

    async def go_on() -> Any:
        own = (await post()).json["id"]
        for _ in range(2):
            alive.manager.now += CLAIM_S
            await alive.frontend.background.look()
        assert (await send("GET", response_id)).json["status"] == "in_progress"
        await send("POST", f"{own}/cancel")
        await until(lambda: _is(alive.room.num_held == 0))
        alive.dispatcher.hangs_after = None
        alive.manager.now += CLAIM_S
        await alive.frontend.background.look()
        return await ended(response_id)

    assert served(alive, go_on)["status"] == "completed"


def test_a_response_of_a_tenant_who_is_gone_fails(served: Served) -> None:
    dead = Replica(tenants=tenants("a", "b"))
    dead.dispatcher.hangs_after = 2
    response_id = served(dead, lambda: _id_of(post(TENANTS["a"])))
    alive = Replica(tenants=tenants("b"))
    share_memory(alive, dead)

    async def go_on() -> None:
        alive.manager.now += CLAIM_S
        await alive.frontend.background.look()

    served(alive, go_on)
    [entry] = alive.manager.responses.entries()
    assert b'"status":"failed"' in entry.data and response_id.encode() in entry.data


def test_other_tenants_neither_see_nor_cancel_it(served: Served) -> None:
    replica = Replica(tenants=tenants("a", "b"))
    replica.dispatcher.hangs_after = 2

    async def run() -> None:
        response_id = (await post(TENANTS["a"])).json["id"]
        for method, path in (("GET", response_id), ("POST", f"{response_id}/cancel"), ("DELETE", response_id)):
            assert (await send(method, path, TENANTS["b"])).status == 404
        assert (await send("GET", response_id, TENANTS["a"])).json["status"] == "in_progress"
        assert (await send("POST", f"{response_id}/cancel", TENANTS["a"])).json["status"] == "cancelled"

    served(replica, run)


def test_a_slow_reader_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.serving.background_responses.MAX_WAITING_EVENTS", 3)
    replica = Replica()
    replica.dispatcher.together = len(ANSWER) + 1  # more events at a time than may wait

    async def run() -> None:
        reply = await post(stream=True)
        assert b"was not read in time" in reply.body
        number = b"data: "
        response_id = json.loads(reply.body.split(number)[1].split(b"\n")[0])["response"]["id"]
        assert (await ended(response_id))["status"] == "completed"

    served(replica, run)


def test_a_reader_who_leaves_keeps_no_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.serving.background_responses.MAX_WAITING_BYTES", 500)

    async def run() -> None:
        listener = Listener()
        for _ in range(3):
            listener.send(b"x" * 200)
        read = []
        with pytest.raises(ServiceError, match="not read in time"):
            async for event in listener.events():
                read.append(event)
        assert len(read) == 2

        left = Listener()
        left.send(b"x")
        events = left.events()
        assert await anext(events) == b"x"
        await events.aclose()
        left.send(b"y")
        left.end()
        assert left._waiting.empty()

    served(Replica(), run)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_stream_tells_of_its_cancellation(num_tokens: int, served: Served) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = num_tokens

    async def run() -> Reply:
        reply = Reply()
        body = body_of("responses", background=True, stream=True)
        streaming = asyncio.create_task(call(app, "POST", RESPONSES, body, reply=reply))
        await until(
            lambda: _is(reply.body.count(b"output_text.delta") >= num_tokens and bool(replica.dispatcher.begun))
        )
        [entry] = replica.manager.responses.entries()
        response_id = json.loads(StoredResponse.decode(entry.data).response)["id"]
        assert (await send("POST", f"{response_id}/cancel")).json["status"] == "cancelled"
        return await streaming

    reply = served(replica, run)
    if reply.status == 200:
        *_, last = reply.body.decode().removesuffix("\n\n").split("\n\n")
        error = json.loads(last.split("data: ")[1])
        assert (error["type"], error["sequence_number"]) == ("error", reply.body.count(b"data: ") - 1)
    else:
        error = reply.json["error"]
    assert error["code"] == "response_cancelled"
    assert (reply.status == 200) == (num_tokens > 0)


def test_a_stream_that_fails_ends_as_one_of_the_foreground(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 2

    async def run() -> list[bytes]:
        streams = [(await post(stream=True)).body]
        streams.append((await call(app, "POST", RESPONSES, body_of("responses", stream=True))).body)
        return [stream.split(b"\n\n")[-2] for stream in streams]

    background, foreground = served(replica, run)
    assert background == foreground and b'"type":"error"' in background


def test_an_answer_that_finds_no_room_fails_and_is_not_generated_again(served: Served) -> None:
    replica = Replica(max_model_len=4096)
    replica.dispatcher.answer = "x" * 2000

    async def run() -> Any:
        replica.manager.responses._budget_bytes = 4000
        return await ended((await post()).json["id"])

    shown = served(replica, run)
    assert (shown["status"], "no room" in shown["error"]["message"]) == ("failed", True)
    assert replica.manager.responses.abandoned(CLAIM_S) == []


def test_what_cannot_be_read_keeps_no_other_response_from_being_taken_over(served: Served) -> None:
    dead, alive = Replica(), Replica()
    dead.dispatcher.hangs_after = 2
    share_memory(alive, dead)
    dead.manager.responses.keep(b"unreadable", None, UNDER_WAY + b"?" * 40, 0.0)
    response_id = served(dead, lambda: _id_of(post()))

    async def go_on() -> Any:
        alive.manager.now += CLAIM_S
        await alive.frontend.background.look()
        return await ended(response_id)

    assert served(alive, go_on)["status"] == "completed"


def tenants(*names: str) -> Tenants:
    return Tenants([Tenant(name) for name in names], {key_hash(name): name for name in names})


def share_memory(one: Replica, other: Replica) -> None:
    """Have two replicas ask one manager."""
    link = other.manager
    assert isinstance(link, FakeLink)
    one.manager.responses, one.manager.now = link.responses, link.now


async def _is(value: bool) -> bool:
    return value


async def _id_of(reply: Awaitable[Reply]) -> str:
    response_id: str = (await reply).json["id"]
    return response_id
