"""Lines of all processes in the terminal of `raydix serve`, read from the log files of `raydix.actors.logs`: warnings,
and the events that are asked for."""

import argparse
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.5
MAX_LINES = 20  # shown of one look at the files; how many more there were is said in a line
# A line of the configuration's `logging.format: text`: time, message and event.
_TEXT_LINE = re.compile(r"\S*T(\d\d:\d\d:\d\d)\S* INFO \S+ \d+: (.*) \[\S+ event=(\w+).*\]")
PATTERN = "raydix-*.log"
LOAD, REQUEST = "load", "request"  # events that are shown where they are asked for
SHOWN_LEVELS = frozenset({"WARNING", "ERROR", "CRITICAL"})


def events_of(options: argparse.Namespace, *, is_terminal: bool) -> frozenset[str]:
    """The events that `raydix serve` shows beside warnings: the load on a terminal, requests where they are asked
    for."""
    shows_load = is_terminal and not getattr(options, "quiet", False)
    return frozenset({LOAD} if shows_load else ()) | ({REQUEST} if getattr(options, "log_requests", False) else set())


class EventHandler(logging.Handler):
    """Shows the records of some events of this process."""

    def __init__(self, events: frozenset[str], show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._events = events
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "about", {}).get("event") in self._events and record.levelno < logging.WARNING:
            self._show(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}")


class LogFollower:
    """Shows each logged warning and error, and records of `events`, in a line, from a thread of its own."""

    def __init__(self, folder: Path, show: Callable[[str], None], events: frozenset[str] = frozenset()) -> None:
        self._folder = folder
        self._show = show
        self._events = events
        self._files: dict[Path, FollowedFile] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current line."""
        self._has_ended.set()
        self._thread.join()
        for file in self._files.values():
            file.close()

    def look(self) -> None:
        """Show the lines written since the last call."""
        for path in sorted(self._folder.glob(PATTERN)):
            if path not in self._files:
                self._files[path] = FollowedFile(path)
        new = [line for file in self._files.values() for line in file.new_lines()]
        lines = [shown for line in new if (shown := warning_of(line))]
        for line in lines[:MAX_LINES]:
            self._show(line)
        if len(lines) > MAX_LINES:
            self._show(f"{len(lines) - MAX_LINES} more warnings in {self._folder}")
        # Who asks for each request's line gets each.
        for line in new if self._events else ():
            if shown := event_of(line, self._events):
                self._show(shown)

    def _run(self) -> None:
        while not self._has_ended.wait(POLL_S):
            self.look()


class FollowedFile:
    """One log file, across its rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._rest = b""  # beginning of a line whose end is not written yet

    def new_lines(self) -> Iterator[str]:
        """Return the lines completed since the last call."""
        yield from self._read()
        if self._is_rotated():
            yield from self._read()  # what was written between the two looks
            self.close()
            yield from self._read()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _read(self) -> Iterator[str]:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY)
            while data := os.read(self._file, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
        except FileNotFoundError:
            return  # between the two halves of a rotation

    def _is_rotated(self) -> bool:
        try:
            return self._file is not None and os.fstat(self._file).st_ino != self._path.stat().st_ino
        except FileNotFoundError:
            return False


def event_of(line: str, events: frozenset[str]) -> str | None:
    """Format a line of a log file that tells of one of these events; None for others, and for warnings."""
    if not line.startswith("{"):
        found = _TEXT_LINE.fullmatch(line)
        return f"{found[1]} {found[2]}" if found is not None and found[3] in events else None
    try:
        record = json.loads(line)
        if record.get("event") not in events or record["level"] in SHOWN_LEVELS:
            return None
        return " ".join(f"{record['time'][11:19]} {record['message']}".split())
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def warning_of(line: str) -> str | None:
    """Format a line of a log file for the terminal; None for records below warning, and inside tracebacks."""
    if not line.startswith("{"):
        words = line.split(" ", 2)
        return line if len(words) == 3 and words[1] in SHOWN_LEVELS else None
    try:
        record = json.loads(line)
        if record["level"] not in SHOWN_LEVELS:
            return None
        shown = f"{record['time'][11:19]} {record['level']} {record['process']} {record['pid']}: {record['message']}"
    except (ValueError, LookupError, TypeError):
        return None
    error = str(record.get("exception", "")).rpartition("\n")[2]
    return " ".join(f"{shown} ({error})".split()) if error else " ".join(shown.split())
