"""Files of tenants, in folders: uploaded inputs, and outputs of batches.

    tenants/<tenant>/incoming/<id>/                       a file arriving or being made
    tenants/<tenant>/files/<file id>/{record.json,content}

A file is complete before the folder gets a name under `files`, and an erased file loses the name first: each change
is one renaming. Several processes may use the folders at the same time; only one at a time checks the limits and lets
a file in. An id is unguessable, and is looked for among one tenant's alone.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from raydix.engine.api.batches import FileRecord
from raydix.engine.batches.disk import create, make_folder, move, sync, write
from raydix.engine.core.errors import BodyTooLargeError, NotFoundError, OverloadedError

FILE_ID = re.compile("file-[0-9a-f]{32}")
RECORD, CONTENT = "record.json", "content"
OPEN = "open"  # folder of the batches under way (`raydix.engine.batches.batch_store`)
STALE_S = 86_400  # age of an unfinished file that nobody writes any more


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of files and batches, in bytes unless named otherwise."""

    file_bytes: int
    tenant_bytes: int
    total_bytes: int
    tenant_files: int
    keep_s: float
    """Life of files and ended batches, in seconds."""


def new_file_id() -> str:
    """A new id; nobody can guess it."""
    return f"file-{secrets.token_hex(16)}"


class Upload:
    """A file on arrival, to be finished or discarded."""

    def __init__(self, folder: Path, limit: int, limit_name: str) -> None:
        self.folder = folder
        self.num_bytes = 0
        self._limit = limit
        self._limit_name = limit_name
        make_folder(folder, must_be_new=True)
        self._file: BinaryIO = create(folder / CONTENT)

    def write(self, part: bytes) -> None:
        """Add bytes. Raises BodyTooLargeError, OSError."""
        self.num_bytes += len(part)
        if self.num_bytes > self._limit:
            raise BodyTooLargeError(f"The file has more than {self._limit} bytes, {self._limit_name}.", param="file")
        self._file.write(part)

    def close(self) -> None:
        """Return when the bytes are on the disk."""
        sync(self._file)
        self._file.close()

    def discard(self) -> None:
        """Erase the received bytes of a file not let in."""
        with suppress(OSError):  # what the disk has no room for
            self._file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class FileStore:
    """The files of all tenants under one folder."""

    def __init__(self, folder: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._limits = limits
        self._clock = clock

    def limit(self, limits: StoreLimits) -> None:
        """Take other limits. Files that are there stay until they are too old or erased."""
        self._limits = limits

    # Uploads

    def begin(self, tenant: str) -> Upload:
        """Begin a file. Raises OverloadedError where the tenant, or the server, has no room left; OSError."""
        self.sweep(tenant)
        left, whose = self.room(tenant)
        if left <= 0:
            raise OverloadedError(f"There is no room for another file: {whose} is used up. Erase files.")
        # What is left now bounds the upload while it arrives; `finish` looks again, since others arrive meanwhile.
        limit = min(left, self._limits.file_bytes)
        reason = "which is the limit here" if limit == self._limits.file_bytes else f"which is what is left of {whose}"
        return Upload(self.incoming(tenant), limit, reason)

    def finish(self, tenant: str, upload: Upload, filename: str, purpose: str, life_s: float | None) -> FileRecord:
        """Let a file in, for `life_s` seconds, or by default for as long as files are kept.

        Raises:
            OverloadedError: other files of the tenant, or too many bytes, have come meanwhile.
            OSError: the disk is full, or the like.
        """
        # The bytes are on the disk before the record says so: a crash leaves no file with less than it should have.
        upload.close()
        now = self._clock()
        record = FileRecord(
            id=new_file_id(),
            filename=filename,
            purpose=purpose,
            num_bytes=upload.num_bytes,
            created_at=now,
            expires_at=now + self.life_s(life_s),
        )
        # Only one file of a tenant is let in at a time: two that fit alone might not fit together.
        with self._locked(tenant):
            self._require_room(tenant)
            self._let_in(tenant, upload.folder, record)
        return record

    def put(self, tenant: str, record: FileRecord, lines: Iterable[bytes]) -> None:
        """Make a file of `lines` under an id chosen before, unless the file exists; limits do not count. Raises
        OSError."""
        if (self._files(tenant) / record.id).exists():
            return
        folder = self.incoming(tenant)
        make_folder(folder, must_be_new=True)
        try:
            with create(folder / CONTENT) as file:
                for line in lines:
                    file.write(line)
                sync(file)
                record = replace(record, num_bytes=file.tell())
            self._let_in(tenant, folder, record)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    # Files

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """The file of a tenant. Raises NotFoundError."""
        # The form is checked before the path is made: an id must not lead out of the folder.
        record = self._read(self._files(tenant) / file_id) if FILE_ID.fullmatch(file_id) else None
        if record is None:
            raise NotFoundError(f"There is no file '{file_id[:64]}'.")
        return record

    def content(self, tenant: str, file_id: str) -> Path:
        """Path of a file's content. Raises NotFoundError."""
        return self._files(tenant) / self.get(tenant, file_id).id / CONTENT

    def all(self, tenant: str) -> list[FileRecord]:
        """The files of a tenant, in no order."""
        return [record for path in entries(self._files(tenant)) if (record := self._read(path)) is not None]

    def erase(self, tenant: str, file_id: str) -> None:
        """Erase a file. Raises NotFoundError."""
        self.erase_folder(tenant, self._files(tenant) / self.get(tenant, file_id).id)

    def erase_folder(self, tenant: str, path: Path) -> None:
        """Take a folder of a tenant away as a whole, if it is there."""
        # Renamed away first: a reader finds the whole file or none, also if this process dies while it erases.
        condemned = self.incoming(tenant)
        make_folder(condemned.parent)
        with suppress(FileNotFoundError):
            path.rename(condemned)
        shutil.rmtree(condemned, ignore_errors=True)

    def sweep(self, tenant: str) -> None:
        """Erase expired files of a tenant, and unfinished ones without a writer."""
        now = self._clock()
        for path in entries(self._files(tenant)):
            # A folder whose record cannot be read is left for a person to look at.
            record = self._record(path)
            if record is not None and self._is_over(record):
                self.erase_folder(tenant, path)
        for path in entries(self._tenant(tenant) / "incoming"):
            with suppress(OSError):
                if path.stat().st_mtime < now - STALE_S:
                    shutil.rmtree(path, ignore_errors=True)

    def life_s(self, wished_s: float | None) -> float:
        """Life of a file, in seconds, where `wished_s` is asked for."""
        return min(wished_s or self._limits.keep_s, self._limits.keep_s)

    def tenants(self) -> list[str]:
        """Names of all tenants with a folder."""
        return [path.name for path in entries(self.folder / "tenants")]

    def bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's files and batches, arriving and open ones included."""
        batches = (self.folder / OPEN).glob(f"{tenant}~*")
        return sum(map(_size, [self._tenant(tenant), *batches]))

    def room(self, tenant: str) -> tuple[int, str]:
        """Bytes left for a tenant, and the name of the tighter limit."""
        # Summed from the disk each time: a count in memory would miss what other replicas do.
        own = self._limits.tenant_bytes - self.bytes_of(tenant)
        total = self._limits.total_bytes - sum(map(self.bytes_of, self.tenants()))
        return (own, "what a tenant may keep") if own <= total else (total, "what the server keeps")

    # Inside

    def _tenant(self, tenant: str) -> Path:
        return self.folder / "tenants" / tenant

    def _files(self, tenant: str) -> Path:
        return self._tenant(tenant) / "files"

    def incoming(self, tenant: str) -> Path:
        """Path for a new, unfinished folder of a tenant."""
        return self._tenant(tenant) / "incoming" / secrets.token_hex(16)

    def _require_room(self, tenant: str) -> None:
        left, whose = self.room(tenant)
        if left < 0:
            raise OverloadedError(f"There is no room for the file any more: {whose} is used up. Erase files.")
        limit = self._limits.tenant_files
        if len(entries(self._files(tenant))) >= limit:
            raise OverloadedError(f"There are {limit} files already, which is the limit here. Erase files.")

    def _let_in(self, tenant: str, folder: Path, record: FileRecord) -> None:
        write(folder / RECORD, json.dumps(asdict(record)).encode())
        make_folder(self._files(tenant))
        move(folder, self._files(tenant) / record.id)

    def _read(self, path: Path) -> FileRecord | None:
        """The record of a file; None for a missing or expired one."""
        record = self._record(path)
        return None if record is None or self._is_over(record) else record

    def _record(self, path: Path) -> FileRecord | None:
        try:
            return FileRecord(**json.loads((path / RECORD).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _is_over(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock()

    @contextmanager
    def _locked(self, tenant: str) -> Iterator[None]:
        """Keep other processes and threads from letting files in."""
        handle = os.open(self._tenant(tenant) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def entries(folder: Path) -> list[Path]:
    """Contents of a folder; nothing if the folder does not exist."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(folder: Path) -> int:
    """Bytes of the files below a folder; of a file with two names each has half. Other processes may move and erase
    folders meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                about = Path(place, name).lstat()
                total += about.st_size // about.st_nlink if S_ISREG(about.st_mode) else 0
    return total
