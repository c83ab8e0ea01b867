"""A client's side of streams whose events have ids (`raydix.engine.api.resuming`): the place to go on from, and when to
try.

No I/O and no clock: lines come from the client's connection, and times are arguments.
"""

HEADER = "Last-Event-ID"
BEGINNING = "0"  # value of the header that asks for ids from the first event on

TRY_FOR_S = 60.0  # seconds without an event after a break, after which a client gives up
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# HTTP statuses of a server that may answer later. HAProxy that has just started says 404 until it knows the routes.
AWAY = frozenset({404, 429, 502, 503, 504})


class Reconnecting:
    """The place of a reader in one stream. Servers that give no ids are not asked again."""

    def __init__(self) -> None:
        self.num_breaks = 0
        """Times that the connection broke and the stream was asked for again."""
        self._last_id = BEGINNING
        self._next_id = BEGINNING
        self._broken_at: float | None = None
        self._pause_s = FIRST_PAUSE_S

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the next attempt."""
        return {HEADER: self._last_id}

    @property
    def can_go_on(self) -> bool:
        """True if the server gave an event with an id."""
        return self._last_id != BEGINNING

    def take_line(self, line: bytes) -> bytes | None:
        """Take a line of the stream; returns the data of an event that the line completes, or None.

        A line without its end is a part of one. It counts only where the server gives no ids, and would not be asked
        again.
        """
        if line.startswith(b"id:"):
            self._next_id = line[3:].strip().decode("latin-1")
            return None
        if not line.startswith(b"data:") or (not line.endswith(b"\n") and self._next_id != BEGINNING):
            return None
        self.delivered(self._next_id)
        return line[5:].strip()

    def delivered(self, event_id: str | None) -> None:
        """Note an event that has come whole; None: the server gives no ids."""
        self._last_id = self._next_id = event_id or BEGINNING
        self._broken_at, self._pause_s = None, FIRST_PAUSE_S

    def pause_s(self, now_s: float) -> float | None:
        """Seconds to wait after the connection broke, and before the next attempt; None: there is none."""
        self._broken_at = now_s if self._broken_at is None else self._broken_at
        if not self.can_go_on or now_s - self._broken_at >= TRY_FOR_S:
            return None
        self.num_breaks += 1
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s
