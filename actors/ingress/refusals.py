"""Counts the requests that an ingress replica refused or could not serve, for one log line a minute at most."""

import asyncio
import logging
from collections import Counter

from raydix.engine.core.errors import RaydixError
from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
AUTHENTICATION_STATUS = 401
OVERLOADED_STATUS = 429
SERVER_ERROR_STATUS = 500


class Refusals:
    """Logs the first refusal at once, and the refusals of each interval after it at the interval's end.

    The line is a warning if an operator may have to act: wrong keys, too much load, failures. Invalid requests are
    their senders' concern. Called in an event loop.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._counts: Counter[str] = Counter()
        self._is_serious = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, error: RaydixError) -> None:
        """Count one error sent to a client."""
        self._counts[error.code] += 1
        self._is_serious |= (
            error.status in (AUTHENTICATION_STATUS, OVERLOADED_STATUS) or error.status >= SERVER_ERROR_STATUS
        )
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        """Log the counts since the last report; the next report follows after the interval, if there is any refusal."""
        self._timer = None
        if not self._counts:
            return
        counts, self._counts = dict(self._counts), Counter()
        level = logging.WARNING if self._is_serious else logging.INFO
        self._is_serious = False
        listed = ", ".join(f"{count} {code}" for code, count in sorted(counts.items()))
        logger.log(level, "requests refused or failed: %s", listed, extra=about("refusals", counts=counts))
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._report)
