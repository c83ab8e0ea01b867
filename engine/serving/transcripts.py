"""The token ids of answers, kept under references that clients are given, and found again."""

import asyncio
import secrets
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from raydix.engine.background import Background
from raydix.engine.core.answers.transcripts import REFERENCE_PREFIX, transcript_name
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.types import BlockHash
from raydix.engine.serving.answer_keeper import AnswerKeeper

Item = TypeVar("Item")
Answered = TypeVar("Answered")

REFERENCE_BYTES = 24  # random bytes of a reference: too many to guess


class Transcripts:
    """Keeps and finds the token ids of answers. `on_lookup` is told for each reference whether it was known."""

    def __init__(self, keeper: AnswerKeeper, root: BlockHash, on_lookup: Callable[[bool], None]) -> None:
        """`root` stands for the model."""
        self._keeper = keeper
        self._root = root
        self._on_lookup = on_lookup
        self._keep_call = SharedCall(keeper.remember)

    async def keep(self, token_ids: Sequence[int], private_salt: bytes, tenant: str) -> str | None:
        """Keep an answer's ids in the tenant's share; returns the reference by which the same salt finds them, None if
        they are not kept."""
        reference = REFERENCE_PREFIX + secrets.token_urlsafe(REFERENCE_BYTES)
        name = transcript_name(reference, self._root, private_salt)
        try:
            is_kept = await self._keep_call.add((name, array("I", token_ids), tenant))
        except ServiceError:
            return None
        return reference if is_kept else None

    async def find(self, references: Sequence[str], private_salt: bytes) -> "dict[str, array[int]]":
        """Find the ids of each reference that is known under this salt.

        Raises:
            ServiceError: the keeper is out of reach.
        """
        names = [transcript_name(reference, self._root, private_salt) for reference in references]
        found = await self._keeper.recall(names)
        for token_ids in found:
            self._on_lookup(token_ids is not None)
        pairs = zip(references, found, strict=True)
        return {reference: token_ids for reference, token_ids in pairs if token_ids is not None}


class SharedCall(Generic[Item, Answered]):
    """Gathers the items that many coroutines add in one turn of the event loop for one call of `send`, which answers
    each."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[list[Answered]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[Answered]]] = []
        self._background = Background()

    async def add(self, item: Item) -> Answered:
        """Return the answer to `item`. Raises the error of `send`."""
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._background.start(self._run())  # which begins in the next turn
        self._waiting.append((item, answer))
        return await answer

    async def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            results = await self._send([item for item, _ in waiting])
        except Exception as error:  # every caller gets it
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in zip(waiting, results, strict=True):
            if not answer.done():
                answer.set_result(result)
