"""KV that leaves one worker's pool in segments, and KV that comes into it; recurrent states beside it."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from raydix.engine.core.log_fields import about
from raydix.engine.core.types import BlockHash, SegmentHeader
from raydix.engine.core.worker.imports import Imports
from raydix.engine.core.worker.step import ExportedBlocks
from raydix.engine.core.worker.transfers import IncomingBlocks, Transfers
from raydix.engine.model.segments import Bytes, checksum

logger = logging.getLogger(__name__)


class BlockStore(Protocol):
    """The bytes of the blocks; `raydix.engine.model.kv_pool.KVPool` is the implementation with a model behind it."""

    block_bytes: int

    def export_blocks(self, block_ids: Sequence[int]) -> Bytes: ...

    def start_export(self, block_ids: Sequence[int]) -> Bytes | Callable[[], Bytes]: ...

    def import_blocks(self, buffer: Bytes, block_ids: Sequence[int]) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...


class StateStore(Protocol):
    """The bytes of recurrent states; `raydix.engine.model.state_pool.StatePool` is the implementation with a model
    behind it."""

    state_bytes: int

    def export_states(self, slots: Sequence[int]) -> Bytes: ...

    def import_states(self, buffer: Bytes, slots: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class ExportedSegment:
    """A segment ready to be sent: header and payload, the blocks and behind them the states (empty for a bare
    handover).

    While a device still copies the payload, `arriving` waits for it, and payload and checksum are missing.
    """

    header: SegmentHeader
    payload: Bytes
    arriving: Callable[[], Bytes] | None = None

    def arrived(self) -> "ExportedSegment":
        """Complete the segment, waiting for its payload if need be; any thread may call this, once."""
        if self.arriving is None:
            return self
        payload = self.arriving()
        return ExportedSegment(replace(self.header, checksum=checksum(payload)), payload)

    def header_outside(self, ahead_s: float) -> SegmentHeader:
        """The header for other processes, with the expiry in seconds since the epoch instead of the pool's monotonic
        ones. `ahead_s`: seconds since the epoch minus monotonic seconds, now."""
        retention = self.header.retention
        if retention.expires_at is None:
            return self.header
        return replace(self.header, retention=replace(retention, expires_at=retention.expires_at + ahead_s))


class Exchange:
    """Carries out what `transfers` decides: copies blocks of `store` and states of `states` into segments, and those of
    segments into them."""

    def __init__(
        self,
        store: BlockStore,
        transfers: Transfers,
        imports: Imports,
        fingerprint: str,
        states: StateStore | None = None,
    ) -> None:
        """`imports`: the requests that wait for blocks; `fingerprint`: of the KV, equal in all segments taken in;
        `states`: of a model with recurrent layers."""
        self.store = store
        self.states = states
        self._transfers = transfers
        self._imports = imports
        self._fingerprint = fingerprint

    @property
    def state_bytes(self) -> int:
        """Bytes of a recurrent state; 0 for a model without them."""
        return 0 if self.states is None else self.states.state_bytes

    def import_segment(self, header: SegmentHeader, payload: Bytes | None, now: float) -> bool:
        """Take a segment's blocks and states into the pool, then its handover; False if the content contradicts the
        header.

        `payload` None stands for a segment that could not be fetched. Blocks that the pool holds already, and blocks
        without room, are passed over: their requests compute them.
        """
        # A bare hand-over has no bytes that could be damaged.
        intact = header.num_bytes == 0 or (payload is not None and self._is_intact(header, payload))
        if intact and payload is not None:
            self._import_blocks(header, payload, now)
        # Settled in any case: requests that wait for blocks which did not come compute them.
        self._imports.settled(header.names, now)
        if header.handover is not None:
            self._imports.handed_over(header.handover, now)
        return intact

    def export(self, hashes: Iterable[BlockHash], now: float) -> tuple[list[ExportedSegment], tuple[BlockHash, ...]]:
        """Export the blocks of `hashes` as segments; returns the segments, and the hashes of missing blocks."""
        exports, missing = self._transfers.to_export(hashes)
        segments = []
        for export in exports:
            self._transfers.hold(export)
            segments.append(self._pack(export, now))
        return segments, missing

    def pack_all(self, exports: Iterable[ExportedBlocks], now: float) -> tuple[ExportedSegment, ...]:
        """Make the segments of a step. A failed segment is sent without its blocks; the pool still has them."""
        segments = []
        for export in exports:
            try:
                segments.append(self._pack(export, now))
            except Exception:  # the step itself went well, and its tokens must go out
                extra = about("not_exported", request=export.request_id, blocks=len(export.blocks))
                logger.exception("%d blocks of %s not exported", len(export.blocks), export.request_id, extra=extra)
                if export.handover is not None:
                    segments.append(self._pack(replace(export, blocks=(), hashes=(), states=()), now))
        return tuple(segments)

    def _is_intact(self, header: SegmentHeader, payload: Bytes) -> bool:
        expected = len(header.hashes) * self.store.block_bytes + len(header.states) * self.state_bytes
        intact = (
            header.fingerprint == self._fingerprint
            and payload.nbytes == expected
            and checksum(payload) == header.checksum
        )
        if not intact:
            logger.warning("segment of %d blocks refused: model, size or checksum differ", len(header.hashes))
        return intact

    def _import_blocks(self, header: SegmentHeader, payload: Bytes, now: float) -> None:
        incoming, is_filled = IncomingBlocks(), False
        try:
            incoming = self._transfers.take_in(header, now)
            blocks = payload[: len(header.hashes) * self.store.block_bytes]
            if incoming.blocks:
                self.store.import_blocks(self._contents_of(incoming, blocks), incoming.blocks)
            # Views of the payload, one by one: a state may have tens of megabytes.
            for index, slot in zip(incoming.state_indexes, incoming.slots, strict=True):
                assert self.states is not None
                first = blocks.nbytes + index * self.state_bytes
                self.states.import_states(payload[first : first + self.state_bytes], [slot])
            is_filled = True
        except Exception:  # requests that wait for these blocks must go on without them
            logger.exception("a segment of %d blocks is not imported", len(header.hashes))
        finally:
            self._transfers.taken_in(incoming, now, is_filled=is_filled)

    def _contents_of(self, incoming: IncomingBlocks, payload: Bytes) -> Bytes:
        """Take the bytes of some blocks out of those of a segment's blocks; not copied at the beginning."""
        num_blocks = len(incoming.blocks)
        if incoming.indexes == tuple(range(num_blocks)):
            return payload[: num_blocks * self.store.block_bytes]
        rows: Bytes = payload.reshape(-1, self.store.block_bytes)[list(incoming.indexes)]
        return rows.reshape(-1)

    def _pack(self, export: ExportedBlocks, now: float) -> ExportedSegment:
        """Copy blocks and states out, or begin to, and release them."""
        nothing = np.empty(0, np.uint8)
        try:
            payload = self.store.start_export(export.blocks) if export.blocks else nothing
            if export.states:
                assert self.states is not None
                payload = _joined(payload, self.states.export_states([slot for _, slot in export.states]))
        finally:
            self._transfers.release(export, now)
        num_bytes = len(export.blocks) * self.store.block_bytes + len(export.states) * self.state_bytes
        header = SegmentHeader(
            fingerprint=self._fingerprint,
            hashes=export.hashes,
            num_bytes=num_bytes,
            checksum=0,
            handover=export.handover,
            retention=export.retention,
            states=tuple(state for state, _ in export.states),
            state_bytes=self.state_bytes,
        )
        if isinstance(payload, np.ndarray):
            return ExportedSegment(replace(header, checksum=checksum(payload)), payload)
        return ExportedSegment(header, nothing, payload)


def _joined(blocks: Bytes | Callable[[], Bytes], states: Bytes) -> Bytes | Callable[[], Bytes]:
    """The payload of blocks and, behind them, states, as `BlockStore.start_export` gives it."""
    if isinstance(blocks, np.ndarray):
        return np.concatenate((blocks, states)) if blocks.nbytes else states
    return lambda: np.concatenate((blocks(), states))
