"""Stored responses on the disk of the manager's node, written and removed in a thread as the manager keeps and forgets.

No caller waits for the disk. So after a kill, responses that were stored in the last moments may be missing, and
responses that were deleted then may exist again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from raydix.actors.manager.response_files import FOLDER, KeptResponse, ResponseFiles

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20  # bytes that wait for a slow disk; responses beyond are in memory only

ORDER_S = 1e-6  # between the recorded uses of responses used together, so that files keep their order

Work: TypeAlias = Callable[[], object]


class ResponseDisk:
    """Carries out work on files in order. `folder` is the disk tier's, which belongs to this process."""

    def __init__(self, folder: Path) -> None:
        self._files = ResponseFiles(folder / FOLDER)
        self._work: list[Work] = []
        self._num_bytes = 0  # bytes of responses that are not written yet
        # Last uses that are not recorded yet, one for each response however slow the disk is.
        self._used_at: dict[bytes, float] = {}
        self._wakes = asyncio.Event()

    async def load(self, budget_bytes: int) -> list[KeptResponse]:
        """Return the responses on disk (`ResponseFiles.load`); none if the folder cannot be used."""
        try:
            return await asyncio.to_thread(self._files.load, budget_bytes)
        except OSError as error:
            logger.warning("stored responses are not read: %s", error)
            return []

    def keep(self, name: bytes, parent: bytes | None, data: bytes, tenant: str) -> None:
        """Have a response written."""
        if self._num_bytes + len(data) > MAX_WAITING_BYTES:
            logger.warning("a stored response is in memory only: the disk is too slow")
            return
        self._num_bytes += len(data)
        self._add(
            partial(
                self._files.write, KeptResponse(name=name, parent=parent, data=data, used_at=time.time(), tenant=tenant)
            )
        )

    def use(self, names: Sequence[bytes]) -> None:
        """Have the use of responses recorded, each before those that it goes on from (`ResponseStore.path`)."""
        now = time.time()
        for index, name in enumerate(names):
            self._used_at[name] = now - (len(names) - index) * ORDER_S
        self._wakes.set()

    def forget(self, name: bytes) -> None:
        """Have a response's file removed."""
        self._used_at.pop(name, None)
        self._add(partial(self._files.erase, name))

    async def run(self) -> None:
        """Carry out all work, for ever."""
        while True:
            await self._wakes.wait()
            self._wakes.clear()
            work, self._work = self._work, []
            used_at, self._used_at = self._used_at, {}
            num_bytes = self._num_bytes
            work += [partial(self._files.touch, name, at) for name, at in used_at.items()]
            await asyncio.to_thread(_carry_out, work)
            self._num_bytes -= num_bytes

    def _add(self, work: Work) -> None:
        self._work.append(work)
        self._wakes.set()


def _carry_out(work: Sequence[Work]) -> None:
    for each in work:
        try:
            each()
        except OSError as error:
            logger.warning("the file of a stored response could not be changed: %s", error)
