"""A log line of what one replica serves, every ten seconds while there is load."""

import asyncio
import logging
import time
from collections.abc import Callable

from raydix.engine.core.log_fields import about
from raydix.engine.serving.request_table import RequestTable

logger = logging.getLogger(__name__)

PERIOD_S = 10.0


class LoadLog:
    """Logs the growth of a table's sums since the last look, and the requests of now."""

    def __init__(self, requests: RequestTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._clock = clock
        self._last = requests.totals()
        self._looked_at = clock()

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(period_s)
            self.look()

    def look(self) -> None:
        """Log a line, unless nothing was served since the last look."""
        now, totals = self._clock(), self._requests.totals()
        last, took_s = self._last, max(now - self._looked_at, 1e-6)
        self._last, self._looked_at = totals, now
        if totals == last and not totals.num_under_way:
            return

        # A request that moves to another worker may have fewer cached tokens there.
        num_prompt = max(0, totals.num_prompt - last.num_prompt)
        num_cached = max(0, totals.num_cached - last.num_cached)
        num_generated = max(0, totals.num_generated - last.num_generated)
        logger.info(
            "load: %.0f prompt tokens/s (%.0f %% cached), %.1f tokens/s generated, %d requests ended; now %d decoding, "
            "%d prefilling, %d waiting",
            num_prompt / took_s,
            100 * num_cached / max(1, num_prompt),
            num_generated / took_s,
            totals.num_ended - last.num_ended,
            totals.num_decoding,
            totals.num_prefilling,
            totals.num_waiting,
            extra=about(
                "load",
                over_s=round(took_s, 3),
                prompt_tokens=num_prompt,
                cached_tokens=num_cached,
                completion_tokens=num_generated,
                ended=totals.num_ended - last.num_ended,
                decoding=totals.num_decoding,
                prefilling=totals.num_prefilling,
                waiting=totals.num_waiting,
            ),
        )
