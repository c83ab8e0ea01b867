"""Tokens of texts and chats, and texts of tokens."""

from actors.ingress.reader_pool import RequestReader
from actors.ingress.reading import TokenRequest, TokenRoute
from engine.core.ingress.room import Room
from engine.core.tenants import Tenant


class Tokenization:
    """Answers bodies of `/tokenize` and `/detokenize`."""

    def __init__(self, reader: RequestReader, room: Room) -> None:
        self._reader = reader
        self._room = room

    async def answer(self, route: TokenRoute, body: bytes, tenant: Tenant) -> bytes:
        """The response to a body, which counts against the limits while it is read.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: there is no room for the request, or the reading failed.
        """
        with self._room.reserve(1, tenant):
            return await self._reader.tokens(TokenRequest(route, body))
