"""Token ids to text, piece by piece.

Guarantees of every detokenizer here: no piece ever contains half a UTF-8 character, and the pieces of all pushes plus
the flush, joined, are the text of all ids at once, however the ids were split into pushes. Bytes that are no UTF-8
become U+FFFD, those at the very end only at the flush, since the next token might still complete them.

One detokenizer belongs to one sequence; the token table is shared. Knows nothing of stop strings or special tokens:
a token that must not show has empty bytes in the table, or is skipped by the decode function.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns the growing token ids of one sequence into pieces of text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is certain by now and was not returned before."""
        ...

    def flush(self) -> str:
        """Return what is left, incomplete characters as U+FFFD. The detokenizer is empty afterwards."""
        ...


class ByteDetokenizer:
    """For byte-level BPE, where each token stands for fixed bytes.

    `token_bytes` holds the bytes of each id. It is kept, not copied. An id outside raises IndexError.
    """

    __slots__ = ("_bytes_of", "_pending")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        data = self._pending + b"".join(map(self._bytes_of, token_ids))
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class PrefixDetokenizer:
    """For every other tokenizer: decodes a short window of recent ids and returns what its text grew by.

    `decode` turns a list of ids into text. It must be stable: appending ids may replace a run of U+FFFD at the end of
    the text, but nothing before it. (A byte-fallback decoder is, as long as the bytes are UTF-8; text it has shown
    stays shown when an invalid byte follows.)

    The window opens at a character border and always keeps some text before the newest ids, for decoders that treat
    the first token of a text in a special way.
    """

    __slots__ = ("_border", "_decode", "_num_shown", "_text", "_window")

    WINDOW = 12
    """Window length in ids from which it is cut at the next character border."""
    WINDOW_LIMIT = 96
    """Window length at which undecodable ids are given up as U+FFFD: bounds the cost of a sequence that never makes
    a whole character."""
    CONTEXT = 8
    """Ids kept when given up."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""
        """`decode(_window)`."""
        self._num_shown = 0
        """Characters of `_text` already returned."""
        self._border = 0
        """Index in `_window` behind the ids of the last whole character."""

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        num_stable = len(text.rstrip(REPLACEMENT))
        whole = num_stable == len(text)
        if whole and text and text == self._text:
            return ""  # the ids show nothing: forget them, so that a run of them does not fill the window
        if not whole and len(window) > self.WINDOW_LIMIT:
            num_stable = len(text)
        piece = text[self._num_shown : num_stable]
        self._window, self._text = window, text
        self._num_shown = max(self._num_shown, num_stable)
        if whole and text:
            self._cut(self._border if len(window) > self.WINDOW else 0)
        elif len(window) > self.WINDOW_LIMIT:
            self._cut(len(window) - self.CONTEXT)
        return piece

    def flush(self) -> str:
        piece = self._text[self._num_shown :]
        self._window, self._text, self._num_shown, self._border = [], "", 0, 0
        return piece

    def _cut(self, start: int) -> None:
        """Drop the first `start` ids of the window, all of whose text has been returned."""
        if start:
            self._window = self._window[start:]
            self._text = self._decode(self._window)
            self._num_shown = len(self._text)
        self._border = len(self._window)


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level BPE vocabulary stands for.

    Such vocabularies write each byte as one printable character (GPT-2, Radford et al. 2019). Text with any other
    character in it is no such spelling (an added token) and stands for itself.
    """
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_of_character()
