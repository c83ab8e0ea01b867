"""Data that later requests of clients refer to: token ids of answers, stored responses, and how answers began."""

import asyncio
import logging
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raydix.actors.manager.response_disk import ResponseDisk
from raydix.actors.messages import Memory, RetiredError
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.answer_store import AnswerStore
from raydix.engine.core.manager.response_store import KeptEntry, ResponseStore
from raydix.engine.core.manager.transcript_store import TranscriptStore
from raydix.engine.core.tenants import ANONYMOUS
from raydix.engine.core.types import Admission, AdmitRequest, Ended

logger = logging.getLogger(__name__)

EXPIRY_S = 600.0
"""Longest time between two looks for responses that are to be forgotten."""


class ClientMemory:
    """The manager's methods for these data. Responses are bytes, and never read."""

    def __init__(
        self,
        transcript_budget_bytes: int,
        response_budget_bytes: int,
        response_ttl_s: float,
        answer_budget_bytes: int = 0,
    ) -> None:
        self._transcripts = TranscriptStore(transcript_budget_bytes)
        self._responses = ResponseStore(response_budget_bytes, response_ttl_s, self._response_dropped)
        self._response_budget_bytes = response_budget_bytes
        self._response_ttl_s = response_ttl_s
        self._response_disk: ResponseDisk | None = None
        self._answers = AnswerStore(answer_budget_bytes) if answer_budget_bytes else None
        """For drafts; None where none are made of them."""
        self.is_retired = False
        """True if another manager has taken over."""
        self.has_memory = asyncio.Event()
        """Cleared while the data of a predecessor are on their way."""
        self.has_memory.set()

    async def _keep_responses_on_disk(self, folder: Path) -> ResponseDisk:
        """Take over the responses on disk, and keep later ones there, too; returns the disk, whose `run` does so."""
        self._response_disk = disk = ResponseDisk(folder)
        found = await disk.load(self._response_budget_bytes)
        now, since_epoch = time.monotonic(), time.time()
        self._responses.restore(
            [
                KeptEntry(each.name, each.parent, each.data, now - max(0.0, since_epoch - each.used_at), each.tenant)
                for each in found
            ],
            now,
        )
        extra = about("responses_found", responses=len(self._responses))
        logger.info("%d stored responses found on disk", len(self._responses), extra=extra)
        return disk

    async def _watch_expiry(self) -> None:
        """Forget responses in time, whether the store is used or not."""
        while True:
            await asyncio.sleep(min(EXPIRY_S, self._response_ttl_s))
            self._responses.forget_expired(time.monotonic())

    def _response_dropped(self, name: bytes) -> None:
        if self._response_disk is not None:
            self._response_disk.forget(name)

    async def _memory_is_ready(self) -> None:
        """Wait for a predecessor's data, if some are on their way.

        Raises:
            RetiredError: the successor is to be asked.
        """
        await self.has_memory.wait()
        self.check_not_retired()

    def check_not_retired(self) -> None:
        """Raise RetiredError if another manager has taken over."""
        if self.is_retired:
            raise RetiredError

    async def recall(self, names: Sequence[bytes]) -> "list[array[int] | None]":
        """Token ids under each name; None for an unknown name."""
        await self._memory_is_ready()
        return [self._transcripts.find(name) for name in names]

    async def remember(self, transcripts: Sequence[tuple[bytes, "array[int]", str]]) -> list[bool]:
        """Keep token ids under names, each for a tenant; returns for each whether the ids are kept."""
        await self._memory_is_ready()
        return [self._transcripts.keep(name, token_ids, tenant) for name, token_ids, tenant in transcripts]

    async def keep_response(self, name: bytes, parent: bytes | None, data: bytes, tenant: str = ANONYMOUS.name) -> bool:
        """Keep a tenant's response that goes on from its parent; returns whether the response is kept."""
        await self._memory_is_ready()
        is_new = name not in self._responses
        is_kept = self._responses.keep(name, parent, data, time.monotonic(), tenant)
        if is_kept and self._response_disk is not None:
            if is_new:
                self._response_disk.keep(name, parent, data, tenant)
            self._response_disk.use(self._responses.path(name))
        return is_kept

    async def find_response(self, name: bytes, with_earlier: bool) -> list[bytes]:
        """The data of a response, and of those before it (`ResponseStore.find`)."""
        await self._memory_is_ready()
        found = self._responses.find(name, time.monotonic(), with_earlier=with_earlier)
        if self._response_disk is not None:
            self._response_disk.use(self._responses.path(name))
        return found

    async def delete_response(self, name: bytes) -> bool:
        """Forget a response; False for an unknown name."""
        await self._memory_is_ready()
        return self._responses.delete(name)

    def keep_answers(self, ended: Iterable[Ended]) -> None:
        """Keep how answers of ended requests began, for the drafts of later ones."""
        if self._answers is not None:
            for answer in (each.answer for each in ended if each.answer is not None):
                self._answers.keep(answer.name, answer.token_ids)

    def with_continuations(self, admission: Admission, request: AdmitRequest) -> Admission:
        """The admission with the answers that began where the request's does."""
        if self._answers is None or not request.answer_name:
            return admission
        continuations = self._answers.continuations(request.answer_name)
        return replace(admission, continuations=continuations) if continuations else admission

    def memory_now(self) -> Memory:
        """All data, for a successor."""
        now = time.monotonic()
        return Memory(
            self._transcripts.entries(),
            [] if self._answers is None else self._answers.entries(),
            [(*each[:3], now - each.used_at, each.tenant) for each in self._responses.entries()],
        )

    def take_memory(self, memory: Memory) -> None:
        """Take a predecessor's data over. Its responses are the ones there are: others, which were found on disk, have
        been deleted meanwhile."""
        now = time.monotonic()
        self._transcripts.restore(memory.transcripts)
        if self._answers is not None:
            self._answers.restore(memory.answers)

        responses = [
            KeptEntry(name, parent, data, now - age_s, tenant) for name, parent, data, age_s, tenant in memory.responses
        ]
        for name in {each[0] for each in self._responses.entries()} - {each[0] for each in responses}:
            self._responses.delete(name)
        self._responses.restore(responses, now)

    def share_memory(self, weights: Mapping[str, float]) -> None:
        """Share the memory of transcripts and responses by these weights of tenants."""
        self._transcripts.weigh(weights)
        self._responses.weigh(weights)

    def forget_answers(self) -> None:
        """Forget all token ids of answers; responses stay."""
        self._transcripts.clear()
        if self._answers is not None:
            self._answers.clear()

    def memory_statistics(self) -> dict[str, int]:
        """Sizes, after a check of their integrity."""
        self._transcripts.check_integrity()
        self._responses.check_integrity()
        if self._answers is not None:
            self._answers.check_integrity()
        return {
            "num_answers": 0 if self._answers is None else len(self._answers),
            "answer_bytes": 0 if self._answers is None else self._answers.num_bytes,
            "num_transcripts": len(self._transcripts),
            "transcript_bytes": self._transcripts.num_bytes,
            "num_responses": len(self._responses),
            "response_bytes": self._responses.num_bytes,
        }
