"""Retention of a request's blocks from its hints: of all alike, except for the blocks before a mark.

A mark raises the retention of the prompt's blocks up to the one in which the mark lies. Of several marks and the
request's own hints the highest priority counts; of several marks, the longest time to live.
"""

from raydix.engine.core.types import CacheHints, Retention


def retention(hints: CacheHints, now: float) -> Retention:
    """Retention of the blocks behind all marks if the request ends at `now`."""
    return Retention(hints.tenant, hints.priority, None if hints.ttl_s is None else now + hints.ttl_s)


def marked(hints: CacheHints, now: float) -> tuple[Retention, ...]:
    """Retention of each block before the last mark, from the first block on; none without marks."""
    if not hints.marks:
        return ()
    num_blocks = max(mark.num_blocks for mark in hints.marks)
    return tuple(_before_marks(hints, index, now) for index in range(num_blocks))


def _before_marks(hints: CacheHints, index: int, now: float) -> Retention:
    marks = [mark for mark in hints.marks if index < mark.num_blocks]
    priority = max(hints.priority, *(mark.priority for mark in marks))
    return Retention(hints.tenant, priority, now + max(mark.ttl_s for mark in marks))


def most_generous(one: Retention, other: Retention) -> Retention:
    """Retention of something kept as a whole for two wishes of one tenant."""
    return Retention(one.tenant, max(one.priority, other.priority), later(one.expires_at, other.expires_at))


def later(one: float | None, other: float | None) -> float | None:
    """The later of two expiries; None is never."""
    return None if one is None or other is None else max(one, other)
