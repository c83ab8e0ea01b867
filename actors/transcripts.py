"""An ingress replica's use of the manager's transcripts. Whatever goes wrong is a miss: the text is tokenized anew."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ray.exceptions import RayError

from actors.batching import Batch
from actors.calls import Background
from actors.manager_link import ManagerLink
from engine.core.errors import ServiceError
from engine.core.transcripts import EncodedText, Found, extended_name, name_beginnings, resume
from engine.core.types import BlockHash

TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat up to where its answer begins."""

    token_ids: tuple[int, ...]
    digest: blake2b
    """Of the text that stands for these ids."""


class Transcripts:
    """Looks up how chats begin and records how they went on. `on_lookup` is told whether something was found."""

    def __init__(self, manager: ManagerLink, on_lookup: Callable[[bool], None]) -> None:
        self._manager = manager
        self._on_lookup = on_lookup
        self._lookups = Batch(self._recall)
        self._records = Batch(self._remember)
        self._background = Background()

    async def resume(self, chat: EncodedText, root: BlockHash, *, ask: bool, max_tokens: int) -> Conversation:
        """The conversation that a chat continues: at most `max_tokens` ids, those that it had if `ask` and it is known.

        `root` stands for the model and the tenant.
        """
        names, digest = name_beginnings(chat, root)
        found = await self._look_up(names) if ask else None
        if ask:
            self._on_lookup(found is not None)
        return Conversation(resume(chat, found, max_tokens), digest)

    def record(self, conversation: Conversation, text: str, token_ids: Sequence[int]) -> None:
        """Remember an answer: these ids were given out as this text. Does not wait."""
        name = extended_name(conversation.digest, text)
        self._background.start(self._record(name, array("I", (*conversation.token_ids, *token_ids))))

    async def _look_up(self, names: list[bytes]) -> Found:
        try:
            found: Found = await asyncio.wait_for(self._lookups.add(names), TIMEOUT_S)
        except TimeoutError:
            return None
        except (RayError, ServiceError):
            self._manager.forget()
            return None
        return found

    async def _record(self, name: bytes, token_ids: "array[int]") -> None:
        try:
            await self._records.add((name, token_ids))
        except (RayError, ServiceError):
            self._manager.forget()

    async def _recall(self, chats: list[list[bytes]]) -> Any:
        return await (await self._manager.find()).recall.remote(chats)

    async def _remember(self, transcripts: list[tuple[bytes, "array[int]"]]) -> list[None]:
        await (await self._manager.find()).remember.remote(transcripts)
        return [None] * len(transcripts)
