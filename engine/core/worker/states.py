"""Recurrent states of one worker, each in a slot: whose they are, and which are kept as snapshots.

A model with recurrent layers needs, to go on from a position, the KV of all positions before it *and* the state behind
the last of them. A state never changes: a step reads one and writes others. So a state that was kept is shared without
a copy, and a step that is given up leaves no trace.

| state | holders | name |
|---|---|---|
| held | requests, the step under way | perhaps |
| a snapshot | perhaps | the hash of the block at whose end it was taken |
| free | none | none |

A snapshot is of use together with the KV of its block and of all blocks before it, its *path*. It is dropped as soon as
one of these leaves the pool, and of the snapshots without a holder the least recently used one when a slot is needed.
Of a snapshot that comes from another worker blocks may come later, in segments of their own; nobody goes on from it
before they are there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raydix.engine.core.hashing import state_hash
from raydix.engine.core.types import BlockHash, EvictionReason, Snapshot

SPARE = 4  # one slot in so many is never a snapshot: drafts, whose states last for a step, take no snapshot's place


@dataclass(slots=True)
class _PathBlock:
    """A block on the path of a snapshot."""

    parent: BlockHash | None
    """The block before it; None: it is a prompt's first."""
    children: set[BlockHash] = field(default_factory=set)
    """The blocks behind it that are on the path of a snapshot, too."""


