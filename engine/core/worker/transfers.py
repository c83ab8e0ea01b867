"""Blocks on their way into and out of the pool in segments: chosen, and held until their contents have been copied."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raydix.engine.core.types import BlockHash, Retention, SegmentHeader
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ExportedBlocks


@dataclass(frozen=True, slots=True)
class IncomingBlocks:
    """Blocks of the pool to be filled from a segment; the importer holds each of them."""

    indexes: tuple[int, ...] = ()
    """Places in the segment."""
    hashes: tuple[BlockHash, ...] = ()
    blocks: tuple[int, ...] = ()
    tail: BlockHash | None = None
    """The hash of the segment's partial block."""


class Transfers:
    """Choice of the blocks to import and to export. An exporter or importer is one more holder of a block."""

    def __init__(self, pool: BlockPool, registry: Mapping[str, Request]) -> None:
        """`registry`: all requests of the worker by id; only read."""
        self._pool = pool
        self._registry = registry

    def take_in(self, header: SegmentHeader, now: float) -> IncomingBlocks:
        """Allocate blocks for the contents of a segment that the pool lacks, as far as there is room."""
        # The partial block serves the request that goes on here, and nothing else.
        goes_on_here = header.handover is not None and header.handover.request_id in self._registry
        hashes = header.hashes if goes_on_here else header.full_hashes
        missing = [index for index, block_hash in enumerate(hashes) if self._pool.lookup(block_hash) is None]
        # Where room is short the first ones are taken: the later ones are not hit without them.
        missing = missing[: self._pool.num_available]
        blocks = self._pool.allocate(len(missing), now)
        return IncomingBlocks(
            tuple(missing),
            tuple([hashes[index] for index in missing]),
            tuple(blocks),
            tail=None if header.handover is None else header.handover.tail,
        )

    def taken_in(self, incoming: IncomingBlocks, now: float, *, is_filled: bool) -> None:
        """Seal the filled blocks and release them; unfilled blocks are free again."""
        # Named only now: a block is never visible before the import that filled it.
        if is_filled:
            for block, block_hash in zip(incoming.blocks, incoming.hashes, strict=True):
                self._pool.seal(block, block_hash)
        self._pool.release(incoming.blocks, now)

    def to_export(self, hashes: Iterable[BlockHash]) -> tuple[list[ExportedBlocks], tuple[BlockHash, ...]]:
        """Blocks to export, grouped into segments, and the hashes of missing blocks. Takes no reference.

        A segment is kept as a whole, so its blocks have one tenant and one priority, and all expire, with the last of
        them, or none does.
        """
        # Without the recurrent states, which stay in this worker, another one could not go on from its blocks.
        if self._pool.states is not None:
            return [], tuple(hashes)
        missing: list[BlockHash] = []
        alike: dict[tuple[str, int, bool], list[tuple[BlockHash, int, Retention]]] = {}
        for block_hash in dict.fromkeys(hashes):
            block = self._pool.lookup(block_hash)
            if block is None:
                missing.append(block_hash)
            else:
                wish = self._pool.retention_of(block)
                # Blocks with equal keys go into one segment.
                key = wish.tenant, wish.priority, wish.expires_at is None
                alike.setdefault(key, []).append((block_hash, block, wish))

        exports = []
        for group in alike.values():
            found, blocks, wishes = zip(*group, strict=True)
            retention = max(wishes, key=lambda wish: wish.expires_at or 0.0)
            exports.append(ExportedBlocks("", found, blocks, retention=retention))
        return exports, tuple(missing)

    def hold(self, export: ExportedBlocks) -> None:
        """Hold blocks until they have been copied out."""
        self._pool.acquire(export.blocks)

    def release(self, export: ExportedBlocks, now: float) -> None:
        """Release blocks after their copy, or without one."""
        self._pool.release(export.blocks, now)
