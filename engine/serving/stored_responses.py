"""Responses that are kept for their clients: found again, deleted, and gone on from."""

from collections.abc import Callable, Sequence

from raydix.engine.api.openai_responses.items import with_ids
from raydix.engine.api.openai_responses.stored import StoredResponse, encoded, going_on
from raydix.engine.api.responses import ID_PREFIXES
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.answers.transcripts import transcript_name
from raydix.engine.core.errors import ResponseNotFoundError, ServiceError
from raydix.engine.core.tenants import Tenant, salt_of
from raydix.engine.core.types import BlockHash
from raydix.engine.serving.answer_keeper import AnswerKeeper
from raydix.engine.serving.job import Job

Shown = Callable[[Sequence[int], str], Sequence[int] | None]


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
        earlier = [StoredResponse.decode(data) for data in found]
        if not earlier:
            raise _not_found(previous, "previous_response_id")
        if (gone := earlier[0].previous) is not None:
            raise ResponseNotFoundError(
                f"The response '{previous}' goes on from '{gone}', which is not kept any more.",
                param="previous_response_id",
            )
        return going_on(spec, earlier)

    async def keep(self, job: Job, response: bytes) -> bool:
        """Keep the response, as JSON, of a finished job; returns whether the response is kept."""
        [answer], spec = job.answers, job.spec
        assert spec.turn is not None
        shown = self._shown(answer.token_ids, answer.text)
        if shown is None:
            return False

        data = encoded(
            response,
            previous=spec.turn.previous,
            items=with_ids(spec.turn.items, job.head.id.removeprefix(ID_PREFIXES["responses"])),
            messages=spec.messages[len(spec.messages) - spec.turn.num_own :],
            text=answer.text,
            token_ids=tuple(shown),
        )
        name = self._name(job.head.id, job.tenant, spec.retention.salt)
        previous = spec.turn.previous
        parent = None if previous is None else self._name(previous, job.tenant, spec.retention.salt)
        try:
            return await self._keeper.keep_response(name, parent, data, job.tenant.name)
        except ServiceError:
            return False

    async def find(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> StoredResponse:
        """The response of an id.

        Raises:
            ResponseNotFoundError: the response is not kept.
            ServiceError: the keeper is out of reach.
        """
        name = self._name(response_id, tenant, cache_salt)
        found = await self._keeper.find_response(name, False)
        if not found:
            raise _not_found(response_id, "response_id")
        return StoredResponse.decode(found[0])

    async def delete(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> None:
        """Forget a response; errors as `find`."""
        name = self._name(response_id, tenant, cache_salt)
        if not await self._keeper.delete_response(name):
            raise _not_found(response_id, "response_id")

    def _name(self, response_id: str, tenant: Tenant, cache_salt: str | None) -> bytes:
        return transcript_name(response_id, self._root, salt_of(tenant.name, cache_salt).private)


def _not_found(response_id: str, param: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"The response '{response_id[:100]}' is not kept for you: it may have been deleted or forgotten, or be of "
        "another 'cache_salt' or another server.",
        param=param,
    )
