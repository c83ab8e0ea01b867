"""Tenants: API keys to tenants, tenants to cache salts and quotas.

A tenant is known by its API key (only the SHA-256 is kept), or by its name if a program inside the cluster vouches for
the name; never by other data from a client. The salt covers the tenant's name, so a request's `cache_salt` can narrow
sharing within a tenant and can never reach the KV of another tenant.

What tenants share has its rule beside it:

| shared | rule among tenants | file |
|---|---|---|
| places of requests | each holds at most as many as it leaves free | `engine/core/ingress/room.py` |
| arriving files, running batches | the same | `actors/ingress/batches.py` |
| lines of batches | divided by tenant, then by batch | `engine/core/batches/lines.py` |
| computing of a worker | the least time per weight goes first | `engine/core/worker/order.py` |
| running requests, their blocks | the tenant furthest above its share gives back | `Scheduler._above_share` |
| cached blocks of a pool | `quotas`: floors and ceilings | `engine/core/eviction/queue.py` |
| segments in the store and on disk | the same | `engine/core/manager/segment_store.py` |
| earlier answers | the most bytes per weight give back | `actors/manager/client_memory.py`, its stores |
| prompts to compare with | the most bytes give back | `engine/serving/prompt_records.py` |

`Shares` (`engine/core/shares.py`) counts all but computing and what has quotas.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256

from raydix.engine.core.errors import AuthenticationError, PermissionDeniedError, RequestError
from raydix.engine.core.eviction.queue import Quota
from raydix.engine.core.hashing import DIGEST_BYTES
from raydix.engine.core.types import Salt


@dataclass(frozen=True, slots=True)
class Tenant:
    """Requests that share KV, with their limits."""

    name: str
    is_admin: bool = False
    cache_min: float = 0.0
    """Fraction of a cache that other tenants cannot take away."""
    cache_max: float = 1.0
    """Fraction of a cache that the tenant can fill."""
    max_requests: int | None = None
    """Limit of concurrent requests at one ingress replica; None: the limit of the replica."""
    min_priority: int | None = None
    """Lowest, most urgent `priority` of its requests; None: any."""
    weight: float = 1.0
    """Part of the tenant in what tenants share, in the ratio of all weights: memory (`raydix.engine.core.shares`) and
    computing."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that the tenant owns, perhaps with others."""

    def require_admin(self) -> None:
        """Raise PermissionDeniedError unless the tenant is an administrator."""
        if not self.is_admin:
            raise PermissionDeniedError(f"The tenant '{self.name}' is not an administrator.")

    def require_priority(self, priority: int) -> None:
        """Raise RequestError for a priority with which a request would go before more urgent tenants' requests."""
        if self.min_priority is not None and priority < self.min_priority:
            raise RequestError(
                f"'priority' must be at least {self.min_priority} for this tenant, got {priority}.", param="priority"
            )


# Tenant of all requests without configured tenants, and of requests of the Python handle without a tenant.
ANONYMOUS = Tenant("anonymous")


EVERYONE = replace(ANONYMOUS, is_admin=True)  # tenant of all HTTP requests without configured tenants: trusted


class Tenants:
    """The tenants of a server and their keys. Without any the server is open: every request belongs to `ANONYMOUS`."""

    def __init__(self, tenants: Iterable[Tenant] = (), name_of_key: Mapping[str, str] | None = None) -> None:
        """`name_of_key`: the tenant's name by `key_hash`."""
        self.change(tenants, name_of_key)

    def change(self, tenants: Iterable[Tenant], name_of_key: Mapping[str, str] | None = None) -> None:
        """Know these tenants alone from now on. Requests under way keep their tenants."""
        known = {tenant.name: tenant for tenant in tenants}
        self._is_open = not known
        # A configured tenant of the name `anonymous` takes the place of the built-in one.
        self._by_name = {ANONYMOUS.name: ANONYMOUS} | known
        self._name_of_key = dict(name_of_key or {})
        self._owned = {name for tenant in known.values() for name in tenant.adapters}

    def may_use(self, tenant: Tenant, adapter: str) -> bool:
        """True if a tenant's requests may name this adapter: all may where nobody owns it."""
        return adapter not in self._owned or tenant.is_admin or adapter in tenant.adapters

    @property
    def are_several(self) -> bool:
        """True if there is somebody to share with: more than one tenant is configured."""
        return len(self._by_name) > 2  # one of them is `ANONYMOUS`

    @property
    def names(self) -> list[str]:
        """Names of all tenants that a request may belong to."""
        return list(self._by_name)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an HTTP request with this `Authorization` header; an open server accepts any header. A key in
        the header `x-api-key` counts as such a header.

        Keys are compared by looking up their hashes, so the time taken says nothing about a key.

        Raises:
            AuthenticationError: the key is missing or unknown. The message does not repeat the key.
        """
        if self._is_open:
            return EVERYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError(
                "No API key was given: send the header 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
            )
        name = self._name_of_key.get(key_hash(key.strip()))
        if name is None:
            raise AuthenticationError("The API key is not valid.")
        return self._by_name[name]

    def named(self, name: str | None) -> Tenant:
        """The tenant of this name, `ANONYMOUS` for None.

        Raises:
            RequestError: the name is unknown.
        """
        tenant = self._by_name.get(ANONYMOUS.name if name is None else name)
        if tenant is None:
            raise RequestError(f"There is no tenant '{name}'.", param="tenant")
        return tenant


def quotas(tenants: Iterable[Tenant], size: int) -> dict[str, Quota]:
    """Quotas by tenant in a cache of `size` blocks or bytes; tenants without a floor or ceiling are left out."""
    return {
        tenant.name: Quota(int(tenant.cache_min * size), int(tenant.cache_max * size) if tenant.cache_max < 1 else None)
        for tenant in tenants
        if (tenant.cache_min, tenant.cache_max) != (0, 1)
    }


def key_hash(key: str) -> str:
    """Hash of an API key as the configuration holds it: SHA-256 in hexadecimal. A random key needs no slower hash."""
    return sha256(key.encode()).hexdigest()


def salt_of(
    tenant: str,
    cache_salt: str | None,
    num_public_tokens: int = 0,
    *,
    adapter: bytes = b"",
    num_plain_tokens: int = 0,
) -> Salt:
    """The salt of a tenant's request. A `cache_salt` excludes sharing of public prefixes. `adapter`: the digest of the
    request's adapter, if it has one, and `num_plain_tokens` the number of tokens before those that it computes.

    The tenant's name is hashed with its length before it, so no other pair of name and `cache_salt` gives the same
    salt.
    """
    name = tenant.encode()
    digest = blake2b(len(name).to_bytes(4, "little") + name, digest_size=DIGEST_BYTES, key=b"raydix tenant")
    if cache_salt is not None:
        digest.update(cache_salt.encode())
        num_public_tokens = 0
    return Salt(digest.digest(), num_public_tokens, adapter, num_plain_tokens)


def num_public_tokens(prompt: Sequence[int], public_prefixes: Iterable[Sequence[int]]) -> int:
    """The length of the longest public prefix at the beginning of `prompt`; 0 if there is none."""
    return max((len(prefix) for prefix in public_prefixes if prompt[: len(prefix)] == prefix), default=0)
