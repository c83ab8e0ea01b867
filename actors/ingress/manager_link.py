"""An ingress replica's way to the KV cache manager, which may die and return as another actor, or fall silent.

A manager that has not answered in time is silent: until an answer to `probe`, requests are placed without the manager,
at once.
"""

import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from ray.exceptions import ActorDiedError, RayError

from raydix.actors.calls import answer
from raydix.actors.messages import RetiredError
from raydix.actors.rpc import ManagerClient
from raydix.actors.runtime import Runtime
from raydix.engine.core.errors import NoWorkerError, ServiceError
from raydix.engine.core.log_fields import about
from raydix.engine.core.memory.response_store import Abandoned
from raydix.engine.serving.answer_keeper import AnswerKeeper

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[[ManagerClient], Awaitable[T]]


class ManagerLink:
    """Finds the manager, and its successor after a failed call."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_silent = False
        self.client: ManagerClient | None = None
        """Manager as found last; None before the next search."""
        self.answered_at = time.monotonic()
        """Time of a manager's last answer; before the first answer, the time of this link's creation."""

    async def find(self) -> ManagerClient:
        """The manager. Raises NoWorkerError if there is none."""
        if self.client is None:
            self.client = await self._runtime.find_manager()
            self._is_silent = False
            if self.client is not None:
                logger.info("found the manager", extra=about("manager_found"))
        if self.client is None:
            raise NoWorkerError("the KV cache manager is not there")
        return self.client

    async def ask(self, call: Call[T], *, timeout_s: float = TIMEOUT_S, is_prompt: bool = False) -> T:
        """Return the result of a call. A manager that does not answer an `is_prompt` call (one whose answer waits for
        no other process) in time is silent.

        Raises:
            ServiceError: the manager is out of reach or silent.
        """
        # Only the calls of requests give up at once. Probes go on, and the first answer to one ends the silence.
        if self._is_silent and self.client is not None:
            raise _silent()
        return await self.probe(call, timeout_s=timeout_s, is_prompt=is_prompt)

    async def probe(self, call: Call[T], *, timeout_s: float = TIMEOUT_S, is_prompt: bool = False) -> T:
        """The result of a call, made to a silent manager too; otherwise as `ask`. The successor of a manager that has
        retired, and perhaps ended since, is asked at once."""
        try:
            return await self._ask_once(call, timeout_s, is_prompt)
        except (RetiredError, ActorDiedError):
            pass
        try:
            return await self._ask_once(call, timeout_s, is_prompt)
        except (RetiredError, ActorDiedError) as error:
            raise _out_of_reach() from error

    async def _ask_once(self, call: Call[T], timeout_s: float, is_prompt: bool) -> T:
        """Ask the present manager once, as `probe`. Raises RetiredError and ActorDiedError, too."""
        manager = await self.find()
        try:
            result = await answer(call(manager), timeout_s)
        except TimeoutError as error:
            # A call that waits for other processes says nothing of the manager itself. Of two calls that time out
            # across a succession only the one to the present manager counts.
            if is_prompt and manager is self.client:
                self._fall_silent()
            raise _silent() from error
        except RayError as error:
            # Another call may have found the successor meanwhile: that one is not forgotten for its predecessor's
            # death.
            if manager is self.client:
                self._forget(error)
            if isinstance(error, (RetiredError, ActorDiedError)):
                raise
            raise _out_of_reach() from error
        self._is_silent = False
        self.answered_at = time.monotonic()
        return result

    def _forget(self, error: RayError) -> None:
        """Look for another manager the next time."""
        if self.client is not None:
            reason = type(error).__name__
            logger.warning("lost the manager (%s)", reason, extra=about("manager_lost", reason=reason))
        self.client = None

    def _fall_silent(self) -> None:
        if not self._is_silent:
            logger.warning("the manager does not answer", extra=about("manager_lost", reason="TimeoutError"))
        self._is_silent = True


class ManagerAnswers:
    """The answers that the manager keeps (`AnswerKeeper`)."""

    def __init__(self, manager: ManagerLink) -> None:
        self._manager = manager

    async def _ask(
        self, method: Callable[Concatenate[AnswerKeeper, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._manager.ask(lambda manager: manager.of_answers(method, *args, **kwargs))

    async def remember(self, transcripts: "Sequence[tuple[bytes, array[int], str]]") -> list[bool]:
        return await self._ask(AnswerKeeper.remember, transcripts)

    async def recall(self, names: Sequence[bytes]) -> "list[array[int] | None]":
        return await self._ask(AnswerKeeper.recall, names)

    async def keep_response(self, name: bytes, parent: bytes | None, data: bytes, tenant: str) -> bool:
        return await self._ask(AnswerKeeper.keep_response, name, parent, data, tenant)

    async def replace_response(self, name: bytes, beginning: bytes, data: bytes) -> bool:
        return await self._ask(AnswerKeeper.replace_response, name, beginning, data)

    async def renew_responses(self, claims: Sequence[tuple[bytes, bytes]]) -> tuple[list[bool], list[Abandoned]]:
        return await self._ask(AnswerKeeper.renew_responses, claims)

    async def find_response(self, name: bytes, with_earlier: bool) -> list[bytes]:
        return await self._ask(AnswerKeeper.find_response, name, with_earlier)

    async def delete_response(self, name: bytes) -> bool:
        return await self._ask(AnswerKeeper.delete_response, name)


def _out_of_reach() -> ServiceError:
    return ServiceError("The KV cache manager is out of reach; try again.")


def _silent() -> ServiceError:
    return ServiceError("The KV cache manager does not answer; try again.")
