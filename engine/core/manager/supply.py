"""Assigns a producer to each awaited block, and a replacement when it fails or stalls.

A *producer* is the admitted request that is about to compute the block, or the worker that was asked to export the
block.

| the producer | the block goes to |
|---|---|
| ends, dies, or loses the block | a worker that holds the block; else the earliest request in need; else nobody |
| cannot send | the earliest request in need; else nobody (asking a holder again could fail for ever) |
| stalls | the earliest request in need on another worker; else the stalled producer keeps the block |
| is, or computes at, a worker that the ingress of a request which needs the block cannot reach | as if it stalled |

A request in need is an admitted one whose worker lacks the block. A request that takes over gets `Lost` for the block,
so its worker computes instead of waiting; all others wait on. With nobody to take over, `Lost` goes to every waiting
worker.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from raydix.engine.core.manager.block_index import BlockIndex, BlockRecord, Segment
from raydix.engine.core.manager.instructions import Export, Instruction, Lost
from raydix.engine.core.types import BlockHash


@dataclass(slots=True, eq=False)
class _Worker:
    """A registered worker, as the producer of the blocks that it was asked to export."""

    worker_id: str
    promised: dict[BlockHash, None] = field(default_factory=dict)
    """Blocks, in order, with the worker as their producer."""
    prefills: dict[str, "_Prefill"] = field(default_factory=dict)
    """The requests placed here, by id, in order of admission."""
    silent_since: float | None = None
    """Time since which some of `promised` are awaited and none has come, as noted by `replace_stalled`."""
    has_sealed: bool = False
    """True if the worker has sealed a block since the last call of `replace_stalled`."""


@dataclass(slots=True, eq=False)
class _Prefill:
    """An admitted request, as the producer of the blocks that it is about to compute."""

    request_id: str
    worker: _Worker | None
    """None once the worker is gone: the request computes nothing more."""
    awaited: Sequence[BlockHash]
    """Blocks of the prompt that others were to send to the worker, as known at the admission."""
    promised: dict[BlockHash, None]
    """Blocks, in order, with the request as their producer."""
    lacking: dict[BlockHash, None]
    """Blocks, in order, that the worker did not hold at the admission; empty once the prefill is done."""
    is_awaited: bool = False
    """True if a worker may await some of `promised`."""
    silent_since: float | None = None
    """Time as in `_Worker.silent_since`; None while the request awaits blocks itself."""


class _Prefills(dict[str, _Prefill]):
    """The admitted requests by id, in order of admission, and which of them lacks a block."""

    def __init__(self, blocks: BlockIndex) -> None:
        super().__init__()
        self._blocks = blocks

    def first_lacking(self, block_hash: BlockHash, but_not_at: _Worker | None = None) -> _Prefill | None:
        """The earliest admitted request that could compute a block and whose worker does not hold the block."""
        held_by = self._blocks[block_hash].workers
        # In order of admission, so that requests wait for earlier ones only.
        for prefill in self.values():
            if block_hash not in prefill.lacking or prefill.worker is None or prefill.worker is but_not_at:
                continue
            if prefill.worker.worker_id not in held_by:
                return prefill
        return None

    def lacked_elsewhere(self, promised: Mapping[BlockHash, _Worker]) -> list[BlockHash]:
        """The blocks that requests on workers other than the promising one lack (`promised`: worker by block).

        One walk over the requests for all blocks, since mostly none is lacked.
        """
        lacked: set[BlockHash] = set()
        for prefill in self.values() if promised else ():
            common = prefill.lacking.keys() & promised.keys()
            lacked.update(h for h in common if promised[h] is not prefill.worker)
        return [block_hash for block_hash in promised if block_hash in lacked]

    def is_waiting(self, prefill: _Prefill, worker_id: str) -> bool:
        """True if the request's worker awaits blocks of the prompt that others are to send."""
        for block_hash in prefill.awaited:
            record = self._blocks.get(block_hash)
            if record is None or block_hash not in prefill.lacking or block_hash in prefill.promised:
                continue
            if worker_id in record.awaited_by or (record.segment and worker_id in record.segment.requested_by):
                return True
        return False


