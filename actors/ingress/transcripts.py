"""An ingress replica's use of the manager's transcripts: keeps answers under references, and finds them again."""

import secrets
from array import array
from collections.abc import Callable, Sequence

from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.ingress.shared_call import SharedCall
from raydix.engine.core.answers.transcripts import REFERENCE_PREFIX, transcript_name
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.types import BlockHash

REFERENCE_BYTES = 24
"""Random bytes of a reference: too many to guess."""


class Transcripts:
    """Keeps and finds the token ids of answers. `on_lookup` is told for each reference whether it was known."""

    def __init__(self, manager: ManagerLink, root: BlockHash, on_lookup: Callable[[bool], None]) -> None:
        """`root` stands for the model."""
        self._manager = manager
        self._root = root
        self._on_lookup = on_lookup
        self._keep_call = SharedCall(self._keep_all)

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
            ServiceError: the manager is out of reach.
        """
        names = [transcript_name(reference, self._root, private_salt) for reference in references]
        found = await self._manager.ask(lambda manager: manager.recall(names))
        for token_ids in found:
            self._on_lookup(token_ids is not None)
        pairs = zip(references, found, strict=True)
        return {reference: token_ids for reference, token_ids in pairs if token_ids is not None}

    async def _keep_all(self, transcripts: "list[tuple[bytes, array[int], str]]") -> list[bool]:
        return await self._manager.ask(lambda manager: manager.remember(transcripts))
