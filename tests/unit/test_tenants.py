"""Who asks, and which salt that gives."""

from itertools import combinations

import pytest

from raydix.engine.core.errors import AuthenticationError, RequestError
from raydix.engine.core.eviction.queue import Quota
from raydix.engine.core.tenants import (
    ANONYMOUS,
    EVERYONE,
    Tenant,
    Tenants,
    key_hash,
    num_public_tokens,
    quotas,
    salt_of,
)

ALICE, BOB = Tenant("alice", is_admin=True, cache_min=0.25), Tenant("bob", max_requests=2)
TENANTS = Tenants([ALICE, BOB], {key_hash("rdx-a"): "alice", key_hash("rdx-a2"): "alice", key_hash("rdx-b"): "bob"})


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [("Bearer rdx-a", ALICE), ("Bearer rdx-a2", ALICE), ("bearer  rdx-b ", BOB)],
)
def test_a_key_names_its_tenant(authorization: str, tenant: Tenant) -> None:
    assert TENANTS.authenticate(authorization) == tenant


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic rdx-a",
        "rdx-a",
        "Bearer rdx-c",
        f"Bearer {key_hash('rdx-a')}",
        "Bearer é\xff",
    ],
)
def test_anything_else_is_refused_without_being_repeated(authorization: str | None) -> None:
    with pytest.raises(AuthenticationError) as caught:
        TENANTS.authenticate(authorization)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    secret = (authorization or "").rpartition(" ")[2]
    assert secret in ("", "Bearer") or secret not in caught.value.message


def test_without_tenants_the_server_is_open() -> None:
    for authorization in (None, "Bearer none", "nonsense"):
        assert Tenants().authenticate(authorization) is EVERYONE


def test_a_trusted_program_names_the_tenant() -> None:
    assert TENANTS.named("bob") == BOB
    assert TENANTS.named(None) is ANONYMOUS
    assert Tenants([Tenant("anonymous", cache_max=0.1)]).named(None).cache_max == 0.1
    with pytest.raises(RequestError, match="no tenant 'carol'") as caught:
        TENANTS.named("carol")
    assert caught.value.param == "tenant"


def test_no_other_name_and_cache_salt_come_to_the_same_salt() -> None:
    asked = [
        (name, salt) for name in ("a", "ab", "abc", "é", "anonymous") for salt in (None, "a", "b", "bc", "c", "\0")
    ]
    salts = {pair: salt_of(*pair).private for pair in asked}
    assert all(salts[one] != salts[two] for one, two in combinations(asked, 2))
    assert salt_of("a", "b") == salt_of("a", "b")


def test_a_cache_salt_takes_part_in_no_public_prefix() -> None:
    assert salt_of("a", None, 7).num_public_tokens == 7
    assert salt_of("a", "b", 7).num_public_tokens == 0


def test_the_longest_public_prefix_counts_if_it_is_there_as_a_whole() -> None:
    prefixes = [(1, 2), (1, 2, 3, 4), (5,)]
    prompts = [(1, 2, 3, 4, 5), (1, 2, 3, 5), (1, 3), (5, 1), (1,), ()]
    assert [num_public_tokens(prompt, prefixes) for prompt in prompts] == [4, 2, 0, 1, 0, 0]
    assert num_public_tokens((1,), []) == 0


def test_fractions_become_blocks() -> None:
    tenants = [ALICE, BOB, Tenant("carol", cache_max=0.5), Tenant("dora", cache_min=0.1, cache_max=0.2)]
    assert quotas(tenants, 101) == {"alice": Quota(25), "carol": Quota(0, 50), "dora": Quota(10, 20)}


def test_tenants_come_and_go() -> None:
    known = Tenants()
    assert known.authenticate(None) is EVERYONE
    known.change([ALICE], {key_hash("one"): "alice"})
    assert known.authenticate("Bearer one") == ALICE
    known.change([BOB], {key_hash("two"): "bob"})
    assert known.authenticate("Bearer two") == BOB and "alice" not in known.names
    for header in ("Bearer one", None):
        with pytest.raises(AuthenticationError):
            known.authenticate(header)
    with pytest.raises(RequestError, match="no tenant 'alice'"):
        known.named("alice")
