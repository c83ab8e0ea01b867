"""Adapters as clients see them: names of models, of which a tenant's are nobody else's."""

import json
from typing import Any

import pytest

from raydix.engine.core.hashing import BlockChain
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import Adapter
from tests.unit.ingress import BLOCK_SIZE, FINGERPRINT, MODEL, ROOT, Replica, Served, body_of, call
from tests.unit.served_app import app

SQL, OWN = Adapter("sql", "/adapters/sql", b"s" * 16), Adapter("org/own", "/adapters/own", b"o" * 16)
KEYS = {"nobody": "-", "owner": "k-owner", "other": "k-other", "admin": "k-admin"}


@pytest.fixture
def replica() -> Replica:
    everybody = [Tenant("owner", adapters=("org/own", "gone")), Tenant("other"), Tenant("admin", is_admin=True)]
    tenants = Tenants(everybody, {key_hash(KEYS[each.name]): each.name for each in everybody})
    return Replica(tenants=tenants, adapters=[SQL, OWN])


def ask(served: Served, replica: Replica, tenant: str, path: str, body: bytes | None = None) -> Any:
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
    return served(replica, lambda: call(app, "GET" if body is None else "POST", path, body or b"", headers=headers))


def test_adapters_are_listed_behind_their_model(served: Served, replica: Replica) -> None:
    models = ask(served, replica, "owner", "/v1/models").json["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        (MODEL, MODEL, None),
        ("sql", "sql", MODEL),
        ("org/own", "org/own", MODEL),
    ]
    assert ask(served, replica, "owner", "/v1/models/org/own").json == models[2]


@pytest.mark.parametrize(("tenant", "has"), [("owner", True), ("admin", True), ("other", False)])
def test_a_tenants_adapter_is_there_for_its_owners_alone(
    tenant: str, has: bool, served: Served, replica: Replica
) -> None:
    """Towards the others its name is like any other name that nothing has."""

    def answers(name: str) -> list[tuple[int, str]]:
        replies = [
            ask(served, replica, tenant, f"/v1/models/{name}"),
            ask(served, replica, tenant, "/v1/completions", body_of("completion", model=name)),
            ask(served, replica, tenant, "/v1/completions", body_of("completion", model=name, temperature=9)),
            ask(served, replica, tenant, "/v1/chat/completions", body_of("chat", model=name)),
            ask(served, replica, tenant, "/tokenize", json.dumps({"model": name, "prompt": "a"}).encode()),
            ask(served, replica, tenant, "/detokenize", json.dumps({"model": name, "tokens": [65]}).encode()),
        ]
        return [(reply.status, reply.body.replace(name.encode(), b"").decode()) for reply in replies]

    names = [model["id"] for model in ask(served, replica, tenant, "/v1/models").json["data"]]
    assert ("org/own" in names) == has
    known, unknown = answers("org/own"), answers("no/one")
    assert (known != unknown) == has
    assert [status for status, _ in unknown] == [404, 404, 400, 404, 404, 404]
    assert [status for status, _ in known] == (
        [200, 200, 400, 200, 200, 200] if has else [404, 404, 400, 404, 404, 404]
    )


@pytest.mark.parametrize("route", ["completions", "chat/completions", "messages", "responses"])
def test_a_name_selects_the_adapter_and_its_own_kv(route: str, served: Served, replica: Replica) -> None:
    kind = {"completions": "completion", "chat/completions": "chat"}.get(route, route)
    answers = {
        name: ask(served, replica, "owner", f"/v1/{route}", body_of(kind, model=name)) for name in (MODEL, "sql")
    }
    assert {name: reply.json["model"] for name, reply in answers.items()} == {MODEL: MODEL, "sql": "sql"}

    plain, adapted = replica.dispatcher.begun
    assert (plain.adapter, plain.salt.adapter) == (None, b"")
    assert (adapted.adapter, adapted.salt.adapter) == (SQL, SQL.digest)
    assert plain.salt.answers != adapted.salt.answers, "past answers and drafts"
    prompt = plain.prompt * BLOCK_SIZE
    names = [BlockChain(ROOT, each.salt, BLOCK_SIZE).hashes(prompt) for each in (plain, adapted)]
    assert set(names[0]).isdisjoint(names[1])


def test_the_fingerprint_of_an_answer_is_of_the_adapters_weights(served: Served, replica: Replica) -> None:
    def fingerprint(served_by: Replica, model: str) -> str:
        answer = ask(served, served_by, "owner", "/v1/completions", body_of("completion", model=model))
        return str(answer.json["system_fingerprint"])

    assert fingerprint(replica, MODEL) == FINGERPRINT
    of_adapter = fingerprint(replica, "sql")
    assert of_adapter not in (FINGERPRINT, fingerprint(replica, "org/own"))
    other = Replica(tenants=replica.frontend.tenants, adapters=[Adapter("sql", SQL.folder, b"t" * 16)])
    assert fingerprint(other, "sql") != of_adapter, "the same name with other weights"


def test_a_name_of_the_configuration_goes_before_one_that_was_loaded() -> None:
    """A replica of another configuration may have loaded it; what is said of it is what was heard, all the same."""
    models = Replica(adapters=[SQL]).models
    loaded = [Adapter(name, "/adapters/late", b"l" * 16) for name in ("sql", MODEL, "late")]
    assert models.take(loaded) and not models.take(loaded)
    named = {name: models.adapter(name, Tenant("t")) for name in models.names(Tenant("t"))}
    assert named == {MODEL: None, "sql": SQL, "late": loaded[2]}
    assert models.report().known == tuple(loaded)


def test_an_activated_adapter_shares_what_stands_before_its_invocation(served: Served) -> None:
    call_it = Adapter("call", "/adapters/call", b"c" * 16, invocation=tuple(b"<c>"))
    replica = Replica(adapters=[call_it])
    prompt = "a long story <c> and a second <c> end"
    for model, text in ((MODEL, prompt), ("call", prompt), ("call", "no invocation")):
        reply = ask(served, replica, "nobody", "/v1/completions", body_of("completion", model=model, prompt=text))
        assert (reply.status, reply.json["model"]) == (200, model)

    plain, invoked, not_invoked = replica.dispatcher.begun
    assert (invoked.adapter, invoked.salt.num_plain_tokens) == (call_it, prompt.rindex("<c>"))
    names = [BlockChain(ROOT, each.salt, BLOCK_SIZE).hashes(plain.prompt) for each in (plain, invoked)]
    num_shared = prompt.rindex("<c>") // BLOCK_SIZE
    assert names[0][:num_shared] == names[1][:num_shared]
    assert set(names[0][num_shared:]).isdisjoint(names[1])
    assert plain.salt.answers != invoked.salt.answers
    assert (not_invoked.adapter, not_invoked.salt) == (None, plain.salt), "the model alone"
    assert invoked.idle_assignment(invoked.prompt, "i") is None and plain.idle_assignment(plain.prompt, "i") is not None
