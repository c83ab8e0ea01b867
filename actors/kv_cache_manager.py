"""The central actor: admits requests, follows every worker's blocks, owns the exported KV, sends it where it is wanted.

A thin shell around `engine.core.directory.Directory`: messages become events, instructions become calls.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.messages import INGRESS_SILENCE_S, ExportItem, Registration, WorkerInfo
from engine.core.directory import Deliver, Directory, Export, Instruction, Lost, Segment
from engine.core.errors import NoWorkerError
from engine.core.placement import CostModel
from engine.core.transcripts import Found, TranscriptStore
from engine.core.types import Admission, AdmitRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Ingress:
    """An ingress replica and its admitted requests."""

    seen_at: float = field(default_factory=time.monotonic)
    requests: set[str] = field(default_factory=set)


class KVCacheManager:
    """The prefix index of the cluster and the owner of its exported KV."""

    def __init__(self, costs: CostModel, segment_budget_bytes: int, transcript_budget_bytes: int) -> None:
        self._directory = Directory(costs, segment_budget_bytes)
        self._transcripts = TranscriptStore(transcript_budget_bytes)
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._ingresses: dict[str, _Ingress] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers once the manager is up."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_ingresses())

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
            self._directory.register(worker_id, registration.role, epoch, registration.block_bytes, registration.hashes)
        )
        self._followers[worker_id] = asyncio.create_task(self._follow(worker_id, epoch, handle[0]))
        logger.info("%s registered with %d blocks", worker_id, len(registration.hashes))

    async def heartbeat(self, worker_id: str, epoch: int, prefill_tokens_per_s: float) -> bool:
        """Whether this worker is registered; it reports its prefill rate (0: not measured yet)."""
        self._directory.worker_measured(worker_id, epoch, prefill_tokens_per_s)
        return self._directory.is_current(worker_id, epoch)

    async def workers(self, ingress_id: str | None = None) -> list[WorkerInfo]:
        """All registered workers; an ingress replica that asks now and then shows that it is alive."""
        if ingress_id is not None:
            self._ingress(ingress_id).seen_at = time.monotonic()
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

    async def settle(self, ingress_id: str, first_tokens: Sequence[str], released: Sequence[str]) -> None:
        """Requests of an ingress replica got their first token; others of its requests ended."""
        self._ingress(ingress_id).requests.difference_update(released)
        for request_id in first_tokens:
            self._directory.first_token(request_id)
        for request_id in released:
            self._carry_out(self._directory.release(request_id))

    async def statistics(self) -> dict[str, int]:
        """Sizes of the index, after checking its integrity."""
        self._directory.check_integrity()
        self._transcripts.check_integrity()
        return {
            "num_workers": len(self._directory.workers),
            "num_blocks": self._directory.num_blocks,
            "num_segments": self._directory.num_segments,
            "segment_bytes": self._directory.segment_bytes,
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

    async def _watch_ingresses(self) -> None:
        """Release what belongs to ingress replicas that are gone."""
        while True:
            await asyncio.sleep(INGRESS_SILENCE_S / 4)
            deadline = time.monotonic() - INGRESS_SILENCE_S
            for ingress_id in [name for name, ingress in self._ingresses.items() if ingress.seen_at < deadline]:
                orphans = self._ingresses.pop(ingress_id).requests
                for request_id in orphans:
                    self._carry_out(self._directory.release(request_id))
                if orphans:
                    logger.warning("ingress %s is gone: %d requests released", ingress_id, len(orphans))

    async def _follow(self, worker_id: str, epoch: int, handle: ActorHandle[Any]) -> None:
        """Read one worker's export stream until the worker is gone."""
        try:
            stream: Any = handle.export_stream.remote()
            async for ref in stream:
                item: ExportItem = await ref
                if item.header is not None:
                    payload = await anext(stream) if item.header.num_bytes else None
                    self._carry_out(self._directory.segment_exported(worker_id, epoch, item.header, payload))
                self._carry_out(self._directory.blocks_changed(worker_id, epoch, item.sealed, item.evicted))
                self._carry_out(self._directory.export_failed(worker_id, epoch, item.missing))
        except Exception as error:  # whatever it was, nobody reads this worker's stream any more
            logger.warning("%s is gone: %s", worker_id, type(error).__name__)
        self._carry_out(self._directory.remove_worker(worker_id, epoch))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            handle = self._handles[instruction.worker_id]
            call: Any
            match instruction:
                case Deliver(segment=Segment(header=header, ref=ref)):
                    call = handle.import_segment.remote(header, [] if ref is None else [ref])
                case Export(hashes=hashes):
                    call = handle.export_blocks.remote(hashes)
                case Lost(hashes=hashes):
                    call = handle.blocks_lost.remote(hashes)
            self._keep(call)

    def _keep(self, call: Any) -> None:
        """Hold a call's answer until it is there, and let a worker that died meanwhile be noticed by its stream."""
        answer = asyncio.ensure_future(call)
        self._calls.add(answer)
        answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        self._calls.discard(answer)
        if not answer.cancelled() and (error := answer.exception()) is not None and not isinstance(error, RayError):
            logger.error("a worker refused an instruction: %s", error)
