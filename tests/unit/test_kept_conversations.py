"""Conversations that the server keeps: their items, and responses that go on from them."""

import asyncio
import json
from typing import Any

import pytest

from raydix.engine.api.openai_responses.conversations import (
    CONVERSATION,
    MAX_ADDED,
    MAX_BYTES,
    MAX_METADATA,
    REVISION_BYTES,
    Conversation,
    KnownAnswer,
    beginning_of,
    encoded,
)
from raydix.engine.api.openai_responses.stored import PageQuery
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import FinishReason
from tests.unit.ingress import ANSWER, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_background_responses import ended, post, share_memory

CONVERSATIONS = "/v1/conversations"
USER = {"type": "message", "role": "user", "content": "hi"}
KEYS = {"a": {"authorization": "Bearer a"}, "b": {"authorization": "Bearer b"}}


async def send(method: str, path: str = "", headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = json.dumps(fields).encode() if method == "POST" else b""
    return await call(app, method, f"{CONVERSATIONS}{path}", body, headers=headers)


async def create(**fields: Any) -> str:
    reply = await send("POST", **fields)
    assert reply.status == 200, reply.body
    conversation_id: str = reply.json["id"]
    return conversation_id


async def respond(conversation: Any, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = body_of("responses", conversation=conversation, **fields)
    return await call(app, "POST", "/v1/responses", body, headers=headers)


async def items_of(conversation_id: str, query: str = "?order=asc&limit=100") -> list[Any]:
    reply = await send("GET", f"/{conversation_id}/items{query}")
    assert reply.status == 200, reply.body
    data: list[Any] = reply.json["data"]
    return data


def texts(items: list[Any]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def test_any_revision_leaves_the_conversation_as_it_is() -> None:
    for revision in (bytes(REVISION_BYTES), CONVERSATION * REVISION_BYTES, b"~" * REVISION_BYTES):
        conversation = Conversation(7, {"topic": "x"}, {"a": b'{"id":"a"}'}, (KnownAnswer.of(["a"], "x\n", [1]),))
        data = encoded(conversation, revision)
        assert Conversation.decode(data) == conversation
        assert beginning_of(data) == CONVERSATION + revision


def test_a_conversation_is_listed_and_changed_without_being_read() -> None:
    """Reading a megabyte takes long, and all of this is done on the event loop."""
    items = {f"i{number}": b"{not read" for number in range(3)}
    answers = (KnownAnswer(("i1", "i2"), b"[not read"), KnownAnswer(("i0",), b""))
    known = Conversation.decode(encoded(Conversation(7, {}, items, answers), bytes(REVISION_BYTES)))
    assert (known.items, known.answers) == (items, answers)
    grown = known.with_items({"i3": b"{nor this"}, KnownAnswer(("i3",), b""))
    assert known.item("i1") == b"{not read" and [*grown.items] == ["i0", "i1", "i2", "i3"]
    assert grown.without("i2").answers == (answers[1], KnownAnswer(("i3",), b""))
    page = PageQuery(limit=2, order="asc", after="i0").page(grown.items)
    assert page == (b'{"object":"list","data":[{not read,{not read],"first_id":"i1","last_id":"i2","has_more":true}')


def test_what_is_added_again_is_there_once() -> None:
    known = Conversation(7, {}).with_items({"a": b"1"}, KnownAnswer(("a",), b"[]"))
    assert known.with_items({"a": b"1"}, KnownAnswer(("a",), b"[]")) == known


def test_an_id_of_the_other_kind_is_not_found(served: Served) -> None:
    """Responses and conversations lie in one store."""

    async def run() -> None:
        conversation_id = await create(items=[USER])
        response_id = (await call(app, "POST", "/v1/responses", body_of("responses", store=True))).json["id"]
        replies = [
            await send("GET", f"/{response_id}"),
            await send("POST", f"/{response_id}", metadata={}),
            await send("DELETE", f"/{response_id}"),
            await respond(response_id),
            await call(app, "GET", f"/v1/responses/{conversation_id}"),
            await call(app, "DELETE", f"/v1/responses/{conversation_id}"),
            await call(app, "POST", f"/v1/responses/{conversation_id}/cancel"),
            await call(app, "POST", "/v1/responses", body_of("responses", previous_response_id=conversation_id)),
        ]
        assert [reply.status for reply in replies] == [404, 404, 404, 400, 404, 404, 404, 400]
        assert (await send("GET", f"/{conversation_id}")).status == 200
        assert (await call(app, "GET", f"/v1/responses/{response_id}")).status == 200

    served(Replica(), run)


def test_a_conversation_is_kept_changed_and_deleted(served: Served) -> None:
    async def run() -> None:
        created = (await send("POST", metadata={"topic": "x"}, items=[USER])).json
        assert (created["object"], created["metadata"]) == ("conversation", {"topic": "x"})
        path = f"/{created['id']}"
        assert (await send("GET", path)).json == created
        changed = (await send("POST", path, metadata={"topic": "y"})).json
        assert changed == created | {"metadata": {"topic": "y"}} == (await send("GET", path)).json
        assert (await send("POST", path, metadata=None)).json["metadata"] == {}
        deleted = (await send("DELETE", path)).json
        assert deleted == {"id": created["id"], "object": "conversation.deleted", "deleted": True}
        for method, rest in (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/x")):
            fields: dict[str, Any] = {"metadata": {}} if method == "POST" else {}
            gone = await send(method, path + rest, **fields)
            assert (gone.status, gone.json["error"]["code"]) == (404, "conversation_not_found"), (method, rest)

    served(Replica(), run)


def test_items_are_listed_added_and_taken_out(served: Served) -> None:
    async def run() -> None:
        conversation_id = await create()
        assert await items_of(conversation_id) == []
        path = f"/{conversation_id}/items"
        added = (await send("POST", path, items=[USER | {"content": text} for text in "abc"])).json
        assert (added["object"], added["has_more"], texts(added["data"])) == ("list", False, ["a", "b", "c"])
        assert (added["first_id"], added["last_id"]) == (added["data"][0]["id"], added["data"][2]["id"])
        call_item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "1", "output": "x"}
        await send("POST", path, items=[call_item, result])
        items = await items_of(conversation_id)
        assert [item["type"] for item in items] == [*["message"] * 3, "function_call", "function_call_output"]
        assert len({item["id"] for item in items}) == 5
        assert texts(await items_of(conversation_id, "?limit=1&order=asc&after=" + items[0]["id"])) == ["b"]
        assert (await items_of(conversation_id, "?limit=1"))[0] == items[-1], "the newest first"
        one = f"{path}/{items[1]['id']}"
        assert (await send("GET", one)).json == items[1]
        assert (await send("DELETE", one)).json["object"] == "conversation"
        for method in ("GET", "DELETE"):
            gone = await send(method, one)
            assert (gone.status, gone.json["error"]["param"]) == (404, "item_id")
        assert await items_of(conversation_id) == [items[0], *items[2:]]

    served(Replica(), run)


def test_a_response_goes_on_from_the_ids_of_the_answers_before(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        conversation_id = await create(items=[USER | {"role": "system", "content": "be kind"}])
        first = (await respond(conversation_id, input="one")).json
        assert first["conversation"] == {"id": conversation_id} and first["previous_response_id"] is None
        items = await items_of(conversation_id)
        assert texts(items) == ["be kind", "one", ANSWER]
        assert (items[2]["role"], items[2]["id"]) == ("assistant", first["output"][0]["id"])
        await respond({"id": conversation_id}, input="two", stream=True)
        await respond(conversation_id, input="three", store=False)
        assert texts(await items_of(conversation_id)) == ["be kind", "one", ANSWER, "two", ANSWER, "three", ANSWER]

    served(replica, run)
    first, second, third = (generation.prompt for generation in replica.dispatcher.begun)
    answer = tuple(map(ord, ANSWER))
    assert second[: len(first) + len(answer)] == (*first, *answer)
    assert third[: len(second) + len(answer)] == (*second, *answer), "exactly the generated ids"


def test_without_one_of_its_items_an_answer_is_what_its_other_items_say(served: Served) -> None:
    replica = Replica(has_reasoning=True)
    replica.dispatcher.answer = "<think>\nhm\n</think>\n\nyes"

    async def run() -> None:
        conversation_id = await create()
        output = (await respond(conversation_id, input="one")).json["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        await send("DELETE", f"/{conversation_id}/items/{output[0]['id']}")
        await respond(conversation_id, input="two")

    served(replica, run)
    prompt = "".join(map(chr, replica.dispatcher.begun[1].prompt))
    assert "yes" in prompt and "hm" not in prompt


def test_an_answer_is_added_though_others_change_the_conversation(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        conversation_id = await create()
        await asyncio.gather(
            *(respond(conversation_id, input=f"r{number}") for number in range(4)),
            *(send("POST", f"/{conversation_id}/items", items=[USER | {"content": f"i{n}"}]) for n in range(4)),
        )
        found = texts(await items_of(conversation_id))
        assert sorted(found) == sorted([*[f"r{n}" for n in range(4)], *[f"i{n}" for n in range(4)], *[ANSWER] * 4])
        for number in range(4):
            assert found[found.index(f"r{number}") + 1] == ANSWER, "input and answer stand together"

    served(replica, run)


def test_a_conversation_that_is_deleted_meanwhile_costs_nobody_an_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica()

    async def run() -> None:
        conversation_id = await create()
        replica.dispatcher.hangs_after = 2
        queued = (await post(conversation=conversation_id)).json
        assert queued["conversation"] == {"id": conversation_id}
        await send("DELETE", f"/{conversation_id}")
        await call(app, "POST", f"/v1/responses/{queued['id']}/cancel")
        replica.dispatcher.hangs_after = None

        other = await create()
        original = replica.frontend.conversations.of_request

        async def then_deleted(*arguments: Any) -> bytes:
            data = await original(*arguments)
            await send("DELETE", f"/{other}")
            return data

        monkeypatch.setattr(replica.frontend.conversations, "of_request", then_deleted)
        reply = await respond(other)
        assert (reply.status, reply.json["status"], reply.json["conversation"]) == (200, "completed", None)

    served(replica, run)


def test_a_response_in_the_background_is_added_once_and_read_again_as_it_was(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.draws = True

    async def run() -> None:
        conversation_id = await create(items=[USER | {"content": "before"}])
        stream = await respond(conversation_id, background=True, stream=True)
        response = json.loads(stream.body.decode().split("data: ")[-1])["response"]
        assert (await ended(response["id"]))["conversation"] == {"id": conversation_id}
        items = await items_of(conversation_id)
        assert len(items) == 3
        await send("POST", f"/{conversation_id}/items", items=[USER | {"content": "behind"}])
        again = await call(app, "GET", f"/v1/responses/{response['id']}?stream=true")
        same = json.loads(again.body.decode().split("data: ")[-1])["response"]
        assert same["output"] == response["output"]
        assert len(await items_of(conversation_id)) == 4, "reading a stream adds nothing"

    served(replica, run)
    first, second = replica.dispatcher.begun
    assert (first.prompt, first.sampling.seed) == (second.prompt, second.sampling.seed)


def test_another_replica_generates_it_from_the_conversation_as_it_was(served: Served) -> None:
    dead, alive = Replica(), Replica()
    dead.dispatcher.hangs_after = 2
    share_memory(alive, dead)

    async def begin() -> tuple[str, str]:
        conversation_id = await create(items=[USER | {"content": "before"}])
        return conversation_id, (await post(conversation=conversation_id)).json["id"]

    conversation_id, response_id = served(dead, begin)

    async def go_on() -> None:
        await send("POST", f"/{conversation_id}/items", items=[USER | {"content": "behind"}])
        alive.manager.now += 20
        await alive.frontend.background.look()
        await ended(response_id)
        assert texts(await items_of(conversation_id)) == ["before", "behind", "hi", ANSWER]

    served(alive, go_on)
    assert dead.dispatcher.begun[0].prompt == alive.dispatcher.begun[0].prompt


def test_a_stream_is_resumed_though_its_answer_has_been_added(served: Served) -> None:
    """The connection may break behind the end of the generation, before the last events have arrived."""
    replica = Replica()

    async def run() -> None:
        conversation_id = await create(items=[USER | {"content": "before"}])
        whole = (await respond(conversation_id, {"last-event-id": "0"}, input="one", stream=True)).body
        *events, last = whole.decode().removesuffix("\n\n").split("\n\n")
        await send("POST", f"/{conversation_id}/items", items=[USER | {"content": "behind"}])
        event_id = events[len(events) // 2].partition("id: ")[2].partition("\n")[0]
        resumed = await respond(conversation_id, {"last-event-id": event_id}, input="one", stream=True)
        assert resumed.status == 200, resumed.body
        rest = resumed.body.decode().removesuffix("\n\n").split("\n\n")
        assert rest[:-1] == events[len(events) // 2 + 1 :]
        ends = [json.loads(each.split("data: ")[1])["response"]["output"] for each in (last, rest[-1])]
        assert ends[0] == ends[1]
        assert texts(await items_of(conversation_id)) == ["before", "one", ANSWER, "behind"]

    served(replica, run)
    first, second = replica.dispatcher.begun
    assert first.prompt == second.prompt


def test_a_replica_that_dies_between_adding_and_keeping_loses_and_doubles_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = Replica(), Replica()
    share_memory(alive, dead)
    is_dying = asyncio.Event()

    async def never(*_: Any) -> bool:
        is_dying.set()
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(dead.frontend.responses, "_end", never)

    async def begin() -> tuple[str, str]:
        conversation_id = await create()
        response_id = (await post(conversation=conversation_id)).json["id"]
        await is_dying.wait()
        return conversation_id, response_id

    conversation_id, response_id = served(dead, begin)

    async def go_on() -> None:
        assert texts(await items_of(conversation_id)) == ["hi", ANSWER]
        alive.manager.now += 20
        await alive.frontend.background.look()
        assert (await ended(response_id))["status"] == "completed"
        assert texts(await items_of(conversation_id)) == ["hi", ANSWER]

    served(alive, go_on)


def test_a_response_in_the_background_is_added_when_the_manager_is_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.engine.serving.kept_conversations.RETRY_S", 0.001)
    monkeypatch.setattr("raydix.engine.serving.stored_responses.RETRY_S", 0.001)
    monkeypatch.setattr("raydix.engine.serving.kept_conversations.MAX_WAITS", 10**6)
    replica = Replica()

    async def run() -> None:
        conversation_id = await create()
        response_id = (await post(conversation=conversation_id)).json["id"]
        replica.manager.is_away = True
        while not replica.dispatcher.ended:
            await asyncio.sleep(0)
        assert (await send("GET", f"/{conversation_id}")).status == 503
        replica.manager.is_away = False
        assert (await ended(response_id))["conversation"] == {"id": conversation_id}
        assert texts(await items_of(conversation_id)) == ["hi", ANSWER]

    served(replica, run)


def test_a_compaction_begins_the_conversation_anew(served: Served) -> None:
    replica = Replica(max_model_len=16384)

    async def run() -> None:
        long = [USER, USER | {"role": "assistant", "content": "x" * 1500}, USER | {"content": "and?"}]
        conversation_id = await create(items=long[:2])
        rule = [{"type": "compaction", "compact_threshold": 1000}]
        reply = await respond(conversation_id, input="and?", context_management=rule)
        assert [item["type"] for item in reply.json["output"]] == ["compaction", "message"]
        items = await items_of(conversation_id)
        assert [item["type"] for item in items] == [*["message"] * 3, "compaction", "message"]
        await respond(conversation_id, input="go on")

    served(replica, run)
    *_, compacted, last = (generation.prompt for generation in replica.dispatcher.begun)
    assert last[: len(compacted) + len(ANSWER)] == (*compacted, *map(ord, ANSWER))


def test_tenants_and_salts_have_conversations_of_their_own(served: Served) -> None:
    tenants = Tenants([Tenant(name) for name in KEYS], {key_hash(name): name for name in KEYS})

    async def run() -> None:
        conversation_id = (await send("POST", headers=KEYS["a"])).json["id"]
        path = f"/{conversation_id}"
        assert (await send("POST", f"{path}/items", headers=KEYS["a"], items=[USER])).status == 200
        for method, rest, fields in (
            ("GET", "", {}),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", {}),
            ("GET", "/items", {}),
            ("POST", "/items", {"items": [USER]}),
        ):
            reply = await send(method, path + rest, KEYS["b"], **fields)
            assert (reply.status, reply.json["error"]["code"]) == (404, "conversation_not_found")
        for headers, salt in ((KEYS["b"], None), (KEYS["a"], "s")):
            reply = await respond(conversation_id, headers, cache_salt=salt)
            assert (reply.status, reply.json["error"]["param"]) == (404, "conversation")
        assert (await respond(conversation_id, KEYS["a"])).status == 200
        salted = (await send("POST", "?cache_salt=s", headers=KEYS["a"])).json["id"]
        assert (await send("GET", f"/{salted}", headers=KEYS["a"])).status == 404
        assert (await send("GET", f"/{salted}?cache_salt=s", headers=KEYS["a"])).status == 200
        assert (await respond(salted, KEYS["a"], cache_salt="s")).status == 200

    served(Replica(tenants=tenants), run)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"metadata": {str(n): "x" for n in range(MAX_METADATA + 1)}}, "metadata"),
        ("", {"items": [USER] * (MAX_ADDED + 1)}, "items"),
        ("", {"items": "hi"}, "items"),
        ("", {"items": [{"type": "image"}]}, "items"),
        ("", {"items": [{"role": "user"}]}, "items"),
        ("/{id}", {}, "metadata"),
        ("/{id}/items", {"items": []}, "items"),
        ("/{id}/items", {}, "items"),
        ("/{id}/items?limit=0", None, "limit"),
        ("/{id}/items?after=x", None, "after"),
        ("/{id}/items?order=up", None, "order"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(served: Served, path: str, fields: Any, param: str) -> None:
    async def run() -> Reply:
        target = path.replace("{id}", await create())
        return await send("GET", target) if fields is None else await send("POST", target, **fields)

    reply = served(Replica(), run)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "x"}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"conversation": 3}, "conversation"),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_a_response_names_the_field_at_fault(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = served(Replica(), lambda: call(app, "POST", "/v1/responses", body_of("responses", **fields)))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_a_response_of_a_conversation_is_gone_on_from_by_the_conversation(served: Served) -> None:
    async def run() -> Reply:
        response = (await respond(await create())).json
        return await call(app, "POST", "/v1/responses", body_of("responses", previous_response_id=response["id"]))

    reply = served(Replica(), run)
    assert (reply.status, reply.json["error"]["param"]) == (400, "previous_response_id")
    assert "conv_" in reply.json["error"]["message"]


def test_a_conversation_does_not_grow_without_limit(served: Served) -> None:
    replica = Replica(max_model_len=1 << 30)
    replica.manager.responses._budget_bytes = 8 << 20
    large = USER | {"content": "x" * (MAX_BYTES // 3)}

    async def run() -> None:
        body = json.dumps({"items": [large] * 4}).encode()
        too_large = await call(app, "POST", CONVERSATIONS, body)
        assert (too_large.status, "at most" in too_large.json["error"]["message"]) == (400, True)
        conversation_id = await create(items=[large] * 2)
        refused = await send("POST", f"/{conversation_id}/items", items=[large])
        assert (refused.status, refused.json["error"]["param"]) == (400, "items")
        assert len(await items_of(conversation_id)) == 2, "nothing was added"
        assert (await respond(conversation_id, input="x" * (MAX_BYTES // 2))).status == 200, "what fitted is answered"
        full = await respond(conversation_id)
        assert (full.status, full.json["error"]["param"]) == (400, "conversation")

    served(replica, run)


def test_without_a_manager_there_is_no_conversation(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        conversation_id = await create()
        replica.manager.is_away = True
        assert (await send("POST")).status == (await respond(conversation_id)).status == 503
        replica.manager.is_away = False
        replica.manager.responses._budget_bytes = 0
        assert (await send("POST")).status == 503

    served(replica, run)


def test_calls_of_an_answer_are_items_too(served: Served) -> None:
    replica = Replica(max_model_len=16384)
    replica.dispatcher.answer = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    replica.dispatcher.finish = FinishReason.STOP
    tools = [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]

    async def run() -> None:
        conversation_id = await create()
        [made] = (await respond(conversation_id, tools=tools)).json["output"]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "noon"}
        await respond(conversation_id, input=[result], tools=tools)
        kinds = [item["type"] for item in await items_of(conversation_id)]
        assert kinds[:3] == ["message", "function_call", "function_call_output"]

    served(replica, run)
    first, second = (generation.prompt for generation in replica.dispatcher.begun)
    assert second[: len(first)] == first and "noon" in "".join(map(chr, second))
