"""Record of a block in an eviction queue: place in its sequence, last visit, hints of requests."""

from typing import Generic

from raydix.engine.core.eviction.ranking import Key, Visit
from raydix.engine.core.eviction.retention import later
from raydix.engine.core.types import Retention


class CachedBlock(Generic[Key]):
    """Mutable; owned by an eviction queue."""

    __slots__ = (
        "depth",
        "expires_at",
        "is_claimed",
        "is_evictable",
        "is_new",
        "key",
        "num_children",
        "parent",
        "priority",
        "stamp",
        "tenant",
        "visit",
    )

    def __init__(self, key: Key, visit: Visit[Key]) -> None:
        self.key = key

        self.is_claimed = False
        """True once a request has used the block and given its hints; an imported block waits for the first request."""
        self.is_new = False
        """True if filled by a paused request, and not yet used by a request that has ended."""
        self.tenant = ""
        self.priority = 0
        self.expires_at: float | None = None
        self.visit = visit
        self.depth = 0
        """Number of blocks before this one in its sequence; known once a request has used the block."""
        self.parent: CachedBlock[Key] | None = None
        self.num_children = 0
        """Evictable blocks whose parent is this one."""
        self.is_evictable = False
        self.stamp = 0
        """Stamp of the valid entry in the heaps; entries with another stamp are stale."""

    @property
    def is_leaf(self) -> bool:
        return self.is_evictable and self.num_children == 0

    def claim(self, retention: Retention) -> None:
        """Apply a request's hints: the first request sets the tenant, and only this tenant's requests set the
        priority."""
        if self.is_claimed:
            if retention.tenant == self.tenant:
                self.priority = max(self.priority, retention.priority)
            self.expires_at = later(self.expires_at, retention.expires_at)
        else:
            self.is_claimed = True
            self.tenant = retention.tenant
            self.priority = retention.priority
            self.expires_at = retention.expires_at
