"""Blocks on their way into and out of the pool in segments: chosen, and held until their contents have been copied.

Snapshots of recurrent states, of models that have them, are a second kind of block: asked for, sent and taken in by
names of their own (`state_hash`), with the names of all blocks that they are of use with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raydix.engine.core.types import DEFAULT_RETENTION, BlockHash, Retention, SegmentHeader, Snapshot
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ExportedBlocks

# States that are copied out at a time: one may be as large as the KV of thousands of tokens, and a step waits.
MAX_STATES = 4


@dataclass(frozen=True, slots=True)
class IncomingBlocks:
    """Blocks of the pool, and slots for recurrent states, to be filled from a segment; the importer holds each of
    them."""

    indexes: tuple[int, ...] = ()
    """Places in the segment."""
    hashes: tuple[BlockHash, ...] = ()
    blocks: tuple[int, ...] = ()
    tail: BlockHash | None = None
    """The hash of the segment's partial block."""
    states: tuple[Snapshot, ...] = ()
    state_indexes: tuple[int, ...] = ()
    """Places of the states among those of the segment."""
    slots: tuple[int, ...] = ()
    """Slots for the states."""


class Transfers:
    """Choice of the blocks to import and to export. An exporter or importer is one more holder of a block."""

    def __init__(self, pool: BlockPool, registry: Mapping[str, Request]) -> None:
        """`registry`: all requests of the worker by id; only read."""
        self._pool = pool
        self._registry = registry

    def take_in(self, header: SegmentHeader, now: float) -> IncomingBlocks:
        """Allocate blocks and slots for the contents of a segment that the pool lacks, as far as there is room."""
        # The partial block serves the request that goes on here, and nothing else.
        goes_on_here = header.handover is not None and header.handover.request_id in self._registry
        hashes = header.hashes if goes_on_here else header.full_hashes
        missing = [index for index, block_hash in enumerate(hashes) if self._pool.lookup(block_hash) is None]
        # Where room is short the first ones are taken: the later ones are not hit without them.
        missing = missing[: self._pool.num_available]
        blocks = self._pool.allocate(len(missing), now)
        slots = self._slots_for(header.states if goes_on_here else header.full_states)
        return IncomingBlocks(
            tuple(missing),
            tuple([hashes[index] for index in missing]),
            tuple(blocks),
            tail=None if header.handover is None else header.handover.tail,
            states=tuple(slots),
            state_indexes=tuple([header.states.index(state) for state in slots]),
            slots=tuple(slots.values()),
        )

    def taken_in(self, incoming: IncomingBlocks, now: float, *, is_filled: bool) -> None:
        """Seal the filled blocks and release them; unfilled blocks are free again."""
        # Named only now: a block is never visible before the import that filled it.
        if is_filled:
            for block, block_hash in zip(incoming.blocks, incoming.hashes, strict=True):
                self._pool.seal(block, block_hash)
        self._pool.release(incoming.blocks, now)
        for state, slot in zip(incoming.states, incoming.slots, strict=True):
            assert self._pool.states is not None
            if is_filled:
                # Segments overtake each other: of those with its blocks some may be still to come.
                is_ahead = any(self._pool.lookup(block_hash) is None for block_hash in state.path)
                self._pool.states.keep(slot, state.path, is_ahead=is_ahead)
            self._pool.states.release(slot)

    def to_export(self, hashes: Iterable[BlockHash]) -> tuple[list[ExportedBlocks], tuple[BlockHash, ...]]:
        """Blocks to export, grouped into segments, and the hashes of missing blocks. Takes no reference.

        A segment is kept as a whole, so its blocks have one tenant and one priority, and all expire, with the last of
        them, or none does.
        """
        missing: list[BlockHash] = []
        alike: dict[tuple[str, int, bool], _Alike] = {}
        for block_hash in dict.fromkeys(hashes):
            block = self._pool.lookup(block_hash)
            state = None if self._pool.states is None else self._pool.states.find(block_hash)
            if block is None and state is None:
                missing.append(block_hash)
                continue
            # A state is kept as long as the block at whose end it was taken.
            end = block if state is None else self._pool.lookup(state[0].path[-1])
            wish = DEFAULT_RETENTION if end is None else self._pool.retention_of(end)
            # Blocks with equal keys go into one segment.
            group = alike.setdefault((wish.tenant, wish.priority, wish.expires_at is None), _Alike())
            group.wishes.append(wish)
            if block is not None:
                group.hashes.append(block_hash)
                group.blocks.append(block)
            elif state is not None:
                group.states.append(state)

        exports = []
        for group in alike.values():
            retention = max(group.wishes, key=lambda wish: wish.expires_at or 0.0)
            hashes_of_group, blocks = tuple(group.hashes), tuple(group.blocks)
            exports.append(ExportedBlocks("", hashes_of_group, blocks, retention=retention, states=tuple(group.states)))
        return exports, tuple(missing)

    def first_part(self, hashes: Sequence[BlockHash]) -> tuple[Sequence[BlockHash], Sequence[BlockHash]]:
        """The names to be exported now, with at most `MAX_STATES` states, and the rest."""
        states, num_states = self._pool.states, 0
        for index, name in enumerate(hashes if states is not None else ()):
            num_states += states is not None and states.is_known(name)
            if num_states > MAX_STATES:
                return hashes[:index], hashes[index:]
        return hashes, ()

    def hold(self, export: ExportedBlocks) -> None:
        """Hold blocks and states until they have been copied out."""
        self._pool.acquire(export.blocks)
        for _, slot in export.states:
            assert self._pool.states is not None
            self._pool.states.hold(slot)

    def release(self, export: ExportedBlocks, now: float) -> None:
        """Release blocks and states after their copy, or without one."""
        self._pool.release(export.blocks, now)
        for _, slot in export.states:
            assert self._pool.states is not None
            self._pool.states.release(slot)

    def _slots_for(self, states: Iterable[Snapshot]) -> dict[Snapshot, int]:
        """Hold a slot for each state that is not here, as far as there are slots."""
        own, slots = self._pool.states, dict[Snapshot, int]()
        for state in states if own is not None else ():
            is_new = own is not None and state not in slots and not own.has(state.path[-1])
            if own is not None and is_new and (slot := own.allocate()) is not None:
                slots[state] = slot
        return slots


@dataclass(slots=True)
class _Alike:
    """What goes into one segment."""

    hashes: list[BlockHash] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    states: list[tuple[Snapshot, int]] = field(default_factory=list)
    wishes: list[Retention] = field(default_factory=list)