class Supply:
    """The producers of the cluster's blocks. Events come in, and instructions go out.

    Writes the producer and the waiting workers of block records, and nothing else of others.
    """

    def __init__(self, blocks: BlockIndex) -> None:
        self._blocks = blocks
        self._workers: dict[str, _Worker] = {}
        self._prefills = _Prefills(blocks)

    # Workers and requests come and go

    def worker_joined(self, worker_id: str) -> None:
        self._workers[worker_id] = _Worker(worker_id)

    def worker_left(self, worker_id: str, held: Iterable[BlockHash]) -> list[Instruction]:
        """A worker is gone, with its promises and those of the requests placed there. `held`: the blocks that have left
        its pool."""
        worker = self._workers.pop(worker_id)
        # Its own promises, and those of the requests placed there, which compute nothing more.
        promises = [worker.promised]
        for prefill in worker.prefills.values():
            promises.append(prefill.promised)
            prefill.worker, prefill.promised, prefill.lacking, prefill.is_awaited = None, {}, {}, False

        abandoned = list(chain.from_iterable(promises))
        self._blocks.promises_ended(abandoned)
        return self.fail([*held, *abandoned])

    def admitted(
        self,
        request_id: str,
        worker_id: str,
        *,
        awaited: Sequence[BlockHash],
        lacking: dict[BlockHash, None],
        computed: Iterable[BlockHash],
    ) -> None:
        """A request computes at a worker. `lacking`: its blocks that the worker does not hold; `awaited`: the ones that
        others are to send; `computed`: the ones for the request to compute, of which others may compute some."""
        worker = self._workers[worker_id]
        promised = self._blocks.promised(computed, request_id)
        prefill = _Prefill(request_id, worker, awaited, promised, lacking)
        self._prefills[request_id] = worker.prefills[request_id] = prefill

    def prefill_done(self, request_id: str) -> None:
        """A request takes over no more blocks: its prompt is computed."""
        self._prefills[request_id].lacking.clear()

    def request_ended(self, request_id: str) -> list[Instruction]:
        """A request computes no more."""
        instructions = self.computes_no_more(request_id)
        prefill = self._prefills.pop(request_id)
        if prefill.worker is not None:
            del prefill.worker.prefills[request_id]
        return instructions

    def computes_no_more(self, request_id: str) -> list[Instruction]:
        """A request computes no more blocks, and stays.

        Its worker may hold blocks that are not reported yet. The worker is asked to export the awaited ones, and
        answers with the hashes of missing blocks (`Stock.export_failed`).
        """
        prefill = self._prefills[request_id]
        prefill.lacking.clear()
        if not prefill.promised or prefill.worker is None:
            return []
        abandoned, prefill.promised = prefill.promised, {}
        awaited = self._blocks.promises_ended(abandoned)
        # The worker may hold these blocks unreported, so it is asked before anybody computes them again.
        self._ask(prefill.worker, awaited)
        self._blocks.forget_unknown(abandoned)
        return [Export(prefill.worker.worker_id, tuple(awaited))] if awaited else []

    # Blocks are asked for, and come or fail

    def arrange(self, worker_id: str, hashes: Sequence[BlockHash]) -> tuple[list[Segment], list[Export]]:
        """Arrange that a worker gets `hashes`: returns the segments to lease and deliver, and exports by other workers.
        Blocks with a producer come when they are ready."""
        segments: dict[int, Segment] = {}
        exports: dict[str, list[BlockHash]] = {}
        producers: set[str] = set()
        for block_hash, record in zip(hashes, self._blocks.awaited(hashes, frozenset((worker_id,))), strict=True):
            # A segment has the block now, else a producer is at work, else a holder has to be asked.
            if record.segment is not None:
                segments[record.segment.segment_id] = record.segment
            elif record.producer is not None:
                producers.add(record.producer)
            elif record.workers:
                exports.setdefault(self._ask_holder(block_hash, record), []).append(block_hash)

        for prefill in map(self._prefills.get, producers):
            if prefill is not None:
                prefill.is_awaited = True
        return [*segments.values()], [Export(holder, tuple(held)) for holder, held in exports.items()]

    def ask(self, worker_id: str, hashes: Iterable[BlockHash]) -> Export:
        """Ask a worker to export blocks without a producer."""
        asked = tuple(hashes)
        self._ask(self._workers[worker_id], asked)
        return Export(worker_id, asked)

    def sealed(
        self, worker_id: str, hashes: Sequence[BlockHash], records: Sequence[BlockRecord]
    ) -> tuple[BlockHash, ...]:
        """A worker holds new blocks. Returns the ones that other workers await: the worker is asked to export them."""
        worker = self._workers[worker_id]
        worker.has_sealed |= bool(hashes)
        asked: list[BlockHash] = []
        for block_hash, record in zip(hashes, records, strict=True):
            # A request that computes has kept its promise with the sealed block. A worker that was asked has not
            # exported yet.
            if record.producer in self._prefills:
                self._produced(block_hash, record)
            if record.awaited_by and record.producer is None:
                asked.append(block_hash)
        self._ask(worker, asked)
        return tuple(asked)

    def exported(self, hashes: Iterable[BlockHash]) -> set[str]:
        """Blocks have come in a segment; returns the workers that awaited some of them."""
        receivers: set[str] = set()
        for block_hash in hashes:
            record = self._blocks.get(block_hash)
            if record is not None:
                receivers |= record.awaited_by
                # All that waited get the segment by `DeliverSegment`.
                record.wait_ended(record.awaited_by)
                self._produced(block_hash, record)
        return receivers

    def take_back(self, worker_id: str, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Clear a worker as the producer of `hashes`; returns the hashes that the worker had been asked to export."""
        promised = self._workers[worker_id].promised
        asked = [block_hash for block_hash in hashes if block_hash in promised]
        for block_hash in asked:
            self._produced(block_hash, self._blocks[block_hash])
        return asked

    def unread(self, hashes: Iterable[BlockHash], waiting: frozenset[str]) -> list[Instruction]:
        """Workers that waited for a segment await these blocks instead, from elsewhere."""
        hashes = list(hashes)
        for block_hash in hashes:
            record = self._blocks.added(block_hash)
            record.awaited(waiting - record.workers)
            if (prefill := self._prefills.get(record.producer or "")) is not None:
                prefill.is_awaited = True
        return self.fail(hashes)

    def fail(self, hashes: Iterable[BlockHash], *, asks_holders: bool = True) -> list[Instruction]:
        """Replace the missing producers of awaited blocks, as in the table above, and forget the blocks of which
        nothing is known any more; blocks with a producer are skipped.

        The earliest admitted request takes over: requests then wait for earlier ones only, never in a circle.
        `asks_holders`: False after an export that failed.
        """
        hashes = list(hashes)
        exports: dict[str, list[BlockHash]] = {}
        lost: dict[str, list[BlockHash]] = {}
        for block_hash, record in zip(hashes, self._blocks.find(hashes), strict=True):
            # Nobody waits, or somebody is at it already.
            if record is None or record.producer is not None or not record.awaited_by:
                continue
            if record.workers and asks_holders:
                exports.setdefault(self._ask_holder(block_hash, record), []).append(block_hash)
                continue
            for worker_id in self._give_to_first_lacking(block_hash, record):
                lost.setdefault(worker_id, []).append(block_hash)

        self._blocks.forget_unknown(hashes)
        return [
            *(Export(worker_id, tuple(held)) for worker_id, held in exports.items()),
            *(Lost(worker_id, tuple(missing)) for worker_id, missing in lost.items()),
        ]

    # Time passes

    def replace_stalled(self, now: float, patience_s: float) -> list[Instruction]:
        """Replace producers of awaited blocks that have sent none of them for `patience_s`. `now`: monotonic seconds.

        To be called several times within `patience_s`. Not stalled: a request that awaits blocks itself, a request
        whose worker has sealed other blocks since the last call, and a request whose blocks no other worker could
        compute (a decode worker that waits for its own prefill times out instead).
        """
        senders: list[tuple[_Worker | _Prefill, _Worker]] = [(worker, worker) for worker in self._workers.values()]
        for prefill in self._prefills.values():
            if prefill.is_awaited and prefill.worker is not None:
                senders.append((prefill, prefill.worker))

        stalled: dict[BlockHash, tuple[_Worker, dict[BlockHash, None]]] = {}
        for sender, worker in senders:
            awaited = next((h for h in sender.promised if self._blocks[h].awaited_by), None)
            if isinstance(sender, _Prefill):
                # A look at all promises is dear, so it is made only where a worker may wait.
                sender.is_awaited = awaited is not None
                if worker.has_sealed or self._prefills.is_waiting(sender, worker.worker_id):
                    awaited = None
            if awaited is None:
                sender.silent_since = None
            # The first look at a silence starts its time.
            elif sender.silent_since is None:
                sender.silent_since = now
            elif now - sender.silent_since >= patience_s:
                sender.silent_since = None
                stalled[awaited] = worker, sender.promised

        for worker in self._workers.values():
            worker.has_sealed = False
        instructions: list[Instruction] = []
        for awaited in self._prefills.lacked_elsewhere({block: worker for block, (worker, _) in stalled.items()}):
            worker, promised = stalled[awaited]
            if awaited in promised and self._prefills.first_lacking(awaited, but_not_at=worker) is not None:
                instructions += self._replace(worker, promised)
        return instructions

    def pass_over(self, worker_ids: Iterable[str], hashes: Iterable[BlockHash]) -> list[Instruction]:
        """Replace some workers as the producers of the awaited ones of `hashes`, as if they had stalled: a request's
        ingress does not reach them. Where only the ingress is cut off, their blocks are computed twice; where they
        stand still, the request would have waited for `replace_stalled`."""
        instructions: list[Instruction] = []
        for worker in filter(None, map(self._workers.get, worker_ids)):
            promised = set(chain(worker.promised, *(prefill.promised for prefill in worker.prefills.values())))
            if needed := [block_hash for block_hash in hashes if block_hash in promised]:
                instructions += self._replace(worker, needed)
        return instructions

    # Checks

    def is_sending(self, worker_id: str) -> bool:
        """True if a registered worker has not sent every block that it was asked to export."""
        return bool(self._workers[worker_id].promised)

    @property
    def num_asked(self) -> int:
        """Blocks that workers are asked to export and have not sent yet."""
        return sum(len(worker.promised) for worker in self._workers.values())

    def check_integrity(self, workers: Iterable[str], requests: Iterable[str]) -> None:
        """Assert that promises and records agree, and that all workers and requests are known."""
        assert self._workers.keys() == set(workers)
        assert list(self._prefills) == list(requests), "requests out of order"
        promised: dict[BlockHash, str] = {}
        senders: dict[str, _Worker | _Prefill] = {**self._workers, **self._prefills}
        for name, sender in senders.items():
            assert not promised.keys() & sender.promised.keys(), "a block with two producers"
            promised.update(dict.fromkeys(sender.promised, name))
        assert promised == {h: record.producer for h, record in self._blocks.items() if record.producer is not None}

        for prefill in self._prefills.values():
            assert prefill.worker is None or prefill.worker.prefills[prefill.request_id] is prefill
            assert prefill.is_awaited or not any(self._blocks[h].awaited_by for h in prefill.promised)
        for worker in self._workers.values():
            assert all(self._prefills[name].worker is worker for name in worker.prefills)

    # Inside

    def _ask(self, worker: _Worker, hashes: Collection[BlockHash]) -> None:
        self._blocks.asked(hashes, worker.worker_id)
        worker.promised.update(dict.fromkeys(hashes))

    def _ask_holder(self, block_hash: BlockHash, record: BlockRecord) -> str:
        """Ask one of the workers that hold a block to export it; returns the worker."""
        # Any holder would do; the least name makes a run repeat itself.
        holder = min(record.workers)
        self._ask(self._workers[holder], [block_hash])
        return holder

    def _produced(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """Clear the producer of a block: the block is there, or its producer has given up."""
        name = record.producer or ""
        sender = self._workers.get(name) or self._prefills.get(name)
        if sender is not None:
            sender.promised.pop(block_hash, None)
            sender.silent_since = None
            record.promise_ended()

    def _give_to_first_lacking(self, block_hash: BlockHash, record: BlockRecord) -> list[str]:
        """Have the first request in need compute an awaited block; returns the registered workers that are to be told
        that the block will not come: the request's own, or all waiting ones if no request is in need."""
        # All waiting workers are told where nobody takes over; else only the worker of the successor, which computes.
        told = record.awaited_by
        successor = self._prefills.first_lacking(block_hash)
        if successor is not None and successor.worker is not None:
            successor.promised[block_hash] = None
            successor.is_awaited = True
            record.promised(successor.request_id)
            told = told & {successor.worker.worker_id}
        record.wait_ended(told)
        return sorted(told & self._workers.keys())

    def _replace(self, worker: _Worker, promised: Iterable[BlockHash]) -> list[Instruction]:
        """Take awaited blocks away from a stalled worker, or a request on a stalled worker.

        Other requests on the worker that lack these blocks are likely to stand still as well, and will wait for a later
        request. So they do not take over, and the blocks that they were to compute are replaced too; otherwise requests
        could wait in a circle.
        """
        needed = [h for h in promised if worker.worker_id not in self._blocks[h].workers]
        behind = [prefill for prefill in worker.prefills.values() if not prefill.lacking.keys().isdisjoint(needed)]
        given_up = dict.fromkeys(chain(promised, *(prefill.promised for prefill in behind)))
        for prefill in behind:
            prefill.lacking.clear()
        replaced = [h for h in given_up if self._blocks[h].awaited_by and self._prefills.first_lacking(h) is not None]
        for block_hash in replaced:
            self._produced(block_hash, self._blocks[block_hash])
        return self.fail(replaced, asks_holders=False)
