"""Orders the lines of a batch so that lines with a common beginning run one after the other.

A prompt is cut into pieces of `PIECE` characters. Lines with equal first pieces stand side by side, within these
the lines with more equal pieces, and so on, as in a walk through a prefix tree: a beginning is needed in one stretch of
time and is evicted at most once. Otherwise the order is the file's.
"""

from hashlib import blake2b

PIECE = 256
"""Characters of a piece: a few KV blocks."""
MAX_PIECES = 64
"""Most pieces compared of one prompt."""
DIGEST_BYTES = 12


class PrefixOrder:
    """Collects the prompts of a batch, then gives the order of the lines."""

    def __init__(self) -> None:
        self._first_with: dict[bytes, int] = {}
        """First line with some pieces, by the chained hash of the pieces."""
        self._places: list[tuple[tuple[int, ...], int]] = []

    def add(self, number: int, prompt: str) -> None:
        """Note the prompt of a line; numbers are given in the file's order."""
        place = []
        chain = b""
        for start in range(0, min(len(prompt), PIECE * MAX_PIECES), PIECE):
            piece = prompt[start : start + PIECE].encode("utf-8", "surrogatepass")
            chain = blake2b(piece, key=chain, digest_size=DIGEST_BYTES).digest()
            place.append(self._first_with.setdefault(chain, number))
        self._places.append((tuple(place), number))

    def numbers(self) -> list[int]:
        """The lines in the order of running."""
        return [number for _, number in sorted(self._places)]
