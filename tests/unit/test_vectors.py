"""Vectors of the responses of `/v1/embeddings`."""

import base64
import json
import math
import tracemalloc
from collections.abc import Iterator, Sequence
from struct import pack, unpack
from typing import Literal

import pytest

from raydix.engine.api.embeddings import embeddings_slices
from raydix.engine.api.responses import ResponseHead, TokenUsage
from raydix.engine.api.spec import EmbeddingUse
from raydix.engine.serving.rendering import embedding_of, written_vector

HEAD = ResponseHead("completion", "embd-r", 7, "m")


def slices(states: Sequence[bytes], encoding: Literal["float", "base64"]) -> Iterator[bytes]:
    use = EmbeddingUse(encoding)
    vectors = (written_vector(embedding_of(state, use), use) for state in states)
    return embeddings_slices(HEAD, lambda: vectors, TokenUsage(9, 0, 4))


def response(states: Sequence[bytes], encoding: Literal["float", "base64"]) -> bytes:
    return b"".join(slices(states, encoding))


def test_a_vector_has_length_one_unless_the_state_is_asked_for() -> None:
    state = pack("<3f", 3.0, -4.0, 0.1)
    vector = embedding_of(state, EmbeddingUse()).tolist()
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)
    assert [value / vector[0] * 3 for value in vector] == pytest.approx(unpack("<3f", state), rel=1e-6)
    assert list(unpack("<3f", pack("<3f", *vector))) == vector, "float32 values"
    assert embedding_of(state, EmbeddingUse(is_normalized=False)).tolist() == list(unpack("<3f", state))
    assert embedding_of(bytes(8), EmbeddingUse()).tolist() == [0.0, 0.0]


def test_vectors_are_never_lists_of_floats_all_together() -> None:
    num_values = 256 * 1024
    states = [pack("<1024f", *[0.1] * 1024)] * 256
    tracemalloc.start()
    try:
        num_bytes = sum(map(len, slices(states, "float")))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_bytes < 16 * num_values, "one vector after the other"


def test_both_encodings_have_the_same_values() -> None:
    states = [pack("<2f", 0.1, 0.2), pack("<2f", -5.0, 1e-3)]
    as_floats, as_bytes = (
        json.loads(response(states, "float")),
        json.loads(response(states, "base64")),
    )
    for index, (one, other) in enumerate(zip(as_floats.pop("data"), as_bytes.pop("data"), strict=True)):
        assert (one["index"], one["object"]) == (other["index"], other["object"]) == (index, "embedding")
        assert one["embedding"] == list(unpack("<2f", base64.b64decode(other["embedding"])))
    assert as_floats == as_bytes
    assert (as_floats["object"], as_floats["model"], as_floats["id"]) == ("list", "m", "embd-r")
    assert (as_floats["usage"]["prompt_tokens"], as_floats["usage"]["total_tokens"]) == (9, 9)
