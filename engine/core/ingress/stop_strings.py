"""Finds stop strings in a text that arrives in pieces.

The text ends at the first character that completes any stop string; of several ending there the longest counts. The
result depends on the text alone, not on its pieces. Held back is exactly the longest end of the text that begins a stop
string.

The search is the automaton of Aho and Corasick (1975): its state is the longest end of the text that begins a stop
string, so one dictionary lookup per character finds matches and the length to hold back, whatever the number of stop
strings.
"""

import re
from collections import deque

_ROOT = 0


class StopStrings:
    """Watches the text of one sequence.

    `stops`: the strings, none empty (ValueError). `include_stop`: the matched string stays in the text.
    """

    __slots__ = ("_depth", "_first", "_held", "_include_stop", "_matched", "_state", "_stop_at", "_suffix", "_targets")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None
        self._state = _ROOT
        # Next state for each character, by state. A state is a beginning of some stop string.
        self._targets: list[dict[str, int]] = [{}]
        self._depth = [0]  # length of the text of each state
        self._stop_at: list[str | None] = [None]  # longest stop string at the end of the text of each state
        self._suffix = [_ROOT]  # state of the longest proper end of the text of each state

        for stop in stops:
            self._add(stop)
        self._link()
        first = "".join(map(re.escape, self._targets[_ROOT]))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None before a match."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; return the text that may be shown now, and the stop string if the text ends here.

        After a match every piece is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        start = 0
        # No stop string has begun: one search passes over all text that begins none, which is nearly all.
        if self._state == _ROOT:
            found = self._first.search(text)
            if found is None:
                return text, None
            start = found.start()

        # The state has followed the held text already, so only new characters are looked at.
        num_before = len(self._held)
        text = self._held + text
        for index in range(num_before + start, len(text)):
            stop = self._advance(text[index])
            if stop is not None:
                self._matched, self._held = stop, ""
                end = index + 1
                return text[: end if self._include_stop else end - len(stop)], stop

        num_shown = len(text) - self._depth[self._state]
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """End the text: return the part held back."""
        held, self._held, self._state = self._held, "", _ROOT
        return held

    def _advance(self, character: str) -> str | None:
        """Follow one character; return the longest completed stop string."""
        targets, state = self._targets, self._state
        while (target := targets[state].get(character)) is None and state != _ROOT:
            state = self._suffix[state]
        self._state = _ROOT if target is None else target
        return self._stop_at[self._state]

    def _add(self, stop: str) -> None:
        state = _ROOT
        for depth, character in enumerate(stop, start=1):
            target = self._targets[state].get(character)
            if target is None:
                target = len(self._targets)
                self._targets[state][character] = target
                self._targets.append({})
                self._depth.append(depth)
                self._stop_at.append(None)
                self._suffix.append(_ROOT)
            state = target
        self._stop_at[state] = stop

    def _link(self) -> None:
        """Fill `_suffix` and complete `_stop_at`, shorter states first."""
        queue = deque(self._targets[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, target in self._targets[state].items():
                # The suffix of a longer state is that of its beginning, moved on by one character; all shorter ones are
                # known.
                self._state = self._suffix[state]
                self._advance(character)
                self._suffix[target] = self._state
                # A state that is a stop string itself is longer than any other that ends there.
                if self._stop_at[target] is None:
                    self._stop_at[target] = self._stop_at[self._state]
                queue.append(target)
        self._state = _ROOT
