"""Headers with the limit of requests and what is left of it, in the words of each API."""

from datetime import UTC, datetime
from typing import Any

from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def of_openai(reply: Reply) -> tuple[str, str, str]:
    named = ("limit", "remaining", "reset")
    limit, remaining, reset = (reply.headers[f"x-ratelimit-{name}-requests"] for name in named)
    return limit, remaining, reset


def of_anthropic(reply: Reply) -> tuple[str, str]:
    reset = reply.headers["anthropic-ratelimit-requests-reset"]
    assert abs((datetime.fromisoformat(reset) - datetime.now(UTC)).total_seconds()) < 60
    assert not [name for name in reply.headers if name.startswith("x-ratelimit")]
    return (
        reply.headers["anthropic-ratelimit-requests-limit"],
        reply.headers["anthropic-ratelimit-requests-remaining"],
    )


def test_whole_answers_streams_and_errors_have_them(served: Served) -> None:
    replica = Replica(max_requests=2)

    async def run() -> None:
        cases: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
            ({}, ("2", "2", "0s")),  # when a whole answer is sent, its place is free again
            ({"stream": True}, ("2", "1", "1s")),
            ({"temperature": -1}, ("2", "2", "0s")),
        ]
        for fields, expected in cases:
            assert of_openai(await call(app, "POST", CHAT, body_of("chat", **fields))) == expected
            assert of_anthropic(await call(app, "POST", MESSAGES, body_of("messages", **fields))) == expected[:2]
        count = await call(
            app, "POST", f"{MESSAGES}/count_tokens", b'{"messages": [{"role": "user", "content": "hi"}]}'
        )
        assert count.status == 200 and of_anthropic(count) == ("2", "2")

    served(replica, run)


def test_a_refused_client_learns_that_nothing_is_left_and_when_to_try_again(served: Served) -> None:
    replica = Replica(max_requests=1)
    replica.dispatcher.hangs_after = 2

    async def run() -> None:
        queued = await call(app, "POST", "/v1/responses", body_of("responses", background=True))
        reply = await call(app, "POST", CHAT, body_of("chat"))
        assert (reply.status, reply.headers["retry-after"], of_openai(reply)) == (429, "1", ("1", "0", "1s"))
        reply = await call(app, "POST", MESSAGES, body_of("messages"))
        assert (reply.status, reply.headers["retry-after"], of_anthropic(reply)) == (429, "1", ("1", "0"))
        await call(app, "POST", f"/v1/responses/{queued.json['id']}/cancel")

    served(replica, run)


def test_a_tenant_sees_its_own_limit_and_a_stranger_none(served: Served) -> None:
    tenants = Tenants([Tenant("a", max_requests=3), Tenant("b")], {key_hash(name): name for name in ("a", "b")})
    replica = Replica(max_requests=10, tenants=tenants)

    async def run() -> None:
        for key, limit in (("a", "3"), ("b", "10")):
            reply = await call(app, "POST", CHAT, body_of("chat"), headers={"authorization": f"Bearer {key}"})
            assert of_openai(reply) == (limit, limit, "0s")
        for reply in (await call(app, "POST", CHAT, body_of("chat")), await call(app, "GET", "/health")):
            assert not [name for name in reply.headers if "ratelimit" in name]

    served(replica, run)
