"""An ingress replica's use of the manager's transcripts. Whatever goes wrong is a miss: the text is tokenized anew."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.batching import Batch
from actors.names import MANAGER, find_actor
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

    def __init__(self, app_name: str, on_lookup: Callable[[bool], None]) -> None:
        self._app_name = app_name
        self._on_lookup = on_lookup
        self._manager: ActorHandle[Any] | None = None
        self._lookups = Batch(self._recall)
        self._records = Batch(self._remember)
        self._tasks: set[asyncio.Task[None]] = set()

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
        task = asyncio.create_task(self._record(name, array("I", (*conversation.token_ids, *token_ids))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_up(self, names: list[bytes]) -> Found:
        try:
            found: Found = await asyncio.wait_for(self._lookups.add(names), TIMEOUT_S)
        except (RayError, TimeoutError):
            self._manager = None  # look for its successor the next time
            return None
        return found

    async def _record(self, name: bytes, token_ids: "array[int]") -> None:
        try:
            await self._records.add((name, token_ids))
        except RayError:
            self._manager = None

    async def _recall(self, chats: list[list[bytes]]) -> Any:
        manager = await self._get_manager()
        return [None] * len(chats) if manager is None else await manager.recall.remote(chats)

    async def _remember(self, transcripts: list[tuple[bytes, "array[int]"]]) -> list[None]:
        manager = await self._get_manager()
        if manager is not None:
            await manager.remember.remote(transcripts)
        return [None] * len(transcripts)

    async def _get_manager(self) -> ActorHandle[Any] | None:
        if self._manager is None:
            self._manager = await find_actor(MANAGER, self._app_name)
        return self._manager
