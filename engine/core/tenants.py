"""Who asks, and what that means for KV: API keys to tenants, tenants to salts.

A tenant is known by its API key, of which only the SHA-256 is kept, or by its name where a program inside the cluster
vouches for it; never by anything else that a client sends. The salt covers the tenant's name, so a request's
`cache_salt` can narrow what is shared within a tenant and can never reach another's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256

from engine.core.errors import AuthenticationError, RequestError
from engine.core.eviction.queue import Quota
from engine.core.hashing import DIGEST_BYTES
from engine.core.types import Salt


@dataclass(frozen=True, slots=True)
class Tenant:
    """Requests that share KV, and what they are granted."""

    name: str
    is_admin: bool = False
    cache_min: float = 0.0
    """Fraction of a cache that others cannot take from it."""
    cache_max: float = 1.0
    """Fraction of a cache that it can fill."""
    max_requests: int | None = None
    """Requests that it may have under way at one ingress replica; None: as many as all together."""


ANONYMOUS = Tenant("anonymous")
"""Everyone, where no tenants are configured; and requests of the Python handle that name none."""


EVERYONE = replace(ANONYMOUS, is_admin=True)
"""Whoever reaches a server without tenants: it is trusted."""


class Tenants:
    """The tenants of a server, and who speaks for them. Without any the server is open: everyone is `ANONYMOUS`."""

    def __init__(self, tenants: Iterable[Tenant] = (), name_of_key: Mapping[str, str] | None = None) -> None:
        """`name_of_key` has the tenant's name for each `key_hash`."""
        known = {tenant.name: tenant for tenant in tenants}
        self._is_open = not known
        self._by_name = {ANONYMOUS.name: ANONYMOUS} | known
        self._name_of_key = dict(name_of_key or {})

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an HTTP request with this `Authorization` header; anything will do where the server is open.

        Keys are compared by looking up their hashes, so the time it takes tells nothing about a key.

        Raises:
            AuthenticationError: there is no key in it, or one that is not known. The message does not repeat it.
        """
        if self._is_open:
            return EVERYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("No API key was given: send the header 'Authorization: Bearer <key>'.")
        name = self._name_of_key.get(key_hash(key.strip()))
        if name is None:
            raise AuthenticationError("The API key is not valid.")
        return self._by_name[name]

    def named(self, name: str | None) -> Tenant:
        """The tenant of this name, `ANONYMOUS` for None.

        Raises:
            RequestError: there is none.
        """
        tenant = self._by_name.get(ANONYMOUS.name if name is None else name)
        if tenant is None:
            raise RequestError(f"There is no tenant '{name}'.", param="tenant")
        return tenant


def quotas(tenants: Iterable[Tenant], size: int) -> dict[str, Quota]:
    """What the tenants' fractions come to in a cache of that size, be it blocks or bytes; those without any are left
    out."""
    return {
        tenant.name: Quota(int(tenant.cache_min * size), int(tenant.cache_max * size) if tenant.cache_max < 1 else None)
        for tenant in tenants
        if (tenant.cache_min, tenant.cache_max) != (0, 1)
    }


def key_hash(key: str) -> str:
    """What the configuration holds of an API key: its SHA-256 in hexadecimal. A random key needs no slower hash."""
    return sha256(key.encode()).hexdigest()


def salt_of(tenant: str, cache_salt: str | None, num_public_tokens: int = 0) -> Salt:
    """The salt of a tenant's request. With a `cache_salt` of its own it shares no public prefix either.

    The tenant's name goes in with its length before it, so no other name and `cache_salt` come to the same.
    """
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(4, "little") + name, digest_size=DIGEST_BYTES, key=b"raydix tenant")
    if cache_salt is None:
        return Salt(digest.digest(), num_public_tokens)
    digest.update(cache_salt.encode())
    return Salt(digest.digest())


def num_public_tokens(prompt: Sequence[int], public_prefixes: Iterable[Sequence[int]]) -> int:
    """The length of the longest public prefix that `prompt` begins with, all of it; 0 if there is none."""
    return max((len(prefix) for prefix in public_prefixes if prompt[: len(prefix)] == prefix), default=0)
