"""Execution of what the directory decides: calls of workers, reads and writes of files."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from ray.exceptions import RayError

from raydix.actors.calls import quietly
from raydix.actors.manager.decision_spans import note_instruction
from raydix.actors.manager.disk_tier import DiskTier
from raydix.actors.messages import Imported
from raydix.actors.rpc import WorkerClient
from raydix.actors.tracing import Recorder
from raydix.engine.background import Background
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.instructions import (
    DamagedFileError,
    DeliverSegment,
    DiskInstruction,
    EraseFile,
    Export,
    HandoverLost,
    Instruction,
    Lost,
    ReadFile,
    WriteFile,
)

logger = logging.getLogger(__name__)

SAVE_S = 1.0  # interval between two searches for blocks that are not on their way to disk
NUM_STALL_CHECKS = 8  # checks for stalled producers in each `await_timeout_s`


class Executor:
    """Carries out the instructions of a directory, and tells the directory about the outcome."""

    def __init__(self, directory: Directory, disk: DiskTier | None, background: Background, recorder: Recorder) -> None:
        """Instructions are recorded while a trace is (`recorder`)."""
        self._directory = directory
        self._recorder = recorder
        self._disk = disk
        self._background = background
        # Segments on their way to workers, apart from other tasks, since a reset waits for these.
        self._deliveries = Background()
        self._clients: dict[str, WorkerClient] = {}

    @property
    def clients(self) -> Mapping[str, WorkerClient]:
        """The registered workers' clients, by worker."""
        return self._clients

    def worker_joined(self, worker_id: str, client: WorkerClient) -> None:
        """Call a worker by this client from now on."""
        self._clients[worker_id] = client

    def worker_left(self, worker_id: str) -> None:
        """Call a worker no more."""
        del self._clients[worker_id]

    async def deliveries_ended(self, timeout_s: float) -> None:
        """Wait for the deliveries under way, for at most `timeout_s`."""
        await self._deliveries.ended(timeout_s)

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Begin what the directory has decided. Nothing here waits: each call and each file has a task."""
        for instruction in instructions:
            # A delivery is recorded with its time, at its end.
            if self._recorder.is_on and not isinstance(instruction, DeliverSegment):
                note_instruction(self._recorder, instruction, time.monotonic())
            match instruction:
                case DeliverSegment(worker_id=worker_id):
                    self._deliveries.start(self._deliver(instruction, self._clients[worker_id]))
                case Export(worker_id=worker_id, hashes=hashes):
                    self._background.start(quietly(self._clients[worker_id].export_blocks(hashes)))
                case Lost(worker_id=worker_id, hashes=hashes):
                    self._background.start(quietly(self._clients[worker_id].blocks_lost(hashes)))
                case HandoverLost(worker_id=worker_id, request_id=request_id):
                    self._background.start(quietly(self._clients[worker_id].stop_awaiting([request_id])))
                case _:
                    self._background.start(self._use_disk(instruction))

    async def _deliver(self, instruction: DeliverSegment, client: WorkerClient) -> None:
        """Hand a segment to a worker, and note the time of the import; after a failure, the segment is promised from
        this source to no other worker."""
        worker_id, segment, began_at = instruction.worker_id, instruction.segment, time.monotonic()
        header, node = segment.header, segment.node
        # By the link's measured pace: a fetch that takes much longer is given up, and the blocks are computed.
        patience_s = self._directory.fleet.patience_s(worker_id, node, header.num_bytes, time.time())
        try:
            report = await client.import_segment(header, [] if segment.ref is None else [segment.ref], patience_s)
        except RayError as error:  # the worker is gone; its stream tells
            logger.debug("segment not delivered: %s", type(error).__name__)
            self._note_delivery(instruction, began_at, "worker gone")
            return
        self._note_delivery(instruction, began_at, report.fate.name)
        if report.fate is Imported.TAKEN:
            self._directory.stock.moves.add(segment.exporter, worker_id, len(header.hashes), header.num_bytes)
        # The worker computes what it lacks; here it matters that nobody else is sent to the same source.
        if report.fate is Imported.NOT_FETCHED:
            self._directory.stock.segments.undelivered(segment, time.time())
        elif report.fate is Imported.DAMAGED:
            self.carry_out(self._directory.stock.lost(segment.segment_id, time.time()))
        if report.seconds is not None:
            self._directory.fleet.imported(worker_id, node, header.num_bytes, report.seconds, time.time())

    def _note_delivery(self, instruction: DeliverSegment, began_at: float, fate: str) -> None:
        if self._recorder.is_on:
            seconds = time.monotonic() - began_at
            note_instruction(self._recorder, instruction, began_at, seconds, {"fate": fate})

    async def _use_disk(self, instruction: DiskInstruction) -> None:
        assert self._disk is not None
        match instruction:
            case WriteFile(segment=segment):
                written = await self._disk.write(segment)
                self.carry_out(self._directory.stock.segments.written(segment.segment_id, written, time.time()))
            case ReadFile(segment=segment):
                self.carry_out(await self._read(self._disk, segment))
            case EraseFile(header=header):
                await self._disk.erase(header)

    async def _read(self, disk: DiskTier, segment: Segment) -> list[Instruction]:
        """Read a segment from disk. Its file is dropped only if damaged."""
        try:
            ref = await disk.read(segment.header)
        except DamagedFileError:
            return self._directory.stock.lost(segment.segment_id, time.time())
        if ref is None:
            return self._directory.stock.unread(segment, time.time())
        return self._directory.stock.read(segment.segment_id, ref, time.time())

    async def save_blocks(self) -> None:
        """Write blocks to disk that workers would not export by themselves, again and again."""
        while True:
            await asyncio.sleep(SAVE_S)
            self.carry_out(self._directory.save())

    async def replace_stalled(self, await_timeout_s: float) -> None:
        """Replace producers that have sent none of the awaited blocks for `await_timeout_s`, again and again."""
        while True:
            await asyncio.sleep(await_timeout_s / NUM_STALL_CHECKS)
            instructions = list(self._directory.stock.supply.replace_stalled(time.monotonic(), await_timeout_s))
            if instructions:
                logger.warning(
                    "blocks did not come in %g s; %d instructions to compute them elsewhere",
                    await_timeout_s,
                    len(instructions),
                    extra=about("stalled", instructions=len(instructions)),
                )
            self.carry_out(instructions)
