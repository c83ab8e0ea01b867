"""Token ids to text, piece by piece.

Guarantees of every detokenizer here: no piece ever contains half a UTF-8 character, and the pieces of all pushes plus
the flush, joined, are the text of all ids at once, however the ids were split into pushes. Invalid UTF-8 becomes
U+FFFD, at the very end only at the flush, since the next token might still complete a character.

One detokenizer belongs to one sequence; the token table is shared. Stop strings and special tokens are unknown here: a
hidden token has empty bytes in the table, or is skipped by the decode function.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns the growing token ids of one sequence into pieces of text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is certain now and was not returned before."""
        ...

    def flush(self) -> str:
        """Return what is left, incomplete characters as U+FFFD. The detokenizer is empty afterwards."""
        ...


class ByteDetokenizer:
    """Detokenizer for byte-level BPE, where each token stands for fixed bytes.

    `token_bytes` holds the bytes of each id: kept, not copied. An unknown id raises IndexError.
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
    """Detokenizer for every other tokenizer: decodes a short window of recent ids and returns what its text grew by.

    `decode` turns a list of ids into text. It must be stable: appending ids may replace a run of U+FFFD at the end of
    the text, but nothing before it. (A byte-fallback decoder is, as long as the bytes are UTF-8; text it has shown
    stays shown when an invalid byte follows.)

    The window opens at a character border and always keeps some text before the newest ids, for decoders that treat
    the first token of a text in a special way.
    """

    __slots__ = ("_border", "_decode", "_num_shown", "_text", "_window")

    WINDOW = 12
    """Window length in ids above which the window is cut at the next character border."""
    WINDOW_LIMIT = 96
    """Window length at which undecodable ids are given up as U+FFFD: bounds the cost of a sequence that never makes
    a whole character."""
    CONTEXT = 8
    """Ids kept when given up."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""  # `decode(_window)`
        self._num_shown = 0  # characters of `_text` already returned
        self._border = 0  # index in `_window` behind the ids of the last whole character

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        window = [*self._window, *token_ids]
        text = self._decode(window)
        num_stable = len(text.rstrip(REPLACEMENT))
        whole = num_stable == len(text)
        if whole and text and text == self._text:
            return ""  # the ids show nothing: forget them, so that a run of them does not fill the window

        # Characters of `text` from `_num_shown` to `num_stable` are new and certain.
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
        """Drop the first `start` ids of the window; all their text has been returned."""
        if start:
            self._window = self._window[start:]
            self._text = self._decode(self._window)
            self._num_shown = len(self._text)
        self._border = len(self._window)


class ShowingDetokenizer:
    """Shows some ids that another detokenizer hides, as texts: `shown` has these by id."""

    __slots__ = ("_inner", "_shown")

    def __init__(self, inner: Detokenizer, shown: Mapping[int, str]) -> None:
        self._inner = inner
        self._shown = shown

    def push(self, token_ids: Sequence[int]) -> str:
        if self._shown.keys().isdisjoint(token_ids):
            return self._inner.push(token_ids)
        text, start = "", 0
        for index, token_id in enumerate(token_ids):
            if token_id in self._shown:
                text += self._inner.push(token_ids[start:index]) + self._inner.flush() + self._shown[token_id]
                start = index + 1
        return text + self._inner.push(token_ids[start:])

    def flush(self) -> str:
        return self._inner.flush()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level BPE vocabulary.

    Such vocabularies write each byte as one printable character (GPT-2, Radford et al. 2019). A token with any other
    character is not spelled so (an added token) and stands for itself.
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
