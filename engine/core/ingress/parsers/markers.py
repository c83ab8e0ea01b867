"""A fixed text that marks a place in a text that comes in pieces."""


class Marker:
    """Looks for the first `marker`, which is not empty. Held back is the longest end of the text that begins it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self._held = ""

    def split(self, text: str) -> tuple[str, str | None]:
        """Take the next text; return the text before the marker, and the text behind it, or None if the marker has not
        come. The search then begins anew."""
        text = self._held + text
        before, found, after = text.partition(self.marker)
        if found:
            self._held = ""
            return before, after
        # From the longest end that could be a beginning of the marker down; the empty end always is one.
        num_held = min(len(text), len(self.marker) - 1)
        while not self.marker.startswith(text[len(text) - num_held :]):
            num_held -= 1
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """Return the held text, at the end of the text."""
        held, self._held = self._held, ""
        return held


class OneOfMarkers:
    """Looks whether a text begins with one of some markers, none of which begins another."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""

    @property
    def is_open(self) -> bool:
        """True while a marker has begun."""
        return bool(self._held)

    def take(self, character: str) -> str | None:
        """Take the next character. Returns the text so far once it is a marker or no beginning of one, else None."""
        self._held += character
        # Neither a whole marker nor too long for one: the next character decides.
        if self._held not in self._markers and any(marker.startswith(self._held) for marker in self._markers):
            return None
        return self.flush()

    def flush(self) -> str:
        """Return the text so far, and begin anew."""
        held, self._held = self._held, ""
        return held
