"""What each deployment gets of a configuration, and the table of what a change of each key does."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from raydix.configs.changes import KEYS, ROLE, Change, changes
from raydix.configs.pools import WorkerSection, WorkersSection
from raydix.configs.schema import Config
from raydix.configs.section import Effect
from raydix.configs.sections import (
    INGRESS,
    MANAGER,
    IngressArguments,
    ManagerArguments,
    ManagerLive,
    WorkerArguments,
    WorkerLive,
    base_for,
    live_part,
    parts,
    read,
)
from raydix.configs.settings import settings_of
from raydix.engine.core.errors import StartupError
from raydix.engine.core.tenants import key_hash

HASH = key_hash("rdx-secret")
BASE: dict[str, Any] = {
    "workers": {"prefill": {}, "decode": {"max_requests": 32}},
    "tenants": [{"name": "alice", "key_hashes": [HASH], "cache_min": 0.25}],
}
CHANGED: dict[str, Any] = {
    "observability.otlp_endpoint": "http://127.0.0.1:4318",
    "observability.otlp_protocol": "grpc",
    "model.source": "package:other/model.gguf",
    "model.name": "another",
    "model.dtype": "float32",
    "model.quantization": "int8",
    "model.tool_parser": "hermes",
    "model.reasoning_parser": "think",
    "model.pooling": "last",
    "model.volatile_lines": ["x-date:"],
    "model.effort_tokens": {"low": 100},
    "model.adapters": {"sql": "/adapters/sql"},
    "model.adapter_folders": ["/adapters"],
    "http.unknown_fields": "ignore",
    "cache.eviction": "lru",
    "cache.dtype": "int8",
    "slo.when_late": "refuse",
    "cache.disk_path": "/elsewhere",
    "cache.public_prefixes": ["You are kind."],
    "cache.prefix_caching": False,
    f"workers.{ROLE}.device": "cuda",
    f"workers.{ROLE}.resources": {"rack": 1.0},
    f"workers.{ROLE}.label_selector": {"zone": "a"},
    "speculation.mode": "off",
    "speculation.sources": ["grammar"],
    "cache.label_selector": {"zone": "a"},
    "ingress.label_selector": {"zone": "a"},
    "ingress.reader_processes": 3,
    "http.host": "::1",
    "http.allowed_hosts": ["raydix.example"],
    "http.allowed_origins": ["https://app.example"],
    "batches.folder": "/elsewhere",
    "logging.level": "DEBUG",
    "logging.format": "text",
    "logging.recording": "/elsewhere",
    "tenants_file": "/elsewhere/tenants.yaml",
    "tenants.name": "bob",
    "tenants.adapters": ["sql"],
    "tenants.key_hashes": [key_hash("rdx-another")],
}
"""Other values of keys that are no numbers and no switches."""
WORKERS = {"prefill", "decode"}
RESTARTED: Mapping[Effect, set[str]] = {
    Effect.INGRESS: {INGRESS},
    Effect.MANAGER: {MANAGER},
    Effect.ROLE: {"decode"},
    Effect.WORKERS: WORKERS,
    Effect.INGRESS_AND_MANAGER: {INGRESS, MANAGER},
    Effect.INGRESS_AND_WORKERS: {INGRESS, *WORKERS},
    Effect.EVERYTHING: {INGRESS, MANAGER, *WORKERS},
}
KEYS_OF_ROLES = {"workers.prefill", "workers.decode", "workers.mixed", "workers.elastic"}


def schema_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the schema by its path."""
    for name, field in section.model_fields.items():
        nested = next((kind for kind in _kinds(field.annotation) if issubclass(kind, BaseModel)), None)
        if nested is None or section is WorkersSection:
            yield f"{prefix}{name}"
        if nested is not None:
            yield from _nested_keys(nested, prefix, name, is_role=section is WorkersSection)


def _nested_keys(section: type[BaseModel], prefix: str, name: str, *, is_role: bool) -> Iterator[str]:
    """The keys of a section; those that all roles have count as one role's."""
    for key in schema_keys(section, f"{prefix}{name}."):
        last = key.rpartition(".")[2]
        yield f"{prefix}{ROLE}.{last}" if is_role and last in WorkerSection.model_fields else key


