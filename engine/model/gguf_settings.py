"""The settings at the beginning of a GGUF file, read from its first bytes: the file itself may be far away.

Writers put a model's settings before its tokenizer, and arrays say their length first. So the first few hundred KiB of
a file of any size tell what its model is. The bytes come from elsewhere and may be of any kind: they are read within
their bounds.
"""

import struct
from dataclasses import dataclass
from typing import Any

# Formats of numbers, by the file's number of their type.
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """An array of which only the length matters."""

    length: int


class _EndError(Exception):
    """The bytes end here."""


class _Bytes:
    """Bytes, and how far they were read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise _EndError
        self._at += length
        return self._data[self._at - length : self._at]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")


def read_settings(data: bytes) -> dict[str, Any]:
    """The settings that the first bytes of a GGUF file tell whole, by name. Of an array that is cut off, and of one of
    strings, the length (`ArrayOf`).

    Raises:
        ValueError: these are no first bytes of a GGUF file.
    """
    rest = _Bytes(data)
    found: dict[str, Any] = {}
    try:
        if rest.take(4) != b"GGUF":
            raise ValueError("it does not begin with the GGUF magic")
        if (version := rest.number("<I")) not in (2, 3):
            raise ValueError(f"its version is {version}, or it is of a machine with another order of bytes")
        rest.number("<Q")  # of tensors
        for _ in range(rest.number("<Q")):
            name, kind = rest.string(), rest.number("<I")
            if kind != _ARRAY:
                found[name] = _value(rest, kind)
                continue
            kind, length = rest.number("<I"), rest.number("<Q")
            found[name] = ArrayOf(length)
            values = [_value(rest, kind) for _ in range(length)]
            if kind != _STRING:
                found[name] = values
    except _EndError:
        pass
    return found


def _value(rest: _Bytes, kind: int) -> Any:
    if kind == _STRING:
        return rest.string()
    if kind not in _FORMATS:
        raise ValueError(f"it has a setting of the unknown type {kind}")
    return rest.number(_FORMATS[kind])
