"""Segments as files: each a line of JSON, the header, and behind it the payload, blocks and recurrent states.

A file appears under its name when it is complete. Damage by a crash or a bit error afterwards is found through the
checksum by the importing worker; only sizes are compared here. Files are readable by the user alone, since KV reveals
prompts.
"""

import fcntl
import json
import logging
import os
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from raydix.engine.core.errors import StartupError
from raydix.engine.core.hashing import state_hash
from raydix.engine.core.manager.instructions import DamagedFileError
from raydix.engine.core.types import Retention, SegmentHeader, Snapshot
from raydix.engine.model.segments import Bytes, checksum
from raydix.engine.model.sources import cache_folder

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
UNFINISHED = ".kv-unfinished"
LOCK = "lock"
FORMAT = 3
MAX_HEADER_BYTES = 8 << 20


class SegmentFiles:
    """The files of one folder, `kv` in `$RAYDIX_CACHE` unless another is given. One process may use it at a time."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = cache_folder() / "kv" if folder is None else Path(folder).expanduser()
        self._lock: int | None = None

    def open(self) -> None:
        """Make the folder, if it does not exist, and keep other processes out until `close` or the end of this process.

        Raises:
            StartupError: the folder cannot be made, or another process uses it.
        """
        try:
            # The user's alone: KV reveals prompts.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            is_taken = isinstance(error, BlockingIOError)
            reason = "is used by another server; each needs a folder of its own" if is_taken else error.strerror
            raise StartupError(f"cache.disk_path: {self.folder}: {reason}") from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def scan(self) -> list[SegmentHeader]:
        """The headers of all whole files, the least recently used first. Damaged and unfinished ones are removed.

        Raises:
            OSError: the folder cannot be read.
        """
        found = []
        for path in self.folder.iterdir():
            try:
                header = None
                if path.suffix == SUFFIX:
                    with path.open("rb") as file:
                        header = _header_of(file)
                if header is not None and path == self._path(header):
                    found.append((path.stat().st_mtime_ns, path.name, header))
                elif path.suffix in (SUFFIX, UNFINISHED):
                    path.unlink(missing_ok=True)
            except OSError as error:  # what cannot be read now need not be damaged
                logger.warning("%s is left alone: %s", path, error)
        return [header for _, _, header in sorted(found, key=lambda file: file[:2])]

    def write(self, header: SegmentHeader, payload: Bytes) -> SegmentHeader:
        """Write a segment's full blocks, and the states behind them; returns the header of the file.

        Raises:
            OSError: there is no room, or the like; then nothing is left behind.
            ValueError: the payload contradicts the header.
        """
        # What is damaged already must not get a file that looks whole.
        if payload.nbytes != header.num_bytes or checksum(payload) != header.checksum:
            raise ValueError("size or checksum differ")

        own, full = _full_part(header, payload)
        path = self._path(own)
        unfinished = path.with_suffix(UNFINISHED)

        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_line_of(own))
                file.write(full.data)
            # No sync: a file that a power cut leaves torn has another checksum, and is computed again.
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

        return own

    def read(self, header: SegmentHeader) -> Bytes:
        """Read the payload of the file with this header, which becomes the most recently used one.

        Raises:
            DamagedFileError: the file is gone, or has another length.
            OSError: the file cannot be read now.
        """
        path = self._path(header)
        try:
            with path.open("rb") as file:  # which another one may replace meanwhile
                found = _header_of(file)
                if found is None or replace(found, retention=header.retention) != header:
                    raise DamagedFileError(f"{path} is not what it was")
                # `scan` orders the files by this time after a restart.
                os.utime(path)
                return np.fromfile(file, np.uint8)
        except FileNotFoundError:
            raise DamagedFileError(f"{path} is gone") from None

    def erase(self, header: SegmentHeader) -> None:
        """Remove the file with this header, if it exists."""
        self._path(header).unlink(missing_ok=True)

    def _path(self, header: SegmentHeader) -> Path:
        """File name of a segment's blocks. Equal blocks have equal names, so that they are stored once."""
        name = blake2b(header.fingerprint.encode(), digest_size=16)
        for block_hash in header.names:
            name.update(block_hash)
        return self.folder / f"{name.hexdigest()}{SUFFIX}"


def _full_part(header: SegmentHeader, payload: Bytes) -> tuple[SegmentHeader, Bytes]:
    """A segment without the partial block of a hand-over and the state behind it, which serve one request only."""
    hashes, states = header.full_hashes, header.full_states
    full = payload
    if len(hashes) < len(header.hashes) or len(states) < len(header.states):
        first = header.blocks_bytes // len(header.hashes) * len(hashes) if hashes else 0
        # Blocks are in [0, blocks_bytes), and the state that is left out is the last one.
        last = header.blocks_bytes + len(states) * header.state_bytes
        full = np.concatenate((payload[:first], payload[header.blocks_bytes : last]))
    own = SegmentHeader(
        header.fingerprint,
        hashes,
        full.nbytes,
        checksum(full),
        retention=header.retention,
        states=states,
        state_bytes=header.state_bytes,
    )
    return own, full


def _line_of(header: SegmentHeader) -> bytes:
    fields = {
        "format": FORMAT,
        "fingerprint": header.fingerprint,
        "num_bytes": header.num_bytes,
        "checksum": header.checksum,
        "hashes": [block_hash.hex() for block_hash in header.hashes],
        "states": [[block_hash.hex() for block_hash in state.path] for state in header.states],
        "state_bytes": header.state_bytes,
        "retention": asdict(header.retention),
    }
    return json.dumps(fields).encode() + b"\n"


def _header_of(file: BinaryIO) -> SegmentHeader | None:
    """Read the header of a file of the right size, up to its payload; None for any other file.

    Raises:
        OSError: the file cannot be read.
    """
    line = file.readline(MAX_HEADER_BYTES)
    size = os.fstat(file.fileno()).st_size

    try:
        fields = json.loads(line)
        hashes = tuple(bytes.fromhex(block_hash) for block_hash in fields["hashes"])
        wish = fields["retention"]
        expires_at = None if wish["expires_at"] is None else float(wish["expires_at"])
        retention = Retention(str(wish["tenant"]), int(wish["priority"]), expires_at)
        paths = [tuple(bytes.fromhex(block_hash) for block_hash in path) for path in fields["states"]]
        header = SegmentHeader(
            fields["fingerprint"],
            hashes,
            fields["num_bytes"],
            fields["checksum"],
            retention=retention,
            states=tuple(Snapshot(state_hash(path[-1]), path) for path in paths),
            state_bytes=fields["state_bytes"],
        )
        whole = header.names and _line_of(header) == line and size == len(line) + header.num_bytes
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None

    return header if whole else None
