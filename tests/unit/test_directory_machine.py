"""Whatever workers and requests do, in whatever order: the directory's books agree, and it keeps its promises.

The workers here are dictionaries: what their pools hold, which exports they were asked for, and which blocks they were
promised and neither got nor were told to forget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import NoWorkerError
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.instructions import (
    DeliverSegment,
    EraseFile,
    Export,
    Instruction,
    Lost,
    ReadFile,
    WriteFile,
)
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.manager.turns import PausedError, TurnLimits
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import (
    Admission,
    AdmitRequest,
    BlockHash,
    CacheHints,
    EvictionReason,
    Handover,
    Retention,
    Role,
    SegmentHeader,
)

BLOCK_SIZE = 4
BLOCK_BYTES = 10
WORKERS = ["w0", "w1", "w2", "w3"]
IMPORT_S = 0.5
"""Time of each import, which is far more than computing takes."""
PATIENCE_S = 30.0


def chain(path: Iterable[int]) -> tuple[BlockHash, ...]:
    """Hashes of a prefix tree: the hash of a block spells the way to it."""
    path = tuple(path)
    return tuple(bytes([*path[: count + 1]]) for count in range(len(path)))


TENANTS = (Tenant("a", cache_min=0.5), Tenant("b", cache_max=0.25))
HINTS = st.builds(
    CacheHints, st.sampled_from(["a", "b", "c"]), st.integers(-1, 1), st.one_of(st.none(), st.integers(1, 5))
)
PATHS = st.lists(st.integers(0, 1), max_size=4).map(chain)
ANY_BLOCKS = st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=4).map(bytes), max_size=4)

NUM_BLOCKS = 8
"""Blocks of a worker's pool as it reports them: room for one or two sessions."""


@dataclass
class FakeWorker:
    """One incarnation. `orders` are the exports it was asked for and has not answered."""

    role: Role
    epoch: int
    pool: set[BlockHash] = field(default_factory=set)
    unreported: set[BlockHash] = field(default_factory=set)
    orders: list[tuple[BlockHash, ...]] = field(default_factory=list)
    owed: set[BlockHash] = field(default_factory=set)


@dataclass
class Admitted:
    """A live request. `leased` are the segments that it was sent when it was admitted."""

    request: AdmitRequest
    admission: Admission
    leased: list[Segment]
    num_done: int = 0


