"""Batches of tenants, in folders beside the files (`raydix.engine.batches.file_store`).

    open/<tenant>~<batch id>/                 a batch under way
        batch.json                            the request; never changed
        input                                 the input file's content, under a second name
        journal                               all events so far; written by the runner alone
        progress.json                         the state, for clients; the journal counts
        cancel                                made when the client cancels
        lock                                  held by the runner
    tenants/<tenant>/batches/<batch id>/      an ended batch: batch.json and progress.json

A batch begins and ends with one renaming. The process with the lock runs the batch; the kernel gives the lock
back when the process ends in any way, and then another goes on from the journal.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raydix.engine.api.batches import (
    MESSAGES,
    MESSAGES_WINDOW,
    BatchRecord,
    BatchRequest,
    LineEndpoint,
    window_s,
)
from raydix.engine.batches.disk import make_folder, move, sync_folder, write
from raydix.engine.batches.file_store import OPEN, FileStore, entries, new_file_id
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.batches.records import Problem, Status
from raydix.engine.core.errors import NotFoundError, RequestError

BATCH_ID = re.compile("batch_[0-9a-f]{32}")
BATCH, PROGRESS, INPUT, JOURNAL, CANCEL, LOCK = "batch.json", "progress.json", "input", "journal", "cancel", "lock"
PURPOSE = "batch"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch on disk. `cancelled_at`: when the client cancelled."""

    record: BatchRecord
    progress: Progress
    folder: Path
    cancelled_at: float | None = None


