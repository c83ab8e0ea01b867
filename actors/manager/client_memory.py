"""Data that later requests of clients refer to: token ids of answers, stored responses, and how answers began."""

import asyncio
import logging
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raydix.actors.manager.response_disk import ResponseDisk
from raydix.actors.messages import Memory
from raydix.engine.core.log_fields import about
from raydix.engine.core.memory.answer_store import AnswerStore
from raydix.engine.core.memory.response_store import Abandoned, KeptEntry, ResponseStore
from raydix.engine.core.memory.transcript_store import TranscriptStore
from raydix.engine.core.tenants import ANONYMOUS
from raydix.engine.core.types import Admission, AdmitRequest, Ended

logger = logging.getLogger(__name__)

EXPIRY_S = 600.0  # longest time between two looks for responses that are to be forgotten


class ClientMemory:
    """The stores of these data in memory, and the responses' copies on disk. Responses are bytes, of which nobody here
    reads more than the beginning."""

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
        # Answers for drafts; None where no drafts are made of answers.
        self._answers = AnswerStore(answer_budget_bytes) if answer_budget_bytes else None

    async def keep_on_disk(self, folder: Path) -> ResponseDisk:
        """Take over the responses on disk, and keep later ones there, too; returns the disk, whose `run` does so."""
        self._response_disk = disk = ResponseDisk(folder)
        # Up to the budget of memory: what does not fit there is removed from disk, too, so that both hold the same.
        found = await disk.load(self._response_budget_bytes)
        now, since_epoch = time.monotonic(), time.time()
        self._responses.restore(
            [
                # Files have the time since the epoch, the store the monotonic one. A clock set back makes no response
                # younger than now.
                KeptEntry(
                    name=each.name,
                    parent=each.parent,
                    data=each.data,
                    used_at=now - max(0.0, since_epoch - each.used_at),
                    tenant=each.tenant,
                )
                for each in found
            ],
            now,
        )
        extra = about("responses_found", responses=len(self._responses))
        logger.info("%d stored responses found on disk", len(self._responses), extra=extra)
        return disk

    async def watch_expiry(self) -> None:
        """Forget responses in time, whether the store is used or not."""
        while True:
            await asyncio.sleep(min(EXPIRY_S, self._response_ttl_s))
            self._responses.forget_expired(time.monotonic())

    def _response_dropped(self, name: bytes) -> None:
        if self._response_disk is not None:
            self._response_disk.forget(name)

    def recall(self, names: Sequence[bytes]) -> "list[array[int] | None]":
        """Token ids under each name; None for an unknown name."""
        return [self._transcripts.find(name) for name in names]

    def remember(self, transcripts: Sequence[tuple[bytes, "array[int]", str]]) -> list[bool]:
        """Keep token ids under names, each for a tenant; returns for each whether the ids are kept."""
        return [self._transcripts.keep(name, token_ids, tenant) for name, token_ids, tenant in transcripts]

    def keep_response(self, name: bytes, parent: bytes | None, data: bytes, tenant: str = ANONYMOUS.name) -> bool:
        """Keep a tenant's response that goes on from its parent; returns whether the response is kept."""
        is_new = name not in self._responses
        # Memory decides, the disk follows: what the store refuses is never written.
        is_kept = self._responses.keep(name, parent, data, time.monotonic(), tenant)
        if is_kept and self._response_disk is not None:
            # Known data are not written again: a call that was repeated after a failure changes nothing.
            if is_new:
                self._response_disk.keep(name, parent, data, tenant)
            self._response_disk.use(self._responses.path(name))
        return is_kept

    def replace_response(self, name: bytes, beginning: bytes, data: bytes) -> bool:
        """Put other data in the place of a response's (`ResponseStore.replace`); whether it was done."""
        entry = self._responses.replace(name, beginning, data, time.monotonic())
        if entry is not None and self._response_disk is not None:
            self._response_disk.keep(name, entry.parent, data, entry.tenant)
            self._response_disk.use(self._responses.path(name))
        return entry is not None

    def renew_responses(self, claims: Sequence[tuple[bytes, bytes]]) -> tuple[list[bool], list[Abandoned]]:
        """Renew claims of responses under way (`ResponseStore.renew`), and give the caller those whose runners are
        gone."""
        now = time.monotonic()
        # Renewed first, so that no runner is given back its own response as abandoned.
        return self._responses.renew(claims, now), self._responses.abandoned(now)

    def find_response(self, name: bytes, with_earlier: bool) -> list[bytes]:
        """The data of a response, and of those before it (`ResponseStore.find`)."""
        found = self._responses.find(name, time.monotonic(), with_earlier=with_earlier)
        if self._response_disk is not None:
            self._response_disk.use(self._responses.path(name))
        return found

    def delete_response(self, name: bytes) -> bool:
        """Forget a response; False for an unknown name."""
        return self._responses.delete(name)

    def keep_answers(self, ended: Iterable[Ended]) -> None:
        """Keep how answers of ended requests began, for the drafts of later ones."""
        if self._answers is not None:
            for answer in (each.answer for each in ended if each.answer is not None):
                self._answers.keep(answer.name, answer.token_ids)

    def with_continuations(self, admission: Admission, request: AdmitRequest) -> Admission:
        """The admission with the answers that began where the request's does."""
        # A request has no name for its answer where it may not be drafted from others'.
        if self._answers is None or not request.answer_name:
            return admission
        continuations = self._answers.continuations(request.answer_name)
        return replace(admission, continuations=continuations) if continuations else admission

    def all(self) -> Memory:
        """All data, for a successor."""
        # Monotonic clocks of two processes have no common origin, so a response travels with its age.
        now = time.monotonic()
        return Memory(
            self._transcripts.entries(),
            [] if self._answers is None else self._answers.entries(),
            [(*each[:3], now - each.used_at, each.tenant) for each in self._responses.entries()],
        )

    def take_over(self, memory: Memory) -> None:
        """Take a predecessor's data over. Its responses are the ones there are: others, which were found on disk, have
        been deleted meanwhile."""
        now = time.monotonic()
        self._transcripts.restore(memory.transcripts)
        if self._answers is not None:
            self._answers.restore(memory.answers)

        responses = [
            KeptEntry(name=name, parent=parent, data=data, used_at=now - age_s, tenant=tenant)
            for name, parent, data, age_s, tenant in memory.responses
        ]
        # Deleted before the others are restored: they take room of the budget.
        for name in {each[0] for each in self._responses.entries()} - {each[0] for each in responses}:
            self._responses.delete(name)
        self._responses.restore(responses, now)

    def share(self, weights: Mapping[str, float]) -> None:
        """Share the memory of transcripts and responses by these weights of tenants."""
        self._transcripts.weigh(weights)
        self._responses.weigh(weights)

    def forget_answers(self) -> None:
        """Forget all token ids of answers; responses stay."""
        self._transcripts.clear()
        if self._answers is not None:
            self._answers.clear()

    def statistics(self) -> dict[str, int]:
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
