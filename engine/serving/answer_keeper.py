"""Answers that are kept for later requests, in a process that all replicas share."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from raydix.engine.core.memory.response_store import Abandoned


class AnswerKeeper(Protocol):
    """Token ids and responses of answers, under names that cannot be guessed (`transcript_name`). Each method raises
    ServiceError where the process that keeps them is out of reach."""

    async def remember(self, transcripts: "Sequence[tuple[bytes, array[int], str]]") -> list[bool]:
        """Keep token ids, each with its name and the tenant in whose share it counts; whether each is kept."""

    async def recall(self, names: Sequence[bytes]) -> "list[array[int] | None]":
        """The token ids of each name; None for one that is not kept."""

    async def keep_response(self, name: bytes, parent: bytes | None, data: bytes, tenant: str) -> bool:
        """Keep an encoded response that goes on from `parent`; whether it is kept."""

    async def replace_response(self, name: bytes, beginning: bytes, data: bytes) -> bool:
        """Put other data in the place of an encoded response that begins so; whether it was done."""

    async def renew_responses(self, claims: Sequence[tuple[bytes, bytes]]) -> tuple[list[bool], list[Abandoned]]:
        """Renew claims of responses under way, each a name and the beginning of its data; returns whether each still
        stands, and responses whose runners are gone, which are the caller's from now on."""

    async def find_response(self, name: bytes, with_earlier: bool) -> list[bytes]:
        """The response of a name, and with `with_earlier` those it goes on from, the latest first; none if it is not
        kept."""

    async def delete_response(self, name: bytes) -> bool:
        """Forget a response; whether there was one."""
