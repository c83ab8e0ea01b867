"""The table of a replica's requests: their states, who sees which, and the stream of changes."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from raydix.engine.core.errors import OverloadedError
from raydix.engine.core.tenants import EVERYONE, Tenant, Tenants, key_hash
from raydix.engine.core.types import Admission
from raydix.engine.serving.request_table import MAX_FOLLOWERS, MAX_ROWS, NUM_ENDED
from tests.unit.ingress import ANSWER, MODEL, Replica, Reply, Served, call
from tests.unit.served_app import app

A, B = Tenant("a"), Tenant("b")
BOSS = Tenant("boss", is_admin=True)
TENANTS = Tenants([A, B, BOSS], {key_hash(name): name for name in ("a", "b", "boss")})


async def job_of(replica: Replica, tenant: Tenant = EVERYONE, **fields: Any) -> Any:
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 20, **fields}).encode()
    return await replica.frontend.preparation.of_body("completion", body, tenant)


def rows(replica: Replica, tenant: Tenant = EVERYONE) -> Any:
    return replica.requests.report(tenant)["requests"]


async def next_of(events: AsyncGenerator[bytes]) -> Any:
    name, data = (await anext(events)).decode().rstrip().split("\n")
    assert name == "event: requests"
    return json.loads(data.removeprefix("data: "))


def ask(path: str, key: str, **options: Any) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "GET", path, headers={"authorization": f"Bearer {key}"}, **options)


def test_a_request_is_shown_from_its_beginning_to_its_end(served: Served) -> None:
    replica = Replica()

    async def life() -> None:
        job = await job_of(replica)
        [answer] = job.answers
        with replica.frontend.accounted(job):
            [row] = rows(replica)
            assert (row["state"], row["placed_s"], row["prompt_tokens"]) == ("waiting", None, 2)

            answer.generation.place(Admission("r", 0, "p", "d", 1, 1, (), ()), 4, job.arrived_at + 0.5)
            [row] = rows(replica)
            assert (row["state"], row["placed_s"]) == ("prefilling", 0.5)
            assert (row["prefill_workers"], row["decode_workers"]) == (["p"], ["d"])

            async with aclosing(replica.output.pieces(answer)) as pieces:
                await anext(pieces)
                [row] = rows(replica)
                assert (row["state"], row["generated_tokens"], row["ended_at"]) == ("decoding", 1, None)
                assert (row["attempts"], row["moved_s"]) == (1, None)
                assert replica.requests.report(EVERYONE)["counts"] == {"waiting": 0, "prefilling": 0, "decoding": 1}
                async for _ in pieces:
                    pass
            replica.clock()  # a second later
        [row] = rows(replica)
        assert (row["state"], row["outcome"], row["generated_tokens"]) == ("ended", "stop", len(ANSWER) + 1)
        assert (row["cached_tokens"], row["id"]) == (2, job.head.id)
        assert row["first_token_s"] < row["ended_s"]
        assert round(row["ended_at"] - row["arrived_at"], 3) == row["ended_s"]
        assert replica.requests.report(EVERYONE)["counts"] == {"waiting": 0, "prefilling": 0, "decoding": 0}

    served(replica, life)


def test_a_failover_leaves_the_time_of_the_first_placement(served: Served) -> None:
    replica = Replica()

    async def life() -> None:
        job = await job_of(replica)
        [answer] = job.answers
        with replica.frontend.accounted(job):
            answer.generation.place(Admission("r", 0, "p", "d", 1, 1, (), ()), 4, job.arrived_at + 0.5)
            answer.generation.start_over(1.0)
            answer.generation.place(Admission("r", 1, "e", "e", 1, 1, (), ()), 4, job.arrived_at + 3.0)
            [row] = rows(replica)
            assert (row["attempts"], row["placed_s"], row["moved_s"]) == (2, 0.5, 3.0)
            assert row["decode_workers"] == ["e"]

    served(replica, life)


def test_a_failed_request_is_shown_as_failed(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 1

    async def life() -> None:
        with pytest.raises(Exception, match="every worker died"):
            await replica.whole()
        assert [row["outcome"] for row in rows(replica)] == ["failed"]

    served(replica, life)


def test_a_tenant_sees_its_own_requests_and_an_administrator_all(served: Served) -> None:
    replica = Replica(tenants=TENANTS)

    async def run() -> None:
        for tenant in (A, B):
            ended, under_way = await job_of(replica, tenant), await job_of(replica, tenant)
            with replica.frontend.accounted(ended):
                await replica.frontend.output.collect(ended)
            open_ones.append(replica.frontend.accounted(under_way))
            open_ones[-1].__enter__()

    open_ones: list[Any] = []
    served(replica, run)
    seen = {key: served(replica, ask("/v1/requests", key)).json for key in ("a", "b", "boss")}
    assert {row["tenant"] for row in seen["a"]["requests"]} == {"a"} and len(seen["a"]["requests"]) == 2
    assert {row["tenant"] for row in seen["b"]["requests"]} == {"b"} and seen["b"]["counts"]["waiting"] == 1
    assert len(seen["boss"]["requests"]) == 4 and seen["boss"]["counts"]["waiting"] == 2
    ends = [row["ended_at"] for row in seen["boss"]["requests"] if row["state"] == "ended"]
    assert ends == sorted(ends, reverse=True)
    for each in open_ones:
        each.__exit__(None, None, None)


def test_events_have_what_changed(served: Served) -> None:
    replica = Replica(tenants=TENANTS)

    async def follow() -> None:
        async with (
            aclosing(replica.requests.events(A)) as events,
            aclosing(replica.requests.events(BOSS)) as all_events,
        ):
            assert await next_of(events) == {"counts": {"waiting": 0, "prefilling": 0, "decoding": 0}, "requests": []}
            await next_of(all_events)
            other, own = await job_of(replica, B), await job_of(replica, A)
            with replica.frontend.accounted(other), replica.frontend.accounted(own):
                event, both = await next_of(events), await next_of(all_events)
                assert [row["tenant"] for row in event["requests"]] == ["a"] and event["counts"]["waiting"] == 1
                assert [row["tenant"] for row in both["requests"]] == ["b", "a"]
                await replica.frontend.output.collect(own)
                event = await next_of(events)
                assert [(row["state"], row["number"]) for row in event["requests"]] == [("decoding", 2)]
            assert [row["state"] for row in (await next_of(events))["requests"]] == ["ended"]

    served(replica, follow)


def test_a_stream_of_requests_ends_with_its_client(served: Served) -> None:
    replica = Replica(tenants=TENANTS)
    reply = served(replica, ask("/v1/requests/events", "a", leaves_at=lambda reply: b"\n\n" in reply.body))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.startswith(b"event: requests\ndata: {")
    assert served(replica, ask("/v1/requests/events", "wrong")).status == 401


def test_a_tenant_has_few_followers_and_keeps_nobody_out(served: Served) -> None:
    replica = Replica(tenants=TENANTS)

    async def follow() -> None:
        streams = [replica.requests.events(A) for _ in range(MAX_FOLLOWERS)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(OverloadedError):
            await anext(replica.requests.events(A))
        others = replica.requests.events(B)
        await anext(others)
        await others.aclose()
        await streams.pop().aclose()
        streams.append(replica.requests.events(A))
        await anext(streams[-1])
        for stream in streams:
            await stream.aclose()

    served(replica, follow)


def test_the_table_is_bounded(served: Served) -> None:
    replica = Replica(max_requests=MAX_ROWS + 10)

    async def run() -> None:
        jobs = [await job_of(replica) for _ in range(MAX_ROWS + 1)]
        with replica.frontend.all_accounted(jobs):
            report = replica.requests.report(EVERYONE)
            assert (report["counts"]["waiting"], len(report["requests"])) == (MAX_ROWS + 1, MAX_ROWS)
        assert len(rows(replica)) == NUM_ENDED
        assert rows(replica)[0]["number"] == 1  # the last one of a stack to end

    served(replica, run)
