"""What happens to the bytes of blocks before a step computes anything.

A scheduler decides these one after the other while it gives blocks away and takes them back. Done in that order, each
finds the bytes that it was decided for.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy the block `source` onto the block `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Keep the bytes of `blocks` outside the pool for a request that has lost them."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Fill `blocks` with the last of what was kept for the request, and keep it no longer."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapDrop:
    """What is kept for the request, if anything, is not needed any more."""

    request_id: str


Move: TypeAlias = CopyBlock | SwapOut | SwapIn | SwapDrop
