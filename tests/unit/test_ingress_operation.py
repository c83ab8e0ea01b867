"""Routes for load balancers and operators: `/ping`, `/load`, `/server_info`, `/reset_prefix_cache`."""

import json
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import MODEL, Replica, Reply, Served, call
from tests.unit.served_app import app

ADMIN, OTHER = Tenant("boss", is_admin=True), Tenant("a")
TENANTS = Tenants([ADMIN, OTHER], {key_hash("b"): "boss", key_hash("k"): "a"})


def ask(method: str, path: str, key: str | None = None) -> Callable[[], Awaitable[Reply]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return lambda: call(app, method, path, headers=headers)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_health_and_needs_no_key(served: Served, method: str) -> None:
    replica = Replica(tenants=TENANTS)
    assert served(replica, ask(method, "/ping")).json == {"status": "ok"}
    replica.dispatcher.is_ready = False
    assert served(replica, ask(method, "/ping")).status == 503


def test_the_load_is_one_s_own_and_all_of_it_for_administrators(served: Served) -> None:
    replica = Replica(tenants=TENANTS)
    with replica.room.reserve(2, ADMIN), replica.room.reserve(3, OTHER):
        assert served(replica, ask("GET", "/load", "k")).json == {"server_load": 3}
        assert served(replica, ask("GET", "/load", "b")).json == {"server_load": 5}
        assert served(replica, ask("GET", "/load")).status == 401
    assert served(Replica(), ask("GET", "/load")).json == {"server_load": 0}


def test_server_info_has_settings_and_no_texts(served: Served, tmp_path: Path) -> None:
    config = {
        "model": {"source": "/secret/model", "dtype": "float32"},
        "cache": {"disk_path": "/secret/disk", "disk_gib": 1, "public_prefixes": ["secret"], "eviction": "lru"},
        "logging": {"recording": str(tmp_path / "secret"), "level": "DEBUG"},
        "http": {"host": "secret.example"},
        "tenants": [{"name": "secret", "key_hashes": ["ab" * 32]}],
        "workers": {"mixed": {"resources": {"secret": 1}, "token_budget": 777}},
    }
    reply = served(Replica(), ask("GET", "/server_info?config_format=json"), **config)
    assert b"secret" not in reply.body and b"abab" not in reply.body
    shown = reply.json["raydix_config"]
    assert reply.json["model"]["id"] == MODEL
    assert (shown["model"], shown["cache"]["eviction"]) == (shown["model"] | {"dtype": "float32"}, "lru")
    assert shown["workers"]["mixed"]["token_budget"] == 777
    assert shown["workers"]["prefill"] is None
    assert shown["logging"]["level"] == "DEBUG"
    assert "tenants" not in shown
    assert reply.json["system_env"]["raydix"] == version("raydix")


def test_server_info_is_for_administrators_and_in_json(served: Served) -> None:
    replica = Replica(tenants=TENANTS)
    assert served(replica, ask("GET", "/server_info", "k")).status == 403
    assert served(replica, ask("GET", "/server_info", "b")).status == 200
    assert served(Replica(), ask("GET", "/server_info?config_format=text")).json["error"]["param"] == "config_format"


def test_the_prefix_cache_is_reset_under_vllm_s_name_too(served: Served) -> None:
    reset = {"object": "cache.reset", "blocks": 3}
    assert served(Replica(), ask("POST", "/reset_prefix_cache")).json == reset
    assert served(Replica(), ask("POST", "/reset_prefix_cache?reset_external=true")).json == reset
    assert served(Replica(), ask("POST", "/reset_prefix_cache?reset_running_requests=false")).json == reset
    assert served(Replica(tenants=TENANTS), ask("POST", "/reset_prefix_cache", "k")).status == 403


@pytest.mark.parametrize("query", ["reset_running_requests=true", "reset_running_requests=maybe", "reset_external=2"])
def test_resets_that_are_refused(served: Served, query: str) -> None:
    reply = served(Replica(), ask("POST", f"/reset_prefix_cache?{query}"))
    assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, query.partition("=")[0])
