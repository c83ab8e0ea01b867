"""Files and batches of one ingress replica, and the running of open batches.

The folder is the only state (`raydix.engine.batches`), so every replica answers for every file and batch. Each replica
looks for open batches every `POLL_S`, and runs a batch after getting the lock: after the death of a replica another one
goes on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from raydix.engine.api import routes
from raydix.engine.api.batches import LineAnswer, LineLimits
from raydix.engine.background import Background
from raydix.engine.batches.batch_store import BatchStore, StoredBatch
from raydix.engine.batches.execution import Execution
from raydix.engine.batches.file_store import FileStore, StoreLimits
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.batches.lines import LineAllowance
from raydix.engine.core.errors import OverloadedError, RequestError
from raydix.engine.core.log_fields import about
from raydix.engine.core.shares import Shares
from raydix.engine.core.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)

POLL_S = 2.0
SWEEP_S = 3600.0  # pause between two searches for expired files
REST_S = 30.0  # pause of a batch after a failure to read or write
MAX_BATCHES = 8  # running batches of one replica, shared like arriving files; but one batch of each tenant always runs
# Arriving files of one replica. Among several tenants none holds more than it leaves free (`Shares.may_take`).
MAX_UPLOADS = 8
# Names of the routes of lines, by path.
ROUTES: dict[str, str] = {route.path: route.name for route in routes.ROUTES if route.is_batchable}


class LineServer(Protocol):
    """Answers lines (`raydix.actors.ingress.frontend.Frontend`)."""

    @property
    def num_under_way(self) -> int: ...

    async def answer_line(self, route: str, body: bytes, tenant: Tenant) -> LineAnswer: ...


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Facts of the configuration for files and batches."""

    folder: Path
    stored: StoreLimits
    lines: LineLimits
    concurrency: int
    model_name: str


