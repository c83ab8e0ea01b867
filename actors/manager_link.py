"""The way of an ingress replica to the KV cache manager, which may die and come back as another actor."""

from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.calls import answer
from actors.names import MANAGER, find_actor
from engine.core.errors import NoWorkerError, ServiceError

TIMEOUT_S = 5.0


class ManagerLink:
    """Finds the manager, and its successor once a call has failed."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self.handle: ActorHandle[Any] | None = None
        """The manager as it was found last; None if it has to be looked for."""

    async def find(self) -> ActorHandle[Any]:
        """The manager. Raises NoWorkerError if there is none."""
        if self.handle is None:
            self.handle = await find_actor(MANAGER, self._app_name)
        if self.handle is None:
            raise NoWorkerError("the KV cache manager is not there")
        return self.handle

    def forget(self) -> None:
        """Look for another one the next time."""
        self.handle = None

    async def ask(self, method: str, *args: Any) -> Any:
        """What a method of the manager returns. Raises ServiceError if it is out of reach."""
        try:
            return await answer(getattr(await self.find(), method).remote(*args), TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            self.forget()
            raise ServiceError("The KV cache manager is out of reach; try again.") from error
