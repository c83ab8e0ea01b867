"""Storage for the KV of preempted requests until they go on."""

from typing import Protocol

from raydix.engine.model.segments import Bytes


class SwapSpace(Protocol):
    """Keeps one payload per request. How much that may be in all is the scheduler's to say.

    `put` and `take` may raise anything: the request is computed again then.
    """

    def put(self, request_id: str, payload: Bytes) -> None:
        """Keep a payload, which the caller does not change any more, in place of an earlier one."""

    def take(self, request_id: str) -> Bytes:
        """Return a kept payload, to be read only, and keep it no longer."""

    def drop(self, request_id: str) -> None:
        """Keep nothing for the request, if anything was."""


class ProcessMemory:
    """The memory of the engine's own process."""

    def __init__(self) -> None:
        self._payloads: dict[str, Bytes] = {}

    def put(self, request_id: str, payload: Bytes) -> None:
        self._payloads[request_id] = payload

    def take(self, request_id: str) -> Bytes:
        return self._payloads.pop(request_id)

    def drop(self, request_id: str) -> None:
        self._payloads.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._payloads)
