"""Stored responses as files: each a line of JSON, the header, and behind it the data.

A file appears under its name when it is complete, and damage afterwards is found through the checksum. The time of a
file's last modification is that of the response's last use. Files are readable by the user alone, since responses are
conversations. The names of files are those of responses, which no client can guess or turn into a tenant's name.
"""

import json
import logging
import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from raydix.engine.core.memory.response_store import ENTRY_BYTES
from raydix.engine.core.tenants import ANONYMOUS

logger = logging.getLogger(__name__)

FOLDER = "responses"
SUFFIX = ".response"
UNFINISHED = ".response-unfinished"
FORMAT = 1
MAX_HEADER_BYTES = 4096


class DamagedResponseError(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as it is kept."""

    name: bytes
    parent: bytes | None
    data: bytes
    used_at: float
    """Seconds since the epoch."""
    tenant: str = ANONYMOUS.name


class ResponseFiles:
    """The files of one folder, which no other process uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, budget_bytes: int) -> list[KeptResponse]:
        """Return the most recently used responses that fit into a budget, the least recently used first, and remove the
        other files, and damaged and unfinished ones. What cannot be read now, and files of another format, stay.

        Raises:
            OSError: the folder cannot be made or read.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found: list[KeptResponse] = []
        for path in sorted(self._folder.iterdir(), key=_used_at, reverse=True):
            try:
                response = self._read(path) if path.suffix == SUFFIX else None
                if response is not None:
                    # Counted as the store counts, so that what is loaded fits into it and nothing is dropped right
                    # afterwards.
                    budget_bytes -= ENTRY_BYTES + len(response.data)
                    found += [response] if budget_bytes >= 0 else []
                # Once the budget is used up, every older file goes: a small old response is not kept in the place of a
                # newer one.
                if path.suffix == UNFINISHED or (response is not None and budget_bytes < 0):
                    path.unlink(missing_ok=True)
            except DamagedResponseError as error:
                logger.warning("a stored response is removed: %s: %s", path.name, error)
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("a stored response is left alone: %s", error)
        return found[::-1]

    def write(self, response: KeptResponse) -> None:
        """Write a response. Raises OSError, and nothing is left behind, if there is no room or the like."""
        path = self._path(response.name)
        unfinished = path.with_suffix(UNFINISHED)
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_line_of(response))
                file.write(response.data)
            # Before the rename: no file is seen under its name with another time of use.
            os.utime(unfinished, (response.used_at, response.used_at))
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def touch(self, name: bytes, used_at: float) -> None:
        """Record the last use of a response, if there is a file of it. Raises OSError."""
        try:
            os.utime(self._path(name), (used_at, used_at))
        except FileNotFoundError:
            return

    def erase(self, name: bytes) -> None:
        """Remove the file of a response, if there is one. Raises OSError."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{SUFFIX}"

    def _read(self, path: Path) -> KeptResponse | None:
        """Return the response of a file; None for another format. Raises DamagedResponseError and OSError."""
        with path.open("rb") as file:
            line = file.readline(MAX_HEADER_BYTES)
            data = file.read()
        # Read by pattern: the header of a later format may be anything else, and must not be taken for damage.
        if (other := re.match(rb'\{"format": (\d+)', line)) and int(other[1]) != FORMAT:
            logger.warning("a stored response is left alone: %s has format %d", path.name, int(other[1]))
            return None
        try:
            fields = json.loads(line)
            parent = None if fields["parent"] is None else bytes.fromhex(fields["parent"])
            tenant = fields.get("tenant", ANONYMOUS.name)
            response = KeptResponse(
                name=bytes.fromhex(fields["name"]), parent=parent, data=data, used_at=_used_at(path), tenant=str(tenant)
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamagedResponseError("its header cannot be read") from None
        # Made again from what was read and compared whole: each field is covered, and a file that was renamed as well.
        if _line_of(response) != line or self._path(response.name) != path:
            raise DamagedResponseError("size or checksum differ")
        return response


def _used_at(path: Path) -> float:
    """The time of a file's last use; the beginning of time for what cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _line_of(response: KeptResponse) -> bytes:
    """The header of a response, with a checksum of all that the file says."""
    checksum = blake2b(response.name, digest_size=16)
    checksum.update(response.parent or b"")
    checksum.update(response.data)
    fields: dict[str, object] = {
        "format": FORMAT,
        "name": response.name.hex(),
        "parent": None if response.parent is None else response.parent.hex(),
        "num_bytes": len(response.data),
        "checksum": checksum.hexdigest(),
    }
    # Left out for the anonymous tenant, as in files of servers that knew no tenants.
    if response.tenant != ANONYMOUS.name:
        fields["tenant"] = response.tenant
    return json.dumps(fields).encode() + b"\n"
