"""Tokens of texts and chats, and texts of tokens."""

from collections.abc import Mapping

import orjson

from raydix.engine.core.errors import NotFoundError
from raydix.engine.core.ingress.room import Room
from raydix.engine.core.tenants import Tenant
from raydix.engine.serving.reader_pool import RequestReader
from raydix.engine.serving.reader_work import TokenRequest, TokenRoute
from raydix.engine.serving.served_model import ServedModels


class Tokenization:
    """Answers bodies of `/tokenize` and `/detokenize`, and describes the tokenizer, if there is a `description`."""

    def __init__(
        self,
        reader: RequestReader,
        room: Room,
        models: ServedModels,
        description: Mapping[str, object] | None = None,
    ) -> None:
        self._reader = reader
        self._models = models
        self._room = room
        self._description = None if description is None else orjson.dumps(dict(description))

    async def answer(self, route: TokenRoute, body: bytes, tenant: Tenant) -> bytes:
        """The response to a body, which counts against the limits while it is read.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: there is no room for the request, or the reading failed.
        """
        with self._room.reserve(1, tenant):
            return await self._reader.tokens(TokenRequest(route, body, self._models.names(tenant)), tenant.name)

    def describe(self) -> bytes:
        """The response of `/tokenizer_info`. Raises NotFoundError where turned off."""
        if self._description is None:
            raise NotFoundError(
                "The tokenizer is not described here: http.tokenizer_info in the configuration is false."
            )
        return self._description
