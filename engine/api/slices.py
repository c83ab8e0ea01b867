"""JSON documents of any size as slices of bounded size, so that no step of making one holds the interpreter for long.

A document is a tree as `orjson` takes it, in which a `Sliced` stands for a value that may be large. The text around
these values is made at once, and each value's text by its own iterator, in the place where it belongs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import orjson

SLICE_IDS = 16_384  # token ids of a slice: a fraction of a millisecond

# Marks the place of a value. JSON escapes this character in texts, so that it stands nowhere else.
_PLACE = b"\x00"


class Sliced:
    """A value in a JSON document, whose text is made slice by slice, anew by each iterator. `orjson` would write
    a dataclass by itself, so this is none."""

    __slots__ = ("_slices",)

    def __init__(self, slices: Callable[[], Iterator[bytes]]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[bytes]:
        return self._slices()


def document(tree: object) -> Iterator[bytes]:
    """The text of a tree, slice by slice."""
    values: list[Sliced] = []

    def place(value: object) -> orjson.Fragment:
        if not isinstance(value, Sliced):
            raise TypeError(type(value).__name__)
        values.append(value)
        return orjson.Fragment(_PLACE)

    texts = orjson.dumps(tree, place, orjson.OPT_SERIALIZE_NUMPY).split(_PLACE)
    yield texts[0]
    for value, text in zip(values, texts[1:], strict=True):
        yield from value
        yield text


def whole(tree: object) -> bytes:
    return orjson.dumps(tree, _joined, orjson.OPT_SERIALIZE_NUMPY)


def _joined(value: object) -> orjson.Fragment:
    if not isinstance(value, Sliced):
        raise TypeError(type(value).__name__)
    return orjson.Fragment(b"".join(value))


def array_of(items: Callable[[], Iterable[object]]) -> Sliced:
    """An array of items, which are trees themselves and made one after the other."""

    def slices() -> Iterator[bytes]:
        separator = b"["
        for item in items():
            yield separator
            yield from document(item)
            separator = b","
        yield b"]" if separator == b"," else b"[]"

    return Sliced(slices)


def ids_of(token_ids: Sequence[int]) -> Sequence[int] | Sliced:
    """An array of token ids, in slices if there are many."""
    if len(token_ids) <= SLICE_IDS:
        return token_ids if isinstance(token_ids, list) else list(token_ids)

    def slices() -> Iterator[bytes]:
        for first in range(0, len(token_ids), SLICE_IDS):
            yield b"," if first else b"["
            yield orjson.dumps(list(token_ids[first : first + SLICE_IDS]))[1:-1]
        yield b"]"

    return Sliced(slices)
