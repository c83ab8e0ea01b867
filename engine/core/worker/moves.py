"""Copies of block contents before a step computes.

The scheduler decides moves one after the other while it allocates and releases blocks. Done in that order, each move
finds the contents that it was decided for.
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
    """Keep the contents of `blocks` outside the pool for a preempted request."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Fill `blocks` with the last of the contents kept for the request, and drop the kept copy."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapDrop:
    """Drop the contents kept for the request, if any."""

    request_id: str


Move: TypeAlias = CopyBlock | SwapOut | SwapIn | SwapDrop
