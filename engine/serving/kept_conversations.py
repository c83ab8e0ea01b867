"""Conversations that are kept for their clients, and that responses read and add to."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

import orjson

from raydix.engine.api.openai_responses.conversations import (
    CONVERSATION,
    MAX_BYTES,
    REVISION_BYTES,
    Conversation,
    KnownAnswer,
    before_response,
    beginning_of,
    encoded,
    new_id,
    own_ids,
)
from raydix.engine.api.openai_responses.items import with_ids
from raydix.engine.api.responses import ID_PREFIXES, Json
from raydix.engine.core.answers.transcripts import transcript_name
from raydix.engine.core.errors import ConversationNotFoundError, RequestError, ServiceError
from raydix.engine.core.tenants import Tenant, salt_of
from raydix.engine.core.types import BlockHash
from raydix.engine.serving.answer_keeper import AnswerKeeper
from raydix.engine.serving.job import Job
from raydix.engine.serving.stored_responses import Shown

# Changes of one conversation at the same moment, at all replicas: each of them is made on top of the others.
MAX_TRIES = 16
MAX_WAITS, RETRY_S = 60, 1.0  # how often a response in the background tries to be added, and seconds between two tries

Change = Callable[[Conversation], Conversation]


class KeptConversations:
    """Conversations of one model. One is known under the tenant and `cache_salt` of the request that made it alone."""

    def __init__(self, keeper: AnswerKeeper, root: BlockHash, shown: Shown) -> None:
        self._keeper = keeper
        self._root = root
        self._shown = shown

    async def create(
        self, conversation: Conversation, tenant: Tenant, cache_salt: str | None
    ) -> tuple[str, Conversation]:
        """Keep a conversation of this moment; returns its id and the conversation.

        Raises:
            RequestError: it is too large.
            ServiceError: there is no room for it, or the keeper is out of reach.
        """
        begun = Conversation(int(time.time()), conversation.metadata, conversation.items)
        conversation_id, data = new_id(), _small(begun)
        if not await self._keeper.keep_response(
            self._name(conversation_id, tenant, cache_salt), None, data, tenant.name
        ):
            raise ServiceError("There is no room for a conversation; try again later.", retry_after_s=5)
        return conversation_id, begun

    async def of_request(
        self, conversation_id: str, tenant: Tenant, cache_salt: str | None, resumed: str | None = None
    ) -> bytes:
        """The conversation that a response goes on from, as bytes; where the stream of a response is `resumed`, which
        may have been added already, as it was before. Errors as `find`, and RequestError for one that is full."""
        data = await self._data(conversation_id, tenant, cache_salt, "conversation")
        if resumed is not None:
            data = before_response(data, resumed)
        if len(data) > MAX_BYTES:
            raise RequestError(
                f"The conversation has {len(data):,} bytes, and nothing is added above {MAX_BYTES:,}: delete items, or "
                "begin another one.",
                param="conversation",
            )
        return data

    async def add(self, job: Job, output: Sequence[Json]) -> bool:
        """Add input and answer of a finished job, of which `output` has the items, to its conversation; False if that
        is not kept any more, or cannot be changed now."""
        turn, [answer] = job.spec.turn, job.answers
        assert turn is not None and turn.conversation is not None
        # Named by the response, so that both runners of one in the background add the same.
        own = with_ids(turn.items, own_ids(job.head.id.removeprefix(ID_PREFIXES["responses"])))
        made = {str(item["id"]): orjson.dumps(item) for item in output}
        shown = self._shown(answer.token_ids, answer.text)
        item_ids = [str(item["id"]) for item in output if item["type"] != "compaction"]
        known = None if shown is None else KnownAnswer.of(item_ids, answer.text, shown)
        # Nobody waits for a response in the background, which waits for a keeper that is away, here as at its end.
        for number in range(1 if job.claim is None else MAX_WAITS):
            if number:
                await asyncio.sleep(RETRY_S)
            try:
                await self.change(
                    turn.conversation,
                    job.tenant,
                    job.spec.retention.salt,
                    lambda conversation: conversation.with_items({**own, **made}, known),
                    has_limit=False,  # an answer is bounded by the context
                )
            except ConversationNotFoundError:
                return False
            except ServiceError:
                continue
            return True
        return False

    async def _data(
        self, conversation_id: str, tenant: Tenant, cache_salt: str | None, param: str = "conversation_id"
    ) -> bytes:
        found = await self._keeper.find_response(self._name(conversation_id, tenant, cache_salt), False)
        if not found or not found[0].startswith(CONVERSATION):  # responses lie in the same store
            raise ConversationNotFoundError(
                f"The conversation '{conversation_id[:100]}' is not kept for you: it may have been deleted or "
                "forgotten, or be of another 'cache_salt' or another server.",
                param=param,
            )
        return found[0]

    async def find(self, conversation_id: str, tenant: Tenant, cache_salt: str | None) -> Conversation:
        """A conversation.

        Raises:
            ConversationNotFoundError: it is not kept.
            ServiceError: the keeper is out of reach.
        """
        return Conversation.decode(await self._data(conversation_id, tenant, cache_salt))

    async def change(
        self,
        conversation_id: str,
        tenant: Tenant,
        cache_salt: str | None,
        change: Change,
        *,
        has_limit: bool = True,
    ) -> Conversation:
        """Put the changed conversation in its place; returns it. `has_limit`: it may not grow too large.

        Raises:
            ConversationNotFoundError: it is not kept.
            RequestError: it would be too large; or as `change`.
            ServiceError: too many change it, or there is no room, or the keeper is out of reach.
        """
        name = self._name(conversation_id, tenant, cache_salt)
        for _ in range(MAX_TRIES):
            data = await self._data(conversation_id, tenant, cache_salt)
            changed = change(Conversation.decode(data))
            after = _small(changed) if has_limit else _encoded(changed)
            if await self._keeper.replace_response(name, beginning_of(data), after):
                return changed
        raise ServiceError("The conversation cannot be changed now; try again.")

    async def delete(self, conversation_id: str, tenant: Tenant, cache_salt: str | None) -> None:
        """Forget a conversation with its items; errors as `find`."""
        await self._data(conversation_id, tenant, cache_salt)
        await self._keeper.delete_response(self._name(conversation_id, tenant, cache_salt))

    def _name(self, conversation_id: str, tenant: Tenant, cache_salt: str | None) -> bytes:
        return transcript_name(conversation_id, self._root, salt_of(tenant.name, cache_salt).private)


def _encoded(conversation: Conversation) -> bytes:
    return encoded(conversation, secrets.token_bytes(REVISION_BYTES))


def _small(conversation: Conversation) -> bytes:
    data = _encoded(conversation)
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"The conversation would have {len(data):,} bytes, and at most {MAX_BYTES:,} are kept: begin another one.",
            param="items",
        )
    return data
