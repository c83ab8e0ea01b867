"""Another configuration for an ingress replica that runs: limits, tenants, trusted sites; refused, or applied whole."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from ray import serve

from raydix.actors.ingress.app import Ingress
from raydix.configs import Config
from raydix.configs.sections import INGRESS, parts
from raydix.engine.core.tenants import key_hash
from tests.unit.ingress import ANSWER, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

BASE: dict[str, Any] = {"workers": {"mixed": {}}, "batches": {"gib": 0}}


def live_of(**sections: Any) -> Mapping[str, Any]:
    return parts(Config.model_validate({**BASE, **sections}))[INGRESS].live


async def change(**sections: Any) -> None:
    """Hand another configuration to the replica, as Serve does."""
    ingress: Any = serve.get_replica_context().servable_object
    await ingress.reconfigure(live_of(**sections))


def post(key: str | None = None, **headers: str) -> Awaitable[Reply]:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return call(app, "POST", "/v1/completions", body_of("completion"), headers=headers)


def run(served: Served, work: Callable[[], Awaitable[Any]], replica: Replica | None = None) -> Any:
    return served(replica or Replica(), work)


def tenants(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "key_hashes": [key_hash(f"rdx-{name}")]} for name in names]


def test_tenants_come_and_go_at_once(served: Served) -> None:
    replica = Replica()

    async def work() -> list[int]:
        statuses = [(await post()).status]
        await change(tenants=tenants("alice"))
        statuses += [(await post()).status, (await post("rdx-alice")).status, (await post("rdx-bob")).status]
        await change(tenants=tenants("bob"))
        return [*statuses, (await post("rdx-alice")).status, (await post("rdx-bob")).status]

    assert run(served, work, replica) == [200, 401, 200, 401, 401, 200]
    assert [ended.tenant for ended in replica.ledger.ended] == ["anonymous", "alice", "bob"]
    assert {"alice", "bob"} <= {*replica.ledger.known}


def test_a_lower_limit_refuses_the_next_request(served: Served) -> None:
    replica = Replica()

    async def work() -> tuple[Reply, Reply]:
        replica.dispatcher.hangs_after = 3
        running = asyncio.ensure_future(post())
        while not replica.dispatcher.begun:
            await asyncio.sleep(0)
        await change(ingress={"max_queued_requests": 1})
        refused = await post()
        replica.dispatcher.hangs_after = None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return refused, await post()

    refused, answered = run(served, work, replica)
    assert refused.status == 429 and "at most 1" in refused.json["error"]["message"]
    assert answered.status == 200 and answered.json["choices"][0]["text"] == ANSWER


def test_bodies_and_sites_have_other_limits_at_once(served: Served) -> None:
    replica = Replica()
    site = {"origin": "https://app.example"}

    async def work() -> list[int]:
        statuses = [(await post(**site)).status]
        await change(
            ingress={"max_body_bytes": 1024, "max_waiting_mib": 2, "any_content_type": True},
            http={"allowed_origins": [site["origin"]]},
        )
        body = body_of("completion", prompt="x" * 2000)
        too_long = await call(app, "POST", "/v1/completions", body)
        plain = await call(
            app, "POST", "/v1/completions", body_of("completion"), headers={"content-type": "text/plain"}
        )
        return [*statuses, (await post(**site)).status, too_long.status, plain.status]

    assert run(served, work, replica) == [403, 200, 413, 200]
    assert replica.reader.max_waiting_bytes == 2 << 20


def test_the_settings_shown_are_those_of_now(served: Served) -> None:
    async def work() -> Any:
        await change(workers={"mixed": {"replicas": 3}}, ingress={"max_queued_requests": 7})
        return (await call(app, "GET", "/server_info")).json["raydix_config"]

    shown = run(served, work)
    assert shown["ingress"]["max_queued_requests"] == 7
    assert shown["workers"]["mixed"]["replicas"] == 3


def test_an_invalid_change_changes_nothing(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> tuple[int, int]:
        await change(tenants=tenants("alice"))
        ingress: Any = serve.get_replica_context().servable_object
        good = live_of(tenants=tenants("alice"))
        without = {key: value for key, value in good.items() if key != "tenants"}
        for wrong in (
            without,
            {**good, "ingress": {"max_queued_requests": 0}},
            {**good, "ingress": {"max_queued": 3}},
            live_of(model={"name": "another"}),
        ):
            await ingress.reconfigure(wrong)
            assert caplog.records.pop().about["event"] == "change_refused"  # type: ignore[attr-defined]
        await ingress.check_health()
        return (await post()).status, (await post("rdx-alice")).status

    assert run(served, work) == (401, 200)


def test_nobody_is_let_in_before_the_first_configuration() -> None:
    as_written: Any = Ingress.__mro__[1]  # Serve's wrapper around it wants a replica
    ingress = as_written(parts(Config.model_validate(BASE))[INGRESS].arguments)
    with pytest.raises(RuntimeError, match="no user_config"):
        asyncio.run(ingress.check_health())
    assert not hasattr(ingress, "frontend")
