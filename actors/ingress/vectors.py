"""Vectors of embeddings, made of pooled hidden states.

Vectors stay arrays until they are text: as Python's floats those of the largest request take four times the memory.
"""

import base64
import math
from typing import TypeAlias

import numpy as np

from raydix.engine.api.spec import EmbeddingUse

Vector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]


def embedding_of(state: bytes, use: EmbeddingUse) -> Vector:
    """The embedding that a pooled hidden state (`TokenEvent.pooled`) stands for: the same values on every machine,
    since the squares are exact and their sum is rounded once."""
    values = np.frombuffer(state, "<f4")
    if not use.is_normalized:
        return values
    wide = values.astype(np.float64)
    length = math.sqrt(math.fsum((wide * wide).tolist())) or 1.0
    return (wide / length).astype("<f4")


def shown(vector: Vector, use: EmbeddingUse) -> object:
    """A vector as a response of `/v1/embeddings` has it. Numbers are written as Python writes the same values."""
    if use.encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.astype(np.float64)