class States:
    """Reference counts and names of `num_slots` slots; holds no tensor.

    Other processes hear of snapshots as of blocks, by names of their own (`state_hash`).
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 2, "a step reads one state and writes another"
        self.num_slots = num_slots
        self._most_snapshots = num_slots - num_slots // SPARE
        self._ref_counts = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # The slot of each snapshot, the least recently used one first.
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._names: list[BlockHash | None] = [None] * num_slots
        # The blocks on the paths of snapshots, as trees: of a snapshot that moves on with its request only the blocks
        # between its two places are looked at, however long the path is.
        self._blocks: dict[BlockHash, _PathBlock] = {}
        # The block of each snapshot, by the name under which other processes know it.
        self._named_after: dict[BlockHash, BlockHash] = {}
        # Snapshots that came before some of their blocks, until somebody goes on from them.
        self._ahead: set[BlockHash] = set()
        # Snapshots that other processes are not told of: they go as soon as their request takes the next one.
        self._untold: set[BlockHash] = set()
        self._came: list[BlockHash] = []
        self._gone: list[tuple[BlockHash, EvictionReason]] = []

    @property
    def num_snapshots(self) -> int:
        return len(self._slots)

    def longest(self, hashes: Sequence[BlockHash]) -> tuple[int, int | None]:
        """Number of blocks of the longest prefix of `hashes` that ends with a snapshot, and its slot; 0 and None
        without one. Takes no reference."""
        # From the end: the longest prefix saves most.
        for num_blocks in range(len(hashes), 0, -1):
            if (slot := self._slots.get(hashes[num_blocks - 1])) is not None:
                return num_blocks, slot
        return 0, None

    def has(self, name: BlockHash) -> bool:
        return name in self._slots

    def is_told(self, name: BlockHash) -> bool:
        """True if other processes know of a snapshot."""
        return name not in self._untold

    def names(self) -> list[BlockHash]:
        """The blocks behind which there are snapshots, the least recently used first."""
        return list(self._slots)

    def slot_of(self, name: BlockHash) -> int | None:
        """The slot of a snapshot; None without one. Takes no reference."""
        return self._slots.get(name)

    def find(self, state: BlockHash) -> tuple[Snapshot, int] | None:
        """The snapshot that other processes know by this name, and its slot; None without one. Takes no reference."""
        name = self._named_after.get(state)
        if name is None:
            return None
        path, at = [name], self._blocks[name].parent
        while at is not None:
            path.append(at)
            at = self._blocks[at].parent
        return Snapshot(state, tuple(reversed(path))), self._slots[name]

    def is_known(self, state: BlockHash) -> bool:
        """True if there is a snapshot that other processes know by this name."""
        return state in self._named_after

    @property
    def has_ahead(self) -> bool:
        """True if blocks may be missing that a snapshot needs."""
        return bool(self._ahead)

    def blocks_on_paths(self) -> list[BlockHash]:
        """Every block that a snapshot needs, but for snapshots that came before their blocks."""
        found: set[BlockHash] = set()
        for name in self._slots.keys() - self._ahead:
            at: BlockHash | None = name
            while at is not None and at not in found:
                found.add(at)
                at = self._blocks[at].parent
        return sorted(found)

    def is_on_path(self, block_hash: BlockHash) -> bool:
        """True if a snapshot needs the block, and so all blocks before it."""
        return block_hash in self._blocks

    def allocate(self, *, may_drop: bool = True) -> int | None:
        """Hold a slot for a new state, dropping a snapshot if need be and allowed; None if there is none."""
        if not self._free and not (may_drop and self._drop_oldest()):
            return None
        slot = self._free.pop()
        self._ref_counts[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Hold a state that is held or a snapshot already."""
        assert self._ref_counts[slot] > 0 or self._names[slot] is not None
        self._ref_counts[slot] += 1
        if (name := self._names[slot]) is not None:
            self._slots.move_to_end(name)

    def go_on_from(self, slot: int) -> None:
        """Hold a snapshot for a request that goes on from it, and so has found all its blocks in the pool."""
        self.hold(slot)
        name = self._names[slot]
        assert name is not None, "a request goes on from a snapshot only"
        self._ahead.discard(name)

    def release(self, slot: int) -> None:
        """Give back one reference."""
        assert self._ref_counts[slot] > 0, f"state {slot} released more often than held"
        self._ref_counts[slot] -= 1
        self._free_unused(slot)

    def keep(self, slot: int, path: Sequence[BlockHash], *, is_ahead: bool = False, is_told: bool = True) -> bool:
        """Make a held state a snapshot, named by the last block of its path; False, and only noted as used, if there is
        one of this name. `is_ahead`: blocks of its path are still to come; `is_told`: False, `tell` will follow, or the
        snapshot goes soon."""
        assert self._ref_counts[slot] > 0 and path
        name = path[-1]
        if name in self._slots:
            self._slots.move_to_end(name)
            return False
        assert self._names[slot] is None, "a state is behind one block only"
        self._slots[name], self._names[slot] = slot, name
        state = state_hash(name)
        self._named_after[state] = name
        self._untold.add(name)
        if is_told:
            self.tell(name)
        if is_ahead:
            self._ahead.add(name)
        child: BlockHash | None = None
        for index in range(len(path) - 1, -1, -1):
            block_hash = path[index]
            is_known = self.is_on_path(block_hash)
            if not is_known:
                self._blocks[block_hash] = _PathBlock(path[index - 1] if index else None)
            if child is not None:
                self._blocks[block_hash].children.add(child)
            # Whatever is before a block of a path is on the path as well.
            if is_known:
                break
            child = block_hash
        # The new one is held, so it is never the one that goes.
        if len(self._slots) > self._most_snapshots:
            self._drop_oldest()
        return True

    def tell(self, name: BlockHash) -> None:
        """Have other processes know of a snapshot, if there is one of this name that they do not know."""
        if name in self._untold:
            self._untold.remove(name)
            self._came.append(state_hash(name))

    def drop(self, name: BlockHash, reason: EvictionReason) -> None:
        """Forget a snapshot; its holders keep the state."""
        slot = self._slots.pop(name)
        self._names[slot] = None
        self._ahead.discard(name)
        state = state_hash(name)
        del self._named_after[state]
        if name not in self._untold:
            self._gone.append((state, reason))
        self._untold.discard(name)
        at: BlockHash | None = name
        # Up to the first block that another snapshot needs, as its own or on the way to it.
        while at is not None and at not in self._slots and not self._blocks[at].children:
            parent = self._blocks.pop(at).parent
            if parent is not None:
                self._blocks[parent].children.remove(at)
            at = parent
        self._free_unused(slot)

    def block_gone(self, block_hash: BlockHash, reason: EvictionReason) -> None:
        """Forget the snapshots that are of no use without a block."""
        pending = [block_hash] if self.is_on_path(block_hash) else []
        names: list[BlockHash] = []
        while pending:
            at = pending.pop()
            pending += self._blocks[at].children
            if self.has(at):
                names.append(at)
        # Sorted, as the order in a set of children differs from run to run.
        for name in sorted(names):
            self.drop(name, reason)

    def reset(self) -> None:
        """Forget the snapshots that came before some of their blocks: no block that goes takes these along."""
        # Sorted, as the order in a set differs from run to run.
        for name in sorted(self._ahead):
            self.drop(name, EvictionReason.RESET)

    def hashes(self) -> list[BlockHash]:
        """The names of the snapshots that other processes are told of, as they hear them."""
        return [state for state, name in self._named_after.items() if name not in self._untold]

    def drain_journal(self) -> tuple[list[BlockHash], list[tuple[BlockHash, EvictionReason]]]:
        """Snapshots that came and that went since the last call, as `BlockPool.drain_journal`."""
        told = {*self.hashes()} if self._came or self._gone else set()
        # A snapshot may have come, gone and come again: only what is here now counts.
        came = [state for state in self._came if state in told]
        gone = [each for each in self._gone if each[0] not in told]
        self._came, self._gone = [], []
        return came, gone

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Assert that every slot is in one state; `held`: all references."""
        free = set(self._free)
        assert len(free) == len(self._free), "a state is free twice"
        for slot, name in enumerate(self._names):
            in_use = self._ref_counts[slot] > 0 or name is not None
            assert in_use != (slot in free), f"state {slot} is lost, or free and in use"
            assert name is None or self._slots[name] == slot
        assert len(self._slots) == sum(name is not None for name in self._names)
        assert self._named_after == {state_hash(name): name for name in self._slots}
        assert self._ahead <= self._slots.keys() and self._untold <= self._slots.keys()
        children: dict[BlockHash, set[BlockHash]] = {}
        for name in self._slots:
            at: BlockHash | None = name
            child: BlockHash | None = None
            while at is not None:
                children.setdefault(at, set()).update(() if child is None else (child,))
                at, child = self._blocks[at].parent, at
        assert children == {block_hash: block.children for block_hash, block in self._blocks.items()}
        if held is not None:
            counts = [0] * self.num_slots
            for slot in held:
                counts[slot] += 1
            assert counts == self._ref_counts, "references of states differ from the holders"

    def _drop_oldest(self) -> bool:
        """Drop the least recently used snapshot without a holder; False if there is none."""
        # Held ones stay: somebody reads them, and their slots would not become free.
        idle = next((name for name, slot in self._slots.items() if not self._ref_counts[slot]), None)
        if idle is not None:
            self.drop(idle, EvictionReason.FULL)
        return idle is not None

    def _free_unused(self, slot: int) -> None:
        if not self._ref_counts[slot] and self._names[slot] is None:
            self._free.append(slot)
