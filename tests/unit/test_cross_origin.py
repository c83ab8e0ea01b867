"""Pages of other sites: what the configuration lets a browser do for them, and what it keeps from them."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import ValidationError

from raydix.configs.schema import HttpSection
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

GOOD, EVIL = "https://good.example", "https://evil.example"
ALLOW = "access-control-allow-origin"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def config(*origins: str) -> dict[str, Any]:
    return {"allowed_origins": list(origins)}


def ask(origin: str, method: str = "POST", **headers: str) -> Callable[[], Awaitable[Reply]]:
    body = body_of("completion") if method == "POST" else b""
    return lambda: call(app, method, "/v1/completions", body, headers={"origin": origin} | headers)


def test_an_allowed_page_may_ask_and_read(served: Served) -> None:
    reply = served(Replica(), ask(GOOD, "OPTIONS", **PREFLIGHT), http=config(GOOD))
    assert (reply.status, reply.headers[ALLOW]) == (200, GOOD)
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in reply.headers
    reply = served(Replica(), ask(GOOD), http=config(GOOD))
    assert (reply.status, reply.headers[ALLOW], reply.headers["vary"]) == (200, GOOD, "Origin")


def test_an_allowed_page_may_read_errors_too(served: Served) -> None:
    tenants = Tenants([Tenant("a")], {key_hash("k"): "a"})
    reply = served(Replica(tenants=tenants), ask(GOOD), http=config(GOOD))
    assert (reply.status, reply.headers[ALLOW]) == (401, GOOD)
    full = Replica(max_requests=1)
    with full.room.reserve(1, Tenant("a")):
        reply = served(full, ask(GOOD), http=config(GOOD))
    shown = reply.headers["access-control-expose-headers"].split(", ")
    assert (reply.status, shown[:2]) == (429, ["retry-after", "x-raydix-ignored"])
    assert {"x-ratelimit-remaining-requests", "anthropic-ratelimit-requests-remaining"} < set(shown)


@pytest.mark.parametrize("origins", [(), (GOOD,)], ids=["off", "on for another"])
@pytest.mark.parametrize("method", ["POST", "OPTIONS", "GET"])
def test_any_other_page_may_not(served: Served, origins: tuple[str, ...], method: str) -> None:
    reply = served(Replica(), ask(EVIL, method, **(PREFLIGHT if method == "OPTIONS" else {})), http=config(*origins))
    assert reply.status == (403 if method == "POST" else 405)
    assert not any(name.startswith("access-control") for name in reply.headers)


def test_all_pages_may_where_the_configuration_says_so(served: Served) -> None:
    for origin in (EVIL, "null"):
        reply = served(Replica(), ask(origin), http=config("*"))
        assert (reply.status, reply.headers[ALLOW]) == (200, "*")


def test_the_content_type_and_the_host_are_checked_for_allowed_pages_too(served: Served) -> None:
    plain = {"content-type": "text/plain"}
    assert served(Replica(), ask(GOOD, **plain), http=config(GOOD)).status == 415
    http = config(GOOD) | {"allowed_hosts": ["localhost"]}
    assert served(Replica(), ask(GOOD, host="rebound.example"), http=http).status == 403


def test_a_request_of_no_page_is_as_ever(served: Served) -> None:
    reply = served(Replica(), lambda: call(app, "POST", "/v1/completions", body_of("completion")), http=config(GOOD))
    assert reply.status == 200 and ALLOW not in reply.headers


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://[::1]:1", "tauri://localhost"])
def test_origins_that_can_be_configured(origin: str) -> None:
    assert HttpSection(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize("origin", ["", "good.example", "https://good.example/", "https://Good.example", "null"])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        HttpSection(allowed_origins=(origin,))
