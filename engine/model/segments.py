"""The payload of segments: raw KV bytes of consecutive blocks, checked when they are read."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional array of bytes: numpy, because it crosses processes without a copy and torch tensors do not."""


def checksum(payload: Bytes) -> int:
    """XXH3 of the payload: against damage and mix-ups, at memory speed; not against forgery."""
    return xxhash.xxh3_64_intdigest(payload.data)