class Batches:
    """Files and batches of one replica."""

    def __init__(
        self, settings: BatchSettings, server: LineServer, tenants: Tenants, clock: Callable[[], float] = time.time
    ) -> None:
        self.files = FileStore(settings.folder, settings.stored, clock)
        self.store = BatchStore(self.files, settings.stored.keep_s, clock)
        self.model_name = settings.model_name
        self._lines = settings.lines
        self._server = server
        self._tenants = tenants
        self._clock = clock
        self._allowance = LineAllowance(settings.concurrency)
        self._background = Background()
        self._changed = asyncio.Event()  # set when there is another batch
        self._running: set[str] = set()  # ids of the batches taken or being taken here
        self._resting: dict[str, float] = {}  # when to try a failed batch again, by the monotonic clock
        self._uploads, self._batches = Shares(), Shares()  # arriving files and running batches by tenant

    @property
    def lines(self) -> LineLimits:
        return self._lines

    def change(self, settings: BatchSettings) -> None:
        """Take other limits; the folder and the model stay. What is on the disk and what runs stays beyond lower
        ones."""
        self.files.limit(settings.stored)
        self.store.keep(settings.stored.keep_s)
        self._lines = settings.lines
        self._allowance.change(settings.concurrency)

    def start(self) -> None:
        """Begin to look for batches; needs a running event loop."""
        self._background.start(self._watch())
        self._background.start(self._sweep())

    def look_now(self) -> None:
        """Look for batches without waiting: there is another one."""
        self._changed.set()

    @contextmanager
    def uploading(self, tenant: str) -> Iterator[None]:
        """Count an arriving file. Raises OverloadedError where there are too many, of all tenants or of this one."""
        # The total bounds memory and descriptors; a tenant's share leaves room for the others.
        num_arriving, num_own = self._uploads.total, self._uploads.used(tenant)
        if num_arriving >= MAX_UPLOADS:
            raise OverloadedError(f"{num_arriving} files are arriving already; try again later")
        if self._tenants.are_several and not self._uploads.may_take(tenant, 1, MAX_UPLOADS):
            raise OverloadedError(f"{num_own} files of '{tenant}' are arriving already; try again later")
        self._uploads.add(tenant, 1)
        try:
            yield
        finally:
            self._uploads.add(tenant, -1)

    async def _watch(self) -> None:
        while True:
            # Cleared before the look: a batch that comes meanwhile is seen by another look at once.
            self._changed.clear()
            try:
                for batch in await asyncio.to_thread(self.store.open_batches):
                    self._consider(batch)
            except Exception:  # of any kind: nobody else would look again
                logger.exception("open batches not read", extra=about("batches_not_read"))
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._sweep_once)
            except OSError as error:
                logger.warning("old files not erased: %s", error, extra=about("batches_not_swept"))
            await asyncio.sleep(SWEEP_S)

    def _sweep_once(self) -> None:
        for tenant in self.files.tenants():
            self.files.sweep(tenant)
            self.store.sweep(tenant)

    def _consider(self, batch: StoredBatch) -> None:
        """Run a batch, if the replica may and has time."""
        batch_id, now = batch.record.id, self._clock()
        # A batch that could not be read or written is tried again later, not at every look.
        is_resting = time.monotonic() < self._resting.get(batch_id, 0.0)
        if batch_id in self._running or is_resting or not self._has_time(batch):
            return
        # A batch that is over needs no model and no tenant any more: its output is still to be put in place.
        is_over = batch.progress.outcome is not None or now >= batch.record.expires_at
        if not is_over and (self._tenant_of(batch) is None or batch.record.model != self.model_name):
            return
        self._resting.pop(batch_id, None)
        self._running.add(batch_id)
        self._batches.add(batch.record.tenant, 1)
        self._background.start(self._run(batch))

    def _has_time(self, batch: StoredBatch) -> bool:
        """True if the replica can run one more batch of this one's tenant."""
        tenant = batch.record.tenant
        # With one tenant there is nobody to leave room for.
        if not self._tenants.are_several:
            return len(self._running) < MAX_BATCHES
        return not self._batches.used(tenant) or self._batches.may_take(tenant, 1, MAX_BATCHES)

    async def _run(self, batch: StoredBatch) -> None:
        batch_id = batch.record.id
        try:
            with self.store.taken(batch) as is_taken:
                # Another replica may hold the lock: the folder is shared, and the batch runs there.
                if is_taken:
                    await self._complete(batch)
        except Exception:  # of any kind: it may go next time, and others shall go on now
            self._resting[batch_id] = time.monotonic() + REST_S
            logger.exception("batch %s is put off", batch_id, extra=about("batch_put_off", batch=batch_id))
        finally:
            self._running.discard(batch_id)
            self._batches.add(batch.record.tenant, -1)

    async def _complete(self, batch: StoredBatch) -> None:
        batch_id, began = batch.record.id, time.monotonic()
        tenant = self._tenant_of(batch)
        # The allowance limits lines, and a tenant's own limit is for its clients' requests.
        owner = Tenant(batch.record.tenant) if tenant is None else replace(tenant, max_requests=None)

        async def answer(url: str, body: bytes) -> LineAnswer:
            return await self._server.answer_line(ROUTES[url], body, owner)

        self._allowance.join(batch_id, batch.record.tenant)
        try:
            execution = Execution(
                batch,
                self.store,
                self.files,
                limits=self._lines,
                answer=answer,
                slots=_Share(self._allowance, batch_id, self._server),
                clock=self._clock,
            )
            logger.info("batch %s runs here", batch_id, extra=about("batch_started", batch=batch_id))
            await execution.complete()
        finally:
            self._allowance.leave(batch_id)

        _log_end(batch, execution.progress, time.monotonic() - began)

    def _tenant_of(self, batch: StoredBatch) -> Tenant | None:
        """The tenant of a batch; None for one dropped from the configuration."""
        try:
            return self._tenants.named(batch.record.tenant)
        except RequestError:
            return None


def _log_end(batch: StoredBatch, progress: Progress, took_s: float) -> None:
    logger.info(
        "batch %s is %s: %d lines answered, %d failed",
        batch.record.id,
        progress.status,
        progress.num_completed,
        progress.num_failed,
        extra=about(
            "batch_ended",
            batch=batch.record.id,
            tenant=batch.record.tenant,
            outcome=progress.status,
            lines=progress.num_lines,
            answered=progress.num_completed,
            failed=progress.num_failed,
            took_s=round(took_s, 3),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """The slots of one batch: a share of the room left by clients' requests."""

    allowance: LineAllowance
    batch_id: str
    server: LineServer

    def free(self) -> int:
        return self.allowance.free(self.batch_id, self.server.num_under_way)

    def begin(self) -> None:
        self.allowance.begin(self.batch_id, 1)

    def end(self) -> None:
        self.allowance.end(self.batch_id)
