"""Log files of raydix's processes.

Each process has one file in Ray's log folder, `raydix-<process>-<pid>.log`, which `ray logs` lists and collectors of
Ray's logs find. A record goes to the kernel in one write before the logging call returns, past Serve's loggers, whose
buffer dies with its process: SIGKILL takes no record along. Files rotate as Ray's own do.

No record holds prompts, generated text or API keys. Messages and fields name requests, workers and figures. An
exception's message may quote its input, so a process that sees text writes tracebacks without messages.
"""

import errno
import json
import logging
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raydix.configs.schema import LoggingSection
from raydix.engine.core.errors import RaydixError

SERVES_LOGGER = "ray.serve"  # logger of Ray Serve in a replica
# raydix's own loggers, and asyncio's, which reports errors in tasks without a waiting caller.
LOGGERS = ("asyncio", "raydix")
DEFAULTS = LoggingSection()
NO_FIELDS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class LogOrigin:
    """The process that a record comes from. `name` is its part in the server: `ingress`, `decode`, `host-decode` ..."""

    name: str
    node: str
    pid: int
    worker: str | None = None
    sees_text: bool = False
    """Prompts and answers pass through the process as text."""


class JsonFormatter(logging.Formatter):
    """A record as one JSON object in one line."""

    def __init__(self, origin: LogOrigin) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        origin = self._origin
        content: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname,
            "process": origin.name,
            "pid": origin.pid,
            "node": origin.node,
            "logger": record.name,
        }
        if origin.worker is not None:
            content["worker"] = origin.worker

        content |= fields_of(record)
        content["message"] = message_of(record, origin)
        if error := error_of(record):
            content["exception"] = traceback_text(error, with_messages=not origin.sees_text)

        return json.dumps(content, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """A record as a line of text; a traceback follows in lines of its own."""

    def __init__(self, origin: LogOrigin) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        origin = self._origin
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        head = f"{timestamp(record.created)} {record.levelname} {origin.name} {origin.pid}"
        text = f"{head}: {message_of(record, origin)} [{record.name}{fields}]"
        if error := error_of(record):
            text += "\n" + traceback_text(error, with_messages=not origin.sees_text)
        return text


class RotatedFile(logging.Handler):
    """Appends each record to a file in one unbuffered write.

    At `max_bytes` the file gets `.1` behind its name, the file with `.1` gets `.2`, and so on up to `num_backups`; 0
    bytes: never. A record that cannot be written whole, on a full disk say, is dropped with what of it was written:
    logging must not stop the server, and the next record shall not begin in the middle of a line.
    """

    def __init__(self, path: Path, max_bytes: int, num_backups: int) -> None:
        super().__init__()
        self.path = path
        self._max_bytes = max_bytes
        self._num_backups = num_backups
        self._file: int | None = None
        self._size = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # A lone surrogate, which JSON may hold, has no UTF-8: it is written as an escape.
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # a wrong log call; logging says where it is
            self.handleError(record)
            return
        try:
            self._write(line)
        # The next record opens the file anew, which may work by then.
        except OSError:
            self._close()

    def close(self) -> None:
        self._close()
        super().close()

    def _write(self, line: bytes) -> None:
        # A file has at least one record, however long: a record above the limit alone must not rotate for ever.
        if self._max_bytes and self._size and self._size + len(line) > self._max_bytes:
            self._rotate()
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._file).st_size
        num_written = os.write(self._file, line)
        if num_written < len(line):
            # The part that was written is taken back, so that every line of the file is a record.
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += num_written

    def _rotate(self) -> None:
        self._close()
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._num_backups + 1))]
        names[-1].unlink(missing_ok=True)
        # From the oldest on: each name is free before the next younger file takes it.
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if newer.exists():
                newer.rename(older)

    def _close(self) -> None:
        file, self._file, self._size = self._file, None, 0
        if file is not None:
            os.close(file)


def log_to_ray(name: str, settings: LoggingSection = DEFAULTS, *, worker: str | None = None) -> Path | None:
    """Have this process write its records into Ray's log folder; returns the file, or None without Ray, as in tests
    that call an actor's class directly."""
    folder = log_folder()
    if folder is None:
        return None
    import ray

    node: Any = _ray_node()
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    origin = LogOrigin(name, address, os.getpid(), worker, sees_text=name == "ingress")
    # The process id keeps apart the files of several processes of one name, and of one that starts again.
    handler = RotatedFile(folder / f"raydix-{name}-{origin.pid}.log", node.max_bytes, node.backup_count)
    handler.setFormatter(JsonFormatter(origin) if settings.format == "json" else TextFormatter(origin))
    install(handler, settings.level)
    return handler.path


class NoRefusals(logging.Filter):
    """Drops tracebacks of requests that raydix has refused, and told so: Serve's log has one for each such call of a
    handle, and the messages quote the request."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not isinstance(error_of(record), RaydixError)


def keep_refusals_out_of_serves_log() -> None:
    """Have Serve's log of this replica leave out refused calls of a handle."""
    logging.getLogger(SERVES_LOGGER).addFilter(NoRefusals())


def log_folder() -> Path | None:
    """Folder of the logs of Ray's processes on this node; None where Ray does not run."""
    node = _ray_node()
    return None if node is None else Path(node.get_logs_dir_path())


def _ray_node() -> Any:
    """Ray's record of this node, None where Ray does not run. Serve, too, takes the folder from there; there is no
    public way."""
    from ray._private import worker

    return worker._global_node


def install(handler: logging.Handler, level: str) -> None:
    """Give raydix's loggers this handler, in place of an earlier one of the same kind."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        # An actor class that is called twice in one process, as in tests, must not write every record twice.
        for other in [other for other in logger.handlers if type(other) is type(handler)]:
            logger.removeHandler(other)
            other.close()
        logger.addHandler(handler)
        logger.setLevel(level)


def set_level(level: str) -> None:
    """Have this process write records from this level on."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level)


def timestamp(seconds: float) -> str:
    """A time since the epoch in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Fields given to the record by `raydix.engine.core.log_fields.about`."""
    fields: Mapping[str, object] = getattr(record, "about", NO_FIELDS)
    return fields


def message_of(record: logging.LogRecord, origin: LogOrigin) -> str:
    """Message of the record. asyncio appends futures in lines of their own, with their errors' messages: a process that
    sees text leaves these lines out."""
    message = record.getMessage()
    return message.partition("\n")[0] if origin.sees_text and record.name == "asyncio" else message


def error_of(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def traceback_text(error: BaseException, *, with_messages: bool) -> str:
    """Traceback of an error and of the errors that led to it; without messages only types and lines of code."""
    if with_messages:
        return "".join(traceback.format_exception(error)).rstrip()
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < 10:
        parts.insert(0, f"{''.join(traceback.format_tb(cause.__traceback__))}{_kind(cause)}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n\nwhich led to:\n\n".join(parts)


def _kind(error: BaseException) -> str:
    kind: Any = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name} of {', '.join(map(_kind, error.exceptions))}" if isinstance(error, BaseExceptionGroup) else name