def _kinds(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _kinds(argument)


def base_of(key: str) -> dict[str, Any]:
    """The configuration before a change of the key: with elastic workers, if the key is theirs."""
    if not key.startswith("workers.elastic."):
        return BASE
    return {**BASE, "workers": {**BASE["workers"], "elastic": {"min_replicas": 2, "max_replicas": 9}}}


def changed(key: str) -> Config:
    """The configuration with another value of one key."""
    content = Config.model_validate(base_of(key)).model_dump()
    *path, name = key.replace(ROLE, "decode").split(".")
    section: Any = content
    for part in path:
        section = section[part]
    if key.startswith("tenants."):
        section = section[0]
    old = section[name]
    if key in CHANGED:
        section[name] = CHANGED[key]
    elif isinstance(old, bool):
        section[name] = not old
    else:
        section[name] = 64 if old is None else old / 2 if isinstance(old, float) and old else old + 1
    if key == "cache.prefix_caching":
        content["tenants"][0]["cache_min"] = 0
    if key == "tenants_file":
        content["tenants"] = []
    return Config.model_validate(content)


def compared(new: Config, what: Callable[[Any], object], base: dict[str, Any] = BASE) -> set[str]:
    """The deployments with a difference."""
    old_parts, new_parts = parts(Config.model_validate(base)), parts(new)
    return {name for name in new_parts if what(old_parts[name]) != what(new_parts[name])}


def test_the_table_has_every_key_and_no_other() -> None:
    assert set(schema_keys(Config)) == KEYS.keys()


@pytest.mark.parametrize("key", sorted(KEYS.keys() - KEYS_OF_ROLES))
def test_the_table_says_what_a_change_does(key: str) -> None:
    new, effect, base = changed(key), KEYS[key], base_of(key)
    assert compared(new, lambda part: part.version("code"), base) == RESTARTED.get(effect, set())
    assert compared(new, lambda part: part.arguments, base) == RESTARTED.get(effect, set())
    numbers = compared(new, lambda part: part.replicas, base)
    assert numbers == ({key.replace(ROLE, "decode").split(".")[-2]} if effect is Effect.NUMBER else set())
    assert INGRESS in compared(new, lambda part: part.live, base), "the ingress shows the whole configuration"


@pytest.mark.parametrize("key", sorted(KEYS.keys() - KEYS_OF_ROLES))
def test_a_change_is_told_with_its_effect(key: str) -> None:
    found = changes(Config.model_validate(base_of(key)), changed(key))
    if key in ("cache.prefix_caching", "tenants_file"):
        found = [change for change in found if change.key == key]
    if key.startswith("tenants."):
        assert {change.effect for change in found} == {Effect.IN_PLACE}
        assert HASH not in repr(found) and found[0].key.startswith("tenants.")
    else:
        assert [(change.key, change.effect) for change in found] == [(key.replace(ROLE, "decode"), KEYS[key])]
        assert found[0].was != found[0].becomes


def test_in_place_is_where_no_argument_changes() -> None:
    live = {key for key, effect in KEYS.items() if effect is Effect.IN_PLACE}
    assert {"ingress.max_queued_requests", f"workers.{ROLE}.token_budget", "logging.level", "tenants.name"} <= live


def test_batches_are_turned_off_and_on_by_a_restart() -> None:
    off = Config.model_validate({**BASE, "batches": {"gib": 0}})
    assert compared(off, lambda part: part.arguments) == {INGRESS}
    assert "from or to 0" in KEYS["batches.gib"]


def test_roles_come_and_go() -> None:
    old, new = Config.model_validate(BASE), Config.model_validate({"workers": {"mixed": {}, "elastic": {}}})
    assert parts(new).keys() == {MANAGER, "mixed", "elastic", INGRESS}
    assert {change.key for change in changes(old, new)} >= KEYS_OF_ROLES
    assert all(KEYS[key] is Effect.ROLES for key in KEYS_OF_ROLES)
    beside = Config.model_validate({**BASE, "workers": {**BASE["workers"], "mixed": {}}})
    for name, part in parts(old).items():
        assert parts(beside)[name].arguments == part.arguments


def test_tenants_are_told_by_name_alone() -> None:
    old = Config.model_validate(BASE)
    tenants = [{"name": "alice", "max_requests": 3}, {"name": "bob", "key_hashes": [HASH]}]
    found = changes(old, Config.model_validate({**BASE, "tenants": tenants}))
    assert [(change.key, change.was, change.becomes) for change in found] == [
        ("tenants.alice", "known", "changed"),
        ("tenants.bob", "unknown", "known"),
    ]
    assert changes(old, Config.model_validate({**BASE, "tenants": []})) == [
        Change("tenants.alice", "known", "unknown", Effect.IN_PLACE)
    ]
    assert changes(old, old) == []


def test_key_hashes_go_to_the_ingress_alone() -> None:
    found = parts(Config.model_validate(BASE))
    assert [name for name, part in found.items() if HASH in repr(part)] == [INGRESS]
    assert HASH not in repr(found[INGRESS].arguments)
    assert found[MANAGER].live["shares"] == [{"name": "alice", "cache_min": 0.25, "cache_max": 1.0, "weight": 1.0}]


def test_a_tenant_without_a_share_changes_no_worker() -> None:
    new = Config.model_validate({**BASE, "tenants": [*BASE["tenants"], {"name": "bob"}]})
    assert compared(new, lambda part: part.live) == {INGRESS}


def test_other_code_is_another_version_everywhere() -> None:
    found = parts(Config.model_validate(BASE))
    assert all(part.version("one") != part.version("other") for part in found.values())
    assert all(part.version("one") == part.version("one") for part in found.values())


@pytest.mark.parametrize(
    "key", [key for key, effect in KEYS.items() if "workers" in effect and effect not in (Effect.ROLES, Effect.ROLE)]
)
def test_an_engine_gets_the_keys_that_restart_workers(key: str) -> None:
    """None of them is left out of the part that an engine is made of."""
    drafting = {} if key == "speculation.mode" else {"mode": "auto"}
    old = Config.model_validate({**BASE, "speculation": drafting})
    content = changed(key).model_dump()
    new = Config.model_validate({**content, "speculation": {**content["speculation"], **drafting}})
    assert settings_of(*worker_parts(new)) != settings_of(*worker_parts(old))


def worker_parts(config: Config) -> tuple[WorkerArguments, WorkerLive]:
    part = parts(config)["decode"]
    return read(WorkerArguments, part.arguments), read(WorkerLive, part.live)


def nested(key: str, value: Any) -> dict[str, Any]:
    """Plain values of a configuration with one key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    found: dict[str, Any] = value
    return found


@pytest.mark.parametrize("key", sorted(key for key in KEYS.keys() - KEYS_OF_ROLES if not key.startswith("tenants.")))
def test_a_user_config_may_have_what_changes_in_place_and_no_other_key(key: str) -> None:
    """As the table says, for every key and deployment."""
    without = {**base_of(key), "tenants": []} if key == "tenants_file" else base_of(key)
    old, new = Config.model_validate(without), changed(key)
    value: Any = new.model_dump(mode="json")
    path = key.replace(ROLE, "decode")
    for step in path.split("."):
        value = value[step]
    for name, part in parts(new).items():
        if KEYS[key].is_live:
            assert live_part(name, base_for(name, old), nested(path, value)) == part.live or name == INGRESS
        else:
            with pytest.raises(StartupError, match=rf"user_config: {re.escape(path)} {KEYS[key]}"):
                live_part(name, base_for(name, old), nested(path, value))
    if KEYS[key].is_live:
        assert Config.model_validate(live_part(INGRESS, base_for(INGRESS, old), nested(path, value))) == new


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"ingress": {"max_queued": 3}}, "unknown key 'ingress.max_queued', did you mean 'max_queued_requests'"),
        ({"ingress": {"max_queued_requests": 0}}, "ingress.max_queued_requests: Input should be greater"),
        ({"workers": {"mixed": {}}}, "workers.mixed starts or ends"),
        ({"workers": {"decode": None}}, "workers.decode starts or ends"),
        ({"workers": {"decode": {"resources": {"rack": 1}}}}, "workers.decode.resources restarts the workers"),
        ({"workers": {"decode": {"token_budget": 16}}}, r"token_budget \(16\) must be at least max_requests \(32\)"),
        ({"batches": {"gib": 0}}, "batches.gib applies in place; from or to 0 restarts the ingress; args have 4"),
        ({"tenants_file": "/t"}, "tenants are given, and a tenants_file"),
        ({"more": {"and": {"more": 1}}}, "unknown key 'more'"),
    ],
)
def test_a_wrong_user_config_is_refused_by_name(user_config: dict[str, Any], words: str) -> None:
    base = base_for(MANAGER, Config.model_validate(BASE))
    with pytest.raises(StartupError, match=words):
        live_part(MANAGER, base, user_config)


def test_an_empty_user_config_changes_nothing() -> None:
    config = Config.model_validate(BASE)
    for name, part in parts(config).items():
        assert live_part(name, base_for(name, config), {}) == part.live


def test_a_base_has_key_hashes_for_the_ingress_alone() -> None:
    config = Config.model_validate(BASE)
    assert [name for name in parts(config) if HASH in repr(base_for(name, config))] == [INGRESS]


def test_parts_are_read_whole_or_not_at_all() -> None:
    found = parts(Config.model_validate(BASE))
    assert read(Config, found[INGRESS].live) == Config.model_validate(BASE)
    assert read(IngressArguments, found[INGRESS].arguments).hands_over
    assert read(ManagerArguments, found[MANAGER].arguments).cache.block_size == 16
    without = {key: value for key, value in found[INGRESS].live.items() if key != "tenants"}
    with pytest.raises(StartupError, match="Config without tenants: all keys are needed here"):
        read(Config, without)
    with pytest.raises(StartupError, match=r"ManagerLive: .*level"):
        read(ManagerLive, {**found[MANAGER].live, "level": "LOUD"})
    with pytest.raises(StartupError, match="greater than or equal to 16"):
        read(WorkerLive, {**found["decode"].live, "token_budget": 8})
