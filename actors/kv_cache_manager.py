"""The central actor: admits requests, follows every worker's blocks, owns the exported KV, sends it where it is wanted.

A thin shell around `engine.core.directory.Directory`: messages become events, instructions become calls.
"""

import asyncio
import gc
import logging
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.calls import Background, quietly
from actors.disk_tier import DiskTier
from actors.messages import (
    INGRESS_SILENCE_S,
    Ended,
    ExportItem,
    FirstToken,
    Imported,
    Registration,
    WorkerInfo,
    WorkerState,
)
from actors.metrics import ManagerMetrics
from engine.core.block_index import GC_THRESHOLDS, Segment
from engine.core.cache_events import CacheUpdate
from engine.core.cache_report import cache_report
from engine.core.directory import Directory
from engine.core.errors import NoWorkerError
from engine.core.instructions import Deliver, Export, Instruction, Lost
from engine.core.placement import CostModel
from engine.core.segment_store import DamagedFileError, DiskInstruction, EraseFile, ReadFile, WriteFile
from engine.core.tenants import Tenant
from engine.core.transcripts import Found, TranscriptStore
from engine.core.types import Admission, AdmitRequest

logger = logging.getLogger(__name__)

SAVE_S = 1.0
"""How often blocks are looked for that are not on their way to disk."""
NUM_STALL_CHECKS = 8
"""How often in `await_timeout_s` those are looked for who do not send what others wait for."""


@dataclass(slots=True)
class _Ingress:
    """An ingress replica and its admitted requests."""

    seen_at: float = field(default_factory=time.monotonic)
    requests: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    """Requests that it did not name the last time; not to do so twice means that they are over."""


