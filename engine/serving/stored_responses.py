"""Responses that are kept for their clients: found again, deleted, and gone on from."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import orjson

from raydix.engine.api.openai_responses.answers import cancelled, failed, under_way
from raydix.engine.api.openai_responses.conversations import CONVERSATION
from raydix.engine.api.openai_responses.items import lines_of, with_ids
from raydix.engine.api.openai_responses.stored import (
    REVISION_BYTES,
    Claim,
    State,
    StoredResponse,
    answer_of,
    beginning_of,
    encoded,
    going_on,
    not_cancelled,
)
from raydix.engine.api.responses import ID_PREFIXES
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.answers.transcripts import transcript_name
from raydix.engine.core.errors import RaydixError, RequestError, ResponseNotFoundError, ServiceError
from raydix.engine.core.memory.response_store import Abandoned
from raydix.engine.core.tenants import Tenant, salt_of
from raydix.engine.core.types import BlockHash
from raydix.engine.serving.answer_keeper import AnswerKeeper
from raydix.engine.serving.job import Job

Shown = Callable[[Sequence[int], str], Sequence[int] | None]

RETRY_S = 1.0  # pause before the end of a response is kept once more, where the keeper was out of reach


class StoredResponses:
    """Stored responses of one model. A response is known under the tenant and `cache_salt` of its request alone."""

    def __init__(self, keeper: AnswerKeeper, root: BlockHash, shown: Shown) -> None:
        """`root` stands for the model; `shown` turns an answer's ids and text into ids for a later prompt
        (`raydix.engine.serving.chats.Chats.shown`)."""
        self._keeper = keeper
        self._root = root
        self._shown = shown

    async def going_on(self, spec: GenerationSpec, tenant: Tenant) -> GenerationSpec:
        """The request with the messages and answers that it goes on from.

        Raises:
            ResponseNotFoundError: the response that it names, or one before that, is not kept.
            ServiceError: the keeper is out of reach.
        """
        assert spec.turn is not None and spec.turn.previous is not None
        previous = spec.turn.previous
        name = self._name(previous, tenant, spec.retention.salt)
        found = await self._keeper.find_response(name, True)
        if not found or found[-1].startswith(CONVERSATION):  # conversations lie in the same store
            raise _not_found(previous, "previous_response_id")
        earlier = [StoredResponse.decode(data) for data in found]
        # The first one known has another before it, so the conversation's beginning is missing.
        if (gone := earlier[0].previous) is not None:
            raise ResponseNotFoundError(
                f"The response '{previous}' goes on from '{gone}', which is not kept any more.",
                param="previous_response_id",
            )
        if (conversation := earlier[-1].conversation) is not None:
            raise RequestError(
                f"The response '{previous}' belongs to the conversation '{conversation}': give that as 'conversation'.",
                param="previous_response_id",
            )
        for each in earlier:
            if each.state != "ended":
                raise RequestError(_WITHOUT_ANSWER[each.state], param="previous_response_id")
        # In a thread: there may be many, and a client chooses how much each of them has.
        return await asyncio.to_thread(going_on, spec, earlier)

    async def keep(self, job: Job, response: bytes) -> bool:
        """Keep the response, as JSON, of a finished job; returns whether the response is kept. One in the background
        waits for a keeper that is away."""
        [answer], claim = job.answers, job.claim
        shown = self._shown(answer.token_ids, answer.text)
        stored = replace(self._stored(job, response), answer=answer_of(answer.text, shown))
        if claim is not None:
            run = claim.stored.run
            assert run is not None
            # A stream may be read again, which needs all that generates it; a whole answer does not.
            claim.is_over = await self._end(claim, replace(stored, run=run if run.streams else None))
            if not claim.is_over:
                # Somebody else has ended the response, and this changes nothing; or the answer has no room, and the
                # response would be generated again and again.
                await self.fail(claim, ServiceError("There is no room for the answer."))
                return False
            return True
        if shown is None:
            return False
        try:
            return await self._keep(job, encoded(stored))
        except ServiceError:
            return False

    async def begin(self, job: Job) -> Claim:
        """Keep the response of a job in the background before its answer. Raises ServiceError where there is no room,
        or the keeper is out of reach."""
        revision = secrets.token_bytes(REVISION_BYTES)
        stored = replace(self._stored(job, under_way(job.head, job.spec)), state="under_way", run=job.run)
        if not await self._keep(job, encoded(stored, revision)):
            raise ServiceError("There is no room for a response in the background; try again later.", retry_after_s=5)
        name = self._name(job.head.id, job.tenant, job.spec.retention.salt)
        return Claim(name, beginning_of(revision), stored, job.tenant.name)

    async def renew(self, claims: Sequence[Claim]) -> tuple[list[bool], list[Abandoned]]:
        """Renew claims, and take responses whose runners are gone (`AnswerKeeper.renew_responses`)."""
        return await self._keeper.renew_responses([(claim.name, claim.beginning) for claim in claims])

    async def fail(self, claim: Claim, error: RaydixError) -> None:
        """End a response in the background by an error."""
        stored = claim.stored
        claim.is_over = await self._end(
            claim, replace(stored, response=failed(stored.response, error), state="failed", run=None)
        )

    async def cancel(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> tuple[bytes, StoredResponse]:
        """End a response in the background, and return its name and what it is then; one that has ended stays. Errors
        as `find`, and RequestError for one that is not in the background."""
        name = self._name(response_id, tenant, cache_salt)
        while True:
            data, stored = await self._found(name, response_id)
            if not stored.in_background:
                raise not_cancelled()
            if stored.state != "under_way":
                return name, stored
            claim = Claim.of(Abandoned(name, data, tenant.name))
            ended = replace(stored, response=cancelled(stored.response), state="cancelled", run=None)
            # Only in place of what was just seen: the runner may end it in the same moment.
            if await self._keeper.replace_response(name, claim.beginning, encoded(ended)):
                return name, ended
            # It has ended in this moment, or is forgotten: the next look shows which.

    async def _end(self, claim: Claim, stored: StoredResponse) -> bool:
        """Put the end of a response in its place, as soon as the keeper is there; False if it has ended otherwise."""
        data = encoded(stored)
        while True:
            try:
                return await self._keeper.replace_response(claim.name, claim.beginning, data)
            except ServiceError:
                await asyncio.sleep(RETRY_S)

    async def _keep(self, job: Job, data: bytes) -> bool:
        assert job.spec.turn is not None
        previous, salt = job.spec.turn.previous, job.spec.retention.salt
        parent = None if previous is None else self._name(previous, job.tenant, salt)
        name = self._name(job.head.id, job.tenant, salt)
        return await self._keeper.keep_response(name, parent, data, job.tenant.name)

    def _stored(self, job: Job, response: bytes) -> StoredResponse:
        """The response of a job without its answer."""
        spec = job.spec
        assert spec.turn is not None
        return StoredResponse(
            response=response,
            previous=spec.turn.previous,
            items=b"\n".join(lines_of(with_ids(spec.turn.items, job.head.id.removeprefix(ID_PREFIXES["responses"])))),
            messages=orjson.dumps(spec.messages[len(spec.messages) - spec.turn.num_own :]),
            conversation=spec.turn.conversation,
            in_background=spec.turn.in_background,
        )

    async def find(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> StoredResponse:
        """The response of an id.

        Raises:
            ResponseNotFoundError: the response is not kept.
            ServiceError: the keeper is out of reach.
        """
        return (await self._found(self._name(response_id, tenant, cache_salt), response_id))[1]

    async def delete(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> None:
        """Forget a response; errors as `find`."""
        name = self._name(response_id, tenant, cache_salt)
        await self._found(name, response_id)
        if not await self._keeper.delete_response(name):  # deleted meanwhile
            raise _not_found(response_id, "response_id")

    async def _found(self, name: bytes, response_id: str) -> tuple[bytes, StoredResponse]:
        """The data of a name, and the response in it."""
        found = await self._keeper.find_response(name, False)
        if not found or found[0].startswith(CONVERSATION):
            raise _not_found(response_id, "response_id")
        return found[0], StoredResponse.decode(found[0])

    def _name(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> bytes:
        return transcript_name(response_id, self._root, salt_of(tenant.name, cache_salt).private)


_WITHOUT_ANSWER: Mapping[State, str] = {
    "under_way": "The response is still being generated: wait for its end.",
    "cancelled": "The response was cancelled, and has no answer to go on from.",
    "failed": "The response has failed, and has no answer to go on from.",
}


def _not_found(response_id: str, param: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"The response '{response_id[:100]}' is not kept for you: it may have been deleted or forgotten, or be of "
        "another 'cache_salt' or another server.",
        param=param,
    )