class BatchStore:
    """The batches of all tenants under the folder of `files`."""

    def __init__(self, files: FileStore, keep_s: float, clock: Callable[[], float] = time.time) -> None:
        self._files = files
        self._open = files.folder / OPEN
        self._keep_s = keep_s
        self._clock = clock

    def keep(self, keep_s: float) -> None:
        """Erase ended batches after another number of seconds."""
        self._keep_s = keep_s

    # For clients

    def create(self, tenant: str, model: str, request: BatchRequest) -> StoredBatch:
        """Begin a batch. Raises NotFoundError, RequestError; OSError."""
        life = request.output_expires_after
        record = self._record(
            tenant, model, request.endpoint, request.input_file_id, request.completion_window, request.window_s
        )
        life_s = None if life is None else life.seconds
        return self._begin(replace(record, output_life_s=life_s, metadata=request.metadata), Progress())

    def create_of_messages(self, tenant: str, model: str, file_id: str, num_lines: int) -> StoredBatch:
        """Begin a batch of messages, of a file with so many valid lines, which is erased: the batch has its content.
        Errors as `create`."""
        record = self._record(tenant, model, MESSAGES, file_id, MESSAGES_WINDOW, window_s(MESSAGES_WINDOW))
        try:
            return self._begin(record, Progress(num_lines=num_lines))
        finally:
            self._files.erase(tenant, file_id)

    def _record(
        self, tenant: str, model: str, endpoint: LineEndpoint, file_id: str, window: str, seconds: float
    ) -> BatchRecord:
        """A new batch that begins now and has `seconds` time, which `window` says in words."""
        now = self._clock()
        return BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            model=model,
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + seconds,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            output_life_s=None,
        )

    def _begin(self, record: BatchRecord, progress: Progress) -> StoredBatch:
        source = self._input_of(record.tenant, record.input_file_id)
        draft = self._files.incoming(record.tenant)
        make_folder(draft, must_be_new=True)
        try:
            _link(source, draft / INPUT)
            write(draft / BATCH, json.dumps(asdict(record)).encode())
            write(draft / PROGRESS, _dumped(progress))
            make_folder(self._open)
            move(draft, self._folder(record))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return StoredBatch(record, progress, self._folder(record))

    def get(self, tenant: str, batch_id: str) -> StoredBatch:
        """A batch of a tenant. Raises NotFoundError."""
        found = None
        if BATCH_ID.fullmatch(batch_id):  # an open one may end between the two looks, and never opens again
            found = self._read(self._open / f"{tenant}~{batch_id}") or self._read(self._ended(tenant) / batch_id)
        if found is None:
            raise NotFoundError(f"There is no batch '{batch_id[:64]}'.")
        return found

    def all(self, tenant: str) -> list[StoredBatch]:
        """The batches of a tenant, in no order."""
        folders = [*self._open.glob(f"{tenant}~*"), *entries(self._ended(tenant))]
        found = {batch.record.id: batch for folder in folders if (batch := self._read(folder)) is not None}
        return list(found.values())

    def cancel(self, tenant: str, batch_id: str) -> StoredBatch:
        """Ask for the end of a batch. Raises NotFoundError, and RequestError for an ended one."""
        batch = self.get(tenant, batch_id)
        if batch.progress.outcome is not None and batch.progress.outcome is not Status.CANCELLED:
            raise RequestError(f"The batch is {batch.progress.status} and cannot be cancelled.", param="batch_id")
        if batch.cancelled_at is None and not batch.progress.ended_at:
            with suppress(FileNotFoundError):  # it has ended meanwhile
                (batch.folder / CANCEL).touch(mode=0o600)
                sync_folder(batch.folder)
        return self.get(tenant, batch_id)

    def erase(self, batch: StoredBatch) -> None:
        """Erase an ended batch, with its output. Raises RequestError for one that has not ended."""
        if batch.progress.ended_at is None:
            raise RequestError("The batch has not ended: cancel it first.", param="batch_id")
        record = batch.record
        for file_id in (record.output_file_id, record.error_file_id):
            with suppress(NotFoundError):
                self._files.erase(record.tenant, file_id)
        # In this order: its runner may put it among the ended in this moment.
        for folder in (self._folder(record), self._ended(record.tenant) / record.id):
            self._files.erase_folder(record.tenant, folder)

    # For runners

    def open_batches(self) -> list[StoredBatch]:
        """All batches under way, the oldest first."""
        found = [batch for folder in entries(self._open) if (batch := self._read(folder)) is not None]
        return sorted(found, key=lambda batch: batch.record.created_at)

    @contextmanager
    def taken(self, batch: StoredBatch) -> Iterator[bool]:
        """Keep other runners from an open batch until the block ends; False if another runner has the batch, or the
        batch has ended."""
        try:
            handle = os.open(batch.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield batch.folder.exists()  # its last runner may have moved it before it let go of the lock
        finally:
            os.close(handle)

    def is_cancelled(self, batch: StoredBatch) -> bool:
        """True if the client of an open batch has cancelled."""
        return (batch.folder / CANCEL).exists()

    def show(self, batch: StoredBatch, progress: Progress) -> None:
        """Write the state of a batch for clients. Raises OSError."""
        write(batch.folder / PROGRESS, _dumped(progress))

    def retire(self, batch: StoredBatch) -> None:
        """Put a batch among the ended, after the progress says so; one that its client has erased meanwhile is gone.
        May be repeated. Raises OSError."""
        try:
            self._retire(batch)
        except FileNotFoundError:
            if batch.folder.exists():
                raise

    def _retire(self, batch: StoredBatch) -> None:
        cancelled_at = batch.cancelled_at or _made_at(batch.folder / CANCEL)
        # The mark `cancel` goes away with the open batch, so its time goes into the record.
        if cancelled_at is not None:
            record = json.loads((batch.folder / BATCH).read_bytes())
            write(batch.folder / BATCH, json.dumps(record | {"cancelled_at": cancelled_at}).encode())
        for name in (INPUT, JOURNAL, CANCEL):
            (batch.folder / name).unlink(missing_ok=True)
        ended = self._ended(batch.record.tenant)
        make_folder(ended)
        move(batch.folder, ended / batch.record.id)

    def sweep(self, tenant: str) -> None:
        """Erase old ended batches of a tenant."""
        for folder in entries(self._ended(tenant)):
            batch = self._read(folder)
            if batch is not None and (batch.progress.ended_at or 0) + self._keep_s < self._clock():
                shutil.rmtree(folder, ignore_errors=True)

    # Inside

    def _input_of(self, tenant: str, file_id: str) -> Path:
        try:
            file = self._files.get(tenant, file_id)
        except NotFoundError as error:
            raise NotFoundError(error.message, param="input_file_id") from None
        if file.purpose != PURPOSE:
            raise RequestError(
                f"The file's purpose must be '{PURPOSE}', and it is '{file.purpose}'.", param="input_file_id"
            )
        return self._files.content(tenant, file.id)

    def _folder(self, record: BatchRecord) -> Path:
        return self._open / f"{record.tenant}~{record.id}"

    def _ended(self, tenant: str) -> Path:
        return self._files.folder / "tenants" / tenant / "batches"

    def _read(self, folder: Path) -> StoredBatch | None:
        """The batch in a folder; None if there is none, any more."""
        try:
            fields = json.loads((folder / BATCH).read_bytes())
            progress = _loaded((folder / PROGRESS).read_bytes())
        # Another process may move or erase the folder between the two reads.
        except (OSError, ValueError, TypeError, KeyError):
            return None
        cancelled_at = fields.pop("cancelled_at", None) or _made_at(folder / CANCEL)
        return StoredBatch(BatchRecord(**fields), progress, folder, cancelled_at)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, so that the file stays when the first is erased; where links are not to be had, a
    copy."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _made_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _dumped(progress: Progress) -> bytes:
    return json.dumps(asdict(progress)).encode()


def _loaded(content: bytes) -> Progress:
    fields = json.loads(content)
    fields["status"] = Status(fields["status"])
    fields["outcome"] = None if fields["outcome"] is None else Status(fields["outcome"])
    fields["problems"] = tuple(Problem(**problem) for problem in fields["problems"])
    return Progress(**fields)
