"""Streamed text on a terminal, with lines that break between words.

The end of a word is not known when its beginning is shown.
"""

from rich.cells import cell_len

TAB = 8
BREAKS = " \t"


class Wrapper:
    """Puts line breaks into text that arrives in pieces.

    Each piece is shown at once. A word that reaches the edge is taken back from the line and begun anew in the next
    one; a word that is longer than a line is broken at the edge. The last column stays empty: terminals differ in the
    cursor's place after filling it.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # last word as far as it stands on the line; the next piece may continue it

    def push(self, text: str, width: int) -> str:
        """Return the characters to write to a terminal of `width` columns for the next piece."""
        return "".join(self._put(character, max(width - 1, 1)) for character in text)

    def _put(self, character: str, width: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        if character in BREAKS:
            return self._space(TAB - self._column % TAB if character == "\t" else 1, width)
        size = cell_len(character)
        if self._column + size <= width:
            self._column += size
            self._word += character
            return character
        return self._next_line(character, width)

    def _space(self, size: int, width: int) -> str:
        """Leave out a space at the beginning of a line."""
        self._word = ""
        if self._column + size > width:
            self._column = 0
            return "\n"
        self._column += size
        return " " * size

    def _next_line(self, character: str, width: int) -> str:
        """Continue in the next line, with the beginning of the word unless the word is too long for a line."""
        taken_back, size = "", cell_len(self._word)
        if 0 < size < self._column and size + cell_len(character) <= width:
            taken_back = f"\x1b[{size}D\x1b[K"
        else:
            self._word = ""
        self._word += character
        self._column = cell_len(self._word)
        return f"{taken_back}\n{self._word}"