class DirectoryMachine(RuleBasedStateMachine):
    """One directory, up to four workers and their requests."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, FakeWorker] = {}
        self.last_epoch: dict[str, int] = {}
        self.admitted: dict[str, Admitted] = {}
        self.paused: dict[str, AdmitRequest] = {}
        """Requests that wait for their sessions' turns."""
        self.num_requests = 0
        self.now = 0.0
        self.epoch_s = 0.0
        self.writing: list[Segment] = []
        self.reading: list[Segment] = []

    @initialize(
        budget_blocks=st.integers(0, 8),
        disk_blocks=st.integers(0, 8),
        files=st.lists(PATHS.filter(bool), max_size=3),
        import_bytes_per_s=st.sampled_from([1e9, 1e9, 1.0]),
        workers=st.lists(st.sampled_from(Role), min_size=1, max_size=4),
    )
    def build(
        self,
        budget_blocks: int,
        disk_blocks: int,
        files: list[tuple[BlockHash, ...]],
        import_bytes_per_s: float,
        workers: list[Role],
    ) -> None:
        costs = CostModel(BLOCK_SIZE, piggyback_tokens=0, prior=WorkerCosts(import_byte_s=1 / import_bytes_per_s))
        self.directory = Directory(
            costs,
            budget_blocks * BLOCK_BYTES,
            disk_blocks * BLOCK_BYTES,
            TENANTS,
            node="a",
            turns=TurnLimits(quantum_s=4.0),
        )
        headers = [SegmentHeader("model", path, len(path) * BLOCK_BYTES, 0) for path in files]
        self._carry_out(self.directory.stock.segments.files_found(headers, self.epoch_s))
        for worker_id, role in zip(WORKERS, workers, strict=False):
            self._register(worker_id, role, 1, set())

    # Workers

    @rule(worker_id=st.sampled_from(WORKERS), role=st.sampled_from(Role), blocks=ANY_BLOCKS)
    def start_worker(self, worker_id: str, role: Role, blocks: set[BlockHash]) -> None:
        """A first incarnation, or one that takes over from another."""
        self._register(worker_id, role, self.last_epoch.get(worker_id, 0) + 1, blocks)

    @rule(tpot_s=st.sampled_from([None, 1e-3, 0.05]))
    def divide(self, tpot_s: float | None) -> None:
        """Look at the load of the elastic workers."""
        self.directory.change_limits(
            0, self.directory.costs.prior, TENANTS, Objectives(ttft_s=1.0, tpot_s=tpot_s), self.directory.turns.limits
        )
        plan = self.directory.fleet.divide(self.directory.objectives, self.epoch_s)
        elastic = [worker for worker in self.directory.fleet.elastic if not worker.is_leaving]
        assert (plan is None) == (not elastic)
        if plan is not None and plan.division.is_split:
            duties = [worker.duty for worker in elastic]
            assert (duties.count(Role.PREFILL), duties.count(Role.DECODE)) == plan.division

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), comes_back=st.booleans(), is_silent=st.booleans())
    def lose_worker(self, data: st.DataObject, comes_back: bool, is_silent: bool) -> None:
        """It dies, or is cut off, or the same incarnation registers again because it had lost touch."""
        worker_id, worker = self._draw_worker(data)
        if comes_back:
            self._register(worker_id, worker.role, worker.epoch, worker.pool)
        else:
            del self.workers[worker_id]
            if is_silent:
                self._carry_out(self.directory.worker_silent(worker_id, self.epoch_s))
                self._forget_exports_of(worker_id)
            else:
                self._carry_out(self.directory.remove_worker(worker_id, worker.epoch))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), blocks=ANY_BLOCKS)
    def an_older_incarnation_speaks(self, data: st.DataObject, blocks: set[BlockHash]) -> None:
        """Whatever it says is ignored."""
        worker_id, worker = self._draw_worker(data)
        epoch, header = worker.epoch - 1, SegmentHeader("model", tuple(blocks), len(blocks) * BLOCK_BYTES, 0)
        before = self._sizes()
        evicted = [(block, EvictionReason.FULL) for block in blocks]
        said: list[Instruction] = [
            *self.directory.register(worker_id, Role.MIXED, epoch, BLOCK_BYTES, blocks),
            *self.directory.blocks_changed(worker_id, epoch, blocks, evicted),
            *self.directory.segment_exported(worker_id, epoch, header, None, self.epoch_s),
            *self.directory.export_failed(worker_id, epoch, blocks),
            *self.directory.blocks_unsent(worker_id, epoch, blocks),
            *self.directory.remove_worker(worker_id, epoch),
        ]
        assert said == [] and self._sizes() == before
        assert self.directory.fleet.current(worker_id, worker.epoch) is not None

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), blocks=ANY_BLOCKS)
    def seal(self, data: st.DataObject, blocks: set[BlockHash]) -> None:
        worker_id, worker = self._draw_worker(data)
        worker.pool |= blocks
        worker.unreported |= blocks
        self._report(worker_id)

    @precondition(lambda self: any(worker.pool for worker in self.workers.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        worker_id, worker = self._draw_worker(data)
        evicted = {block for block in sorted(worker.pool) if data.draw(st.booleans())}
        worker.pool -= evicted
        worker.unreported -= evicted
        told = [(block, data.draw(st.sampled_from(EvictionReason))) for block in sorted(evicted)]
        self._carry_out(self.directory.blocks_changed(worker_id, worker.epoch, (), told))

    @precondition(lambda self: any(worker.orders for worker in self.workers.values()))
    @rule(data=st.data(), can_send=st.booleans())
    def export(self, data: st.DataObject, can_send: bool) -> None:
        busy = [worker_id for worker_id, worker in self.workers.items() if worker.orders]
        self._serve_order(data.draw(st.sampled_from(busy)), can_send)
        for worker_id in list(self.workers):
            self._report(worker_id)

    # Requests

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: float) -> None:
        self.epoch_s += seconds

    @rule(path=PATHS, spare=st.integers(1, 40), count=st.integers(1, 3), hints=HINTS)
    def admit(self, path: tuple[BlockHash, ...], spare: int, count: int, hints: CacheHints) -> None:
        for _ in range(count):
            request_id = f"r{self.num_requests}"
            self.num_requests += 1
            num_tokens = len(path) * BLOCK_SIZE + spare
            self._admit(AdmitRequest(request_id, 0, path, num_tokens, cache=hints))

    @precondition(lambda self: self.paused)
    @rule(data=st.data(), leaves=st.booleans())
    def ask_again(self, data: st.DataObject, leaves: bool) -> None:
        """A paused request asks by its id alone, and in full when it may go on; or its client leaves."""
        request_id = data.draw(st.sampled_from(list(self.paused)))
        if leaves:
            del self.paused[request_id]
            assert self.directory.end_request(request_id, self.epoch_s) == []
            assert self.directory.ask_again([request_id], self.epoch_s) == [None]
            return
        before = self._sizes()
        [paused] = self.directory.ask_again([request_id], self.epoch_s)
        assert self._sizes() == before
        if paused is None:
            self._admit(self.paused[request_id])

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), path=PATHS, avoided=st.sets(st.sampled_from(WORKERS)))
    def admit_again(self, data: st.DataObject, path: tuple[BlockHash, ...], avoided: set[str]) -> None:
        """A request that failed over comes back, with more tokens; its ingress may not reach some workers."""
        old = self.admitted[self._draw_request(data)]
        hashes = max(old.request.hashes, path, key=len)
        num_tokens = len(hashes) * BLOCK_SIZE + 1
        request_id, attempt = old.request.request_id, old.request.attempt + 1
        request = AdmitRequest(
            request_id, attempt, hashes, num_tokens, cache=old.request.cache, avoided=tuple(sorted(avoided))
        )
        self._admit(request)
        again = self.admitted.get(request_id)
        if again is not None and self.directory.fleet.keys() - avoided:
            assert not {again.admission.prefill, again.admission.decode} & avoided

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), num_blocks=st.integers(1, 5))
    def prefill(self, data: st.DataObject, num_blocks: int) -> None:
        """The prefill worker computes the next blocks; a split request's are exported, at the end with a handover."""
        known = self.admitted[self._draw_request(data)]
        admission, hashes = known.admission, known.request.hashes
        if known.num_done > len(hashes):
            return
        worker = self.workers.get(admission.prefill)
        if worker is None or worker.epoch != admission.prefill_epoch:
            return
        new = tuple(h for h in hashes[known.num_done : known.num_done + num_blocks] if h not in worker.pool)
        known.num_done += num_blocks
        worker.pool |= set(new)
        worker.unreported |= set(new)
        is_done = known.num_done > len(hashes)
        if admission.decode != admission.prefill and (new or is_done):
            handover = Handover(known.request.request_id, known.request.attempt, 0, b"tail") if is_done else None
            self._export(admission.prefill, new, handover)
        self._report(admission.prefill)
        if is_done:
            self.directory.first_token(known.request.request_id, known.request.attempt, 0.1)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = self._draw_request(data)
        del self.admitted[request_id]
        self._carry_out(self.directory.end_request(request_id, self.epoch_s))
        assert self.directory.end_request(request_id, self.epoch_s) == []

    @precondition(lambda self: len(self.directory.stock.segments) > 0)
    @rule(data=st.data())
    def lose_segment(self, data: st.DataObject) -> None:
        """It is damaged."""
        segments = self.directory.stock.segments._segments
        segment = segments[data.draw(st.sampled_from(sorted(segments)))]
        self._carry_out(self.directory.stock.lost(segment.segment_id, self.epoch_s))
        assert segment.segment_id not in segments
        assert self.directory.stock.lost(segment.segment_id, self.epoch_s) == []
        for known in self.admitted.values():
            known.leased = [leased for leased in known.leased if leased is not segment]

    @precondition(lambda self: self.directory.stock.segments.store_bytes)
    @rule(data=st.data())
    def cannot_fetch_segment(self, data: st.DataObject) -> None:
        """Only what is not on disk may be forgotten."""
        segments = self.directory.stock.segments._segments
        in_store = [segment for segment in segments.values() if segment.is_in_store]
        segment = data.draw(st.sampled_from(in_store))
        self.directory.stock.segments.undelivered(segment, self.epoch_s)
        is_kept = segment.file is not None or segment in self.writing
        assert (segment.segment_id in segments) is is_kept
        for known in self.admitted.values():
            known.leased = [leased for leased in known.leased if leased is not segment]

    # Disk

    @precondition(lambda self: self.writing)
    @rule(succeeds=st.booleans())
    def finish_writing(self, succeeds: bool) -> None:
        self._finish_writing(succeeds)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), succeeds=st.booleans(), is_damaged=st.booleans())
    def finish_reading(self, data: st.DataObject, succeeds: bool, is_damaged: bool) -> None:
        self._finish_reading(data.draw(st.integers(0, len(self.reading) - 1)), succeeds, is_damaged)

    @rule()
    def save(self) -> None:
        self._carry_out(self.directory.save())

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A worker is about to stop; it may be asked for blocks, and is not the end of any request."""
        worker_id, _ = self._draw_worker(data)
        self._carry_out(self.directory.leave(worker_id))

    # Time

    @rule(seconds=st.sampled_from([1.0, PATIENCE_S / 2, PATIENCE_S, PATIENCE_S]))
    def time_passes(self, seconds: float) -> None:
        """Who was to send something and did not is replaced, where that is possible; what it sends is still welcome."""
        for passed in (0.0, seconds):
            self.now += passed
            self._carry_out(self.directory.stock.supply.replace_stalled(self.now, PATIENCE_S))

    # What must always hold

    @invariant()
    def check(self) -> None:
        directory = self.directory
        directory.check_integrity()
        assert directory.fleet.keys() == self.workers.keys()
        assert all(directory.fleet[worker_id].epoch == worker.epoch for worker_id, worker in self.workers.items())
        assert all(worker.queued_us >= 0 for worker in directory.fleet.values())
        assert directory.num_reservations == len(self.admitted)
        kept = list(directory.stock.segments._segments.values())
        for known in self.admitted.values():
            assert all(segment in kept for segment in known.leased), "a leased segment was dropped"
        busy = {id(segment) for segment in self.writing}
        for node in sorted({"a", *directory.fleet.nodes}):
            here = [segment for segment in kept if segment.is_in_store and segment.node == node]
            num_bytes = sum(segment.num_bytes for segment in here)
            is_pinned = all(segment.leases or id(segment) in busy for segment in here)
            assert num_bytes <= directory.stock.segments.store_budget_bytes or is_pinned

    @invariant()
    def check_promises(self) -> None:
        """What a worker waits for, somebody is about to send."""
        for worker_id, worker in self.workers.items():
            for block in worker.owed:
                record = self.directory.stock.blocks.get(block)
                assert record is not None, f"{worker_id} waits for {block!r}, which is forgotten"
                if record.segment in self.reading and worker_id in record.segment.requested_by:
                    continue
                assert worker_id in record.awaited_by
                producer = self.workers.get(record.producer or "")
                assert record.producer in self.admitted or (
                    producer is not None and any(block in order for order in producer.orders)
                ), f"{worker_id} waits for {block!r}, which nobody was asked for"

    def teardown(self) -> None:
        """When all exports are answered and all requests are over, nobody waits and nothing is reserved."""
        if not hasattr(self, "directory"):
            return
        for request_id in list(self.admitted):
            del self.admitted[request_id]
            self._carry_out(self.directory.end_request(request_id, self.epoch_s))
        while any(worker.orders for worker in self.workers.values()):
            for worker_id in [worker_id for worker_id, worker in self.workers.items() if worker.orders]:
                self._serve_order(worker_id)
        while self.reading:
            self._finish_reading(0, succeeds=True)
        while self.writing:
            self._finish_writing(succeeds=True)
        self.check()
        assert not any(worker.owed for worker in self.workers.values())
        assert not any(worker.queued_us or worker.requests for worker in self.directory.fleet.values())
        for worker_id, worker in list(self.workers.items()):
            del self.workers[worker_id]
            self._carry_out(self.directory.remove_worker(worker_id, worker.epoch))
        self.check()
        exported = {
            block for segment in self.directory.stock.segments._segments.values() for block in segment.header.names
        }
        assert len(self.directory.stock.blocks) <= len(exported), "blocks are known that nobody has"

    # Inside

    def _sizes(self) -> tuple[int, ...]:
        directory = self.directory
        return (
            len(directory.stock.blocks),
            len(directory.stock.segments),
            directory.num_reservations,
            len(directory.fleet),
        )

    def _draw_worker(self, data: st.DataObject) -> tuple[str, FakeWorker]:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        return worker_id, self.workers[worker_id]

    def _draw_request(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.admitted)))

    def _forget_exports_of(self, worker_id: str) -> None:
        """What a worker out of reach exported is leased no more; a segment that is being written stays."""
        kept = {id(segment) for segment in self.directory.stock.segments._segments.values()}
        for known in self.admitted.values():
            known.leased = [each for each in known.leased if each.exporter != worker_id or id(each) in kept]

    def _register(self, worker_id: str, role: Role, epoch: int, blocks: set[BlockHash]) -> None:
        self.workers[worker_id] = FakeWorker(role, epoch, set(blocks))
        self.last_epoch[worker_id] = epoch
        node = "a" if worker_id in WORKERS[:2] else "b"
        self._carry_out(self.directory.register(worker_id, role, epoch, BLOCK_BYTES, blocks, node=node))
        self.directory.fleet.measured(worker_id, epoch, None, NUM_BLOCKS, NUM_BLOCKS, num_blocks=NUM_BLOCKS)

    def _report(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        sealed, worker.unreported = worker.unreported, set()
        worker.owed -= sealed
        self._carry_out(self.directory.blocks_changed(worker_id, worker.epoch, sealed, ()))

    def _admit(self, request: AdmitRequest) -> None:
        if not self.workers:
            before = self._sizes()
            with pytest.raises(NoWorkerError):
                self.directory.admit(request, self.epoch_s)
            assert self._sizes() == before
            return
        before = self._sizes()
        try:
            admission, instructions = self.directory.admit(request, self.epoch_s)
        except PausedError as error:
            # Another session may be the next one, and have to ask yet.
            assert request.attempt == 0 and error.paused.num_placed + error.paused.num_ahead > 0
            self.paused[request.request_id] = request
            assert self._sizes() == before, "it may ask again, or never"
            return
        prefill, decode = admission.prefill, admission.decode
        assert admission.prefill_epoch == self.workers[prefill].epoch
        assert admission.decode_epoch == self.workers[decode].epoch
        reachable = self.workers.keys() - request.avoided
        roles = {
            self.workers[each].role for each in reachable - self.directory.fleet.leaving or reachable or self.workers
        }
        assert self.workers[decode].role is not Role.PREFILL or roles == {Role.PREFILL}
        assert set(admission.prefill_awaited + admission.decode_awaited) <= set(request.hashes)
        assert prefill != decode or not admission.decode_awaited
        leased = [instruction.segment for instruction in instructions if isinstance(instruction, DeliverSegment)]
        self.admitted[request.request_id] = Admitted(request, admission, leased)
        self.paused.pop(request.request_id, None)
        self.workers[prefill].owed |= set(admission.prefill_awaited) - self.workers[prefill].pool
        self.workers[decode].owed |= set(admission.decode_awaited) - self.workers[decode].pool
        self._carry_out(instructions)

    def _serve_order(self, worker_id: str, can_send: bool = True) -> None:
        worker = self.workers[worker_id]
        order = worker.orders.pop(0)
        here = tuple(block for block in order if block in worker.pool)
        missing = tuple(block for block in order if block not in worker.pool)
        if here and can_send:
            self._export(worker_id, here, None)
        elif here:
            self._carry_out(self.directory.blocks_unsent(worker_id, worker.epoch, here))
        if missing:
            self._carry_out(self.directory.export_failed(worker_id, worker.epoch, missing))

    def _export(self, worker_id: str, blocks: tuple[BlockHash, ...], handover: Handover | None) -> None:
        hashes = blocks if handover is None or handover.tail is None else (*blocks, handover.tail)
        hints = CacheHints() if handover is None else self.admitted[handover.request_id].request.cache
        retention = Retention(hints.tenant, hints.priority)
        header = SegmentHeader("model", hashes, len(hashes) * BLOCK_BYTES, 0, handover, retention)
        epoch = self.workers[worker_id].epoch
        instructions = self.directory.segment_exported(worker_id, epoch, header, None, self.epoch_s)
        if handover is not None:
            decode = self.admitted[handover.request_id].admission.decode
            assert decode not in self.workers or decode in {
                i.worker_id for i in instructions if isinstance(i, DeliverSegment)
            }
        self._carry_out(instructions)

    def _finish_writing(self, succeeds: bool) -> None:
        segment = self.writing.pop(0)
        full = segment.header.names
        file = SegmentHeader("model", full, len(full) * BLOCK_BYTES, 0) if succeeds else None
        self._carry_out(self.directory.stock.segments.written(segment.segment_id, file, self.epoch_s))

    def _finish_reading(self, index: int, succeeds: bool, is_damaged: bool = False) -> None:
        segment = self.reading.pop(index)
        if succeeds:
            self._carry_out(self.directory.stock.read(segment.segment_id, None, self.epoch_s))
        elif is_damaged:
            self._carry_out(self.directory.stock.lost(segment.segment_id, self.epoch_s))
        else:
            self._carry_out(self.directory.stock.unread(segment, self.epoch_s))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, WriteFile):
                assert instruction.segment.is_in_store
                self.writing.append(instruction.segment)
                continue
            if isinstance(instruction, ReadFile):
                assert instruction.segment not in self.reading, "read twice"
                self.reading.append(instruction.segment)
                continue
            if isinstance(instruction, EraseFile):
                continue
            assert instruction.worker_id in self.workers, "an instruction for a dead worker"
            worker = self.workers[instruction.worker_id]
            match instruction:
                case DeliverSegment(segment=segment):
                    arrived = set(segment.header.names)
                    worker.owed -= arrived
                    worker.unreported |= arrived - worker.pool
                    worker.pool |= arrived
                    num_bytes = segment.header.num_bytes
                    self.directory.fleet.imported(
                        instruction.worker_id, segment.node, num_bytes, IMPORT_S, self.epoch_s
                    )
                case Export(hashes=hashes):
                    worker.orders.append(hashes)
                case Lost(hashes=hashes):
                    worker.owed -= set(hashes)


TestDirectory = pytest.mark.no_cover(DirectoryMachine.TestCase)
TestDirectory.settings = settings(max_examples=250, stateful_step_count=40)