class KVCacheManager:
    """The prefix index of the cluster and the owner of its exported KV."""

    def __init__(
        self,
        costs: CostModel,
        segment_budget_bytes: int,
        transcript_budget_bytes: int,
        await_timeout_s: float,
        disk_budget_bytes: int = 0,
        disk_path: str | None = None,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        """After `await_timeout_s` without a block those who wait for it are not to rely on its sender any more.
        `disk_path` is where segments are kept on disk, if `disk_budget_bytes` is not 0. `tenants`: who is granted how
        much of the object store's and the disk's budgets."""
        gc.set_threshold(*GC_THRESHOLDS)
        self._directory = Directory(costs, segment_budget_bytes, disk_budget_bytes, tenants)
        self._disk = DiskTier(disk_path) if disk_budget_bytes else None
        self._await_timeout_s = await_timeout_s
        self._transcripts = TranscriptStore(transcript_budget_bytes)
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._ingresses: dict[str, _Ingress] = {}
        self._background = Background()
        self._metrics = ManagerMetrics()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers once the manager is up, and knows what is on disk."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_ingresses())
            self._background.start(self._watch_senders())
            if self._disk is not None:
                files = await self._disk.open()
                self._directory.segments.now = time.time()
                self._carry_out(self._directory.segments.files_found(files))
                self._background.start(self._save_blocks())

    async def check(self) -> None:
        """Answers while the manager does not hang."""

    async def join(self) -> None:
        """Never returns: a caller learns of the manager's end by the error that this call then raises."""
        await asyncio.Event().wait()

    # Workers

    async def register(self, registration: Registration, handle: list[ActorHandle[Any]]) -> None:
        """Take up a worker and begin to read its export stream."""
        worker_id, epoch = registration.worker_id, registration.epoch
        current = self._directory.workers.get(worker_id)
        if current is not None and current.epoch > epoch:
            return
        known = self._followers.pop(worker_id, None)
        if known is not None:
            known.cancel()
        self._handles[worker_id] = handle[0]
        self._carry_out(
            self._directory.register(
                worker_id,
                registration.role,
                epoch,
                registration.block_bytes,
                registration.hashes,
                registration.token_budget,
            )
        )
        self._followers[worker_id] = asyncio.create_task(self._follow(worker_id, epoch, handle[0]))
        logger.info("%s registered with %d blocks", worker_id, len(registration.hashes))

    async def heartbeat(self, worker_id: str, epoch: int, state: WorkerState) -> bool:
        """Whether this worker is registered; it reports what it costs and how much room it has."""
        self._directory.worker_measured(worker_id, epoch, state.costs, state.num_free_blocks)
        return self._directory.is_current(worker_id, epoch)

    async def workers(self, ingress_id: str | None = None, active: Sequence[str] = ()) -> list[WorkerInfo]:
        """All registered workers. An ingress replica that asks now and then shows that it is alive, and which of its
        requests are; of the others it forgot to say, or could not, that they ended."""
        if ingress_id is not None:
            ingress = self._ingress(ingress_id)
            ingress.seen_at = time.monotonic()
            missing = ingress.requests.difference(active)
            self._release(ingress, missing & ingress.missing)
            ingress.missing = missing & ingress.requests
        return [WorkerInfo(w.worker_id, w.role, w.epoch) for w in self._directory.workers.values()]

    # Requests

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission | None]:
        """Place requests, each in one atomic step; None for one that no worker could take."""
        admissions: list[Admission | None] = []
        for request in requests:
            try:
                admission, instructions = self._directory.admit(request)
            except NoWorkerError:
                self._carry_out(self._directory.release(request.request_id))
                admissions.append(None)
                continue
            self._carry_out(instructions)
            self._ingress(request.ingress_id).requests.add(request.request_id)
            admissions.append(admission)
        return admissions

    async def settle(self, ingress_id: str, first_tokens: Sequence[FirstToken], ended: Sequence[Ended]) -> None:
        """Requests of an ingress replica got the first token of an attempt; others of its requests ended."""
        for first in first_tokens:
            decision = self._directory.first_token(first.request_id, first.attempt, first.ttft_s)
            if decision is not None:
                self._metrics.first_token(decision)
        for end in ended:
            self._directory.decisions.ended(end.request_id, end.attempt, end.how, end.num_preemptions)
        self._release(self._ingress(ingress_id), [end.request_id for end in ended])

    # What others may see and do

    async def explain(self, name: str, tenant: str | None) -> list[dict[str, object]]:
        """The decisions behind each choice of a request, by the name its client knows (`Decisions.of`)."""
        decisions = self._directory.decisions.of(name, tenant)
        return [
            {"id": request_id, "attempts": [attempt.as_json() for attempt in attempts]}
            for request_id, attempts in decisions.items()
        ]

    async def cache_report(self, tenant: str, is_admin: bool) -> dict[str, object]:
        """Sizes, hits and evictions of the cache; of the tenants only this one's use, unless it is an administrator.
        Its own hottest prefixes come with their first token ids."""
        return cache_report(self._directory, tenant, is_admin)

    async def events_since(self, sequence: int | None) -> CacheUpdate:
        """What was stored and removed (`Directory.events_since`)."""
        return self._directory.events_since(sequence)

    async def reset_cache(self) -> dict[str, int]:
        """Forget all KV that no request holds or was promised, everywhere, and the transcripts; returns the counts."""
        blocks, erased = self._directory.segments.reset()
        self._carry_out(erased)
        self._transcripts.clear()
        calls = [quietly(handle.reset_cache.remote()) for handle in self._handles.values()]
        dropped = await asyncio.gather(*calls)
        return {"store_blocks": blocks, "pool_blocks": sum(count or 0 for count in dropped)}

    async def statistics(self) -> dict[str, int]:
        """Sizes of the index, after checking its integrity."""
        self._directory.check_integrity()
        self._transcripts.check_integrity()
        return {
            "num_workers": len(self._directory.workers),
            "num_blocks": self._directory.num_blocks,
            "num_segments": len(self._directory.segments),
            "segment_bytes": self._directory.segments.store_bytes,
            "disk_bytes": self._directory.segments.disk_bytes,
            "num_reservations": self._directory.num_reservations,
            "num_transcripts": len(self._transcripts),
            "transcript_bytes": self._transcripts.num_bytes,
        }

    # Transcripts

    async def recall(self, chats: Sequence[Sequence[bytes]]) -> list[Found]:
        """For each chat the first of these names of its beginnings that is known."""
        return [self._transcripts.first(names) for names in chats]

    async def remember(self, transcripts: Sequence[tuple[bytes, "array[int]"]]) -> None:
        """Keep token ids under the names of their texts."""
        for name, token_ids in transcripts:
            self._transcripts.record(name, token_ids)

    # Inside

    def _ingress(self, ingress_id: str) -> "_Ingress":
        return self._ingresses.setdefault(ingress_id, _Ingress())

    def _release(self, ingress: _Ingress, request_ids: Iterable[str]) -> None:
        self._directory.segments.now = time.time()
        for request_id in request_ids:
            ingress.requests.discard(request_id)
            self._carry_out(self._directory.release(request_id))

    async def _watch_ingresses(self) -> None:
        """Release what belongs to ingress replicas that are gone."""
        while True:
            await asyncio.sleep(INGRESS_SILENCE_S / 4)
            deadline = time.monotonic() - INGRESS_SILENCE_S
            for ingress_id in [name for name, ingress in self._ingresses.items() if ingress.seen_at < deadline]:
                ingress = self._ingresses.pop(ingress_id)
                if ingress.requests:
                    logger.warning("ingress %s is gone: %d requests released", ingress_id, len(ingress.requests))
                self._release(ingress, list(ingress.requests))

    async def _watch_senders(self) -> None:
        """Find others for what does not come from those who were to send it."""
        while True:
            await asyncio.sleep(self._await_timeout_s / NUM_STALL_CHECKS)
            self._carry_out(self._directory.supply.replace_stalled(time.monotonic(), self._await_timeout_s))

    async def _follow(self, worker_id: str, epoch: int, handle: ActorHandle[Any]) -> None:
        """Read one worker's export stream until the worker is gone."""
        try:
            stream: Any = handle.export_stream.remote()
            async for ref in stream:
                item: ExportItem = await ref
                if item.header is not None:
                    self._directory.segments.now = time.time()
                    payload = await anext(stream) if item.header.num_bytes else None
                    self._carry_out(self._directory.segment_exported(worker_id, epoch, item.header, payload))
                self._carry_out(self._directory.blocks_changed(worker_id, epoch, item.sealed, item.evicted))
                self._carry_out(self._directory.export_failed(worker_id, epoch, item.missing))
                self._carry_out(self._directory.blocks_unsent(worker_id, epoch, item.unsent))
        except Exception as error:  # whatever it was, nobody reads this worker's stream any more
            logger.warning("%s is gone: %s", worker_id, type(error).__name__)
        self._carry_out(self._directory.remove_worker(worker_id, epoch))
        if self._followers.get(worker_id) is asyncio.current_task():
            del self._followers[worker_id], self._handles[worker_id]

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Deliver(worker_id=worker_id, segment=segment):
                    self._background.start(self._deliver(self._handles[worker_id], segment))
                case Export(worker_id=worker_id, hashes=hashes):
                    self._background.start(quietly(self._handles[worker_id].export_blocks.remote(hashes)))
                case Lost(worker_id=worker_id, hashes=hashes):
                    self._background.start(quietly(self._handles[worker_id].blocks_lost.remote(hashes)))
                case _:
                    self._background.start(self._use_disk(instruction))

    async def _deliver(self, handle: ActorHandle[Any], segment: Segment) -> None:
        """Hand a segment to a worker; one that it could not take is not promised from there to anybody any more."""
        try:
            outcome = await handle.import_segment.remote(segment.header, [] if segment.ref is None else [segment.ref])
        except RayError as error:  # the worker is gone; its stream tells
            logger.debug("segment not delivered: %s", type(error).__name__)
            return
        if outcome is Imported.NOT_FETCHED:
            self._directory.segments.undelivered(segment)
        elif outcome is Imported.DAMAGED:
            self._carry_out(self._directory.segment_lost(segment.segment_id))

    async def _use_disk(self, instruction: DiskInstruction) -> None:
        assert self._disk is not None
        match instruction:
            case WriteFile(segment=segment):
                written = await self._disk.write(segment)
                self._carry_out(self._directory.segments.written(segment.segment_id, written))
            case ReadFile(segment=segment):
                self._carry_out(await self._read(self._disk, segment))
            case EraseFile(header=header):
                await self._disk.erase(header)

    async def _read(self, disk: DiskTier, segment: Segment) -> list[Instruction]:
        """Bring a segment back from disk. Its file is given up only if it is damaged."""
        try:
            ref = await disk.read(segment.header)
        except DamagedFileError:
            return self._directory.segment_lost(segment.segment_id)
        if ref is None:
            return self._directory.segment_unread(segment)
        return self._directory.segment_read(segment.segment_id, ref)

    async def _save_blocks(self) -> None:
        """Get to disk what workers would not export by themselves."""
        while True:
            await asyncio.sleep(SAVE_S)
            self._carry_out(self._directory.save())
