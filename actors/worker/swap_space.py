"""KV of a worker's preempted requests in the object store.

The kept KV dies with the worker, as do the preempted requests. Called from the engine's thread, which waits: there is
nothing else to do before the next step.
"""

from typing import Any

from raydix.actors.runtime import Runtime


class ObjectStoreSwap:
    """An `raydix.engine.model.swap_space.SwapSpace` on the worker's own node."""

    TAKE_TIMEOUT_S = 2.0
    """Limit of reading KV back, from a disk after spilling, say; after it the KV is recomputed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._refs: dict[str, Any] = {}

    def put(self, request_id: str, payload: Any) -> None:
        self._refs[request_id] = self._runtime.put(payload)

    def take(self, request_id: str) -> Any:
        """Return a read-only, zero-copy view of the object, which lives as long as the view.

        Raises:
            RayError, TimeoutError: the object is lost, or does not come in time.
        """
        ref: Any = self._refs.pop(request_id)  # ray.get would warn of an event loop that it does not block
        return ref.future().result(self.TAKE_TIMEOUT_S)

    def drop(self, request_id: str) -> None:
        self._refs.pop(request_id, None)
