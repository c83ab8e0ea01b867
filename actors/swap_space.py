"""KV of a worker's preempted requests in the object store.

What a worker puts there dies with the worker, and so do the requests that it was kept for. Called from the engine's
thread, which waits: it has nothing else to do before the next step.
"""

from typing import Any

import ray


class ObjectStoreSwap:
    """An `engine.model.swap_space.SwapSpace` on the worker's own node."""

    TAKE_TIMEOUT_S = 2.0
    """What takes longer to read back, from a disk it was spilled to, say, is computed again."""

    def __init__(self) -> None:
        self._refs: dict[str, ray.ObjectRef[Any]] = {}

    def put(self, request_id: str, payload: Any) -> None:
        self._refs[request_id] = ray.put(payload)

    def take(self, request_id: str) -> Any:
        """Zero-copy: a read-only view of the object, which lives as long as the view.

        Raises:
            RayError, TimeoutError: it is lost, or does not come in time.
        """
        ref: Any = self._refs.pop(request_id)  # ray.get would warn of an event loop that it does not block
        return ref.future().result(self.TAKE_TIMEOUT_S)

    def drop(self, request_id: str) -> None:
        self._refs.pop(request_id, None)
