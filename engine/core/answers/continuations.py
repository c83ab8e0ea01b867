"""Beginnings of answers as messages carry them: token ids in the machine's own byte order, a bounded number."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

TOKEN_BYTES = 4
MAX_BYTES = 960  # limit of bytes of all continuations of one admission, and of one answer


class BegunAnswer(NamedTuple):
    """The beginning of an answer."""

    name: bytes
    """Name of the place where the answer began (`BlockChain.answer_name`)."""
    token_ids: bytes
    """Packed."""


def packed(token_ids: Sequence[int]) -> bytes:
    """The first token ids of an answer."""
    return array("I", token_ids[: MAX_BYTES // TOKEN_BYTES]).tobytes()


def unpacked(continuation: bytes) -> Sequence[int]:
    """The token ids of a continuation, without a copy."""
    return memoryview(continuation).cast("I")
