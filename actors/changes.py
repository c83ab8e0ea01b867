"""Changes in place, for all replicas: invalid ones are refused in the log, and the tenants' file is watched."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from raydix.configs.tenants import TenantsFile
from raydix.engine.core.errors import StartupError
from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # interval between two looks at the tenants' file


def log_refused(part: str, error: StartupError) -> None:
    """Log that a running part of the server keeps its old values."""
    logger.error("%s goes on with its old values: %s", part, error, extra=about("change_refused", part=part))


async def when_changed(file: TenantsFile, read_again: Callable[[], Awaitable[None]]) -> None:
    """Have the tenants' file read again after each change of its content, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            # In a thread: a folder of another machine may not answer.
            if await asyncio.to_thread(file.has_changed):
                await read_again()
        except Exception:  # of any kind: later changes must not go unseen
            logger.exception("a change of the tenants' file is not taken")
