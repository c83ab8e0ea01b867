"""Serve deployments that host one actor each, so that Serve restarts, scales and updates our actors.

A host's replica starts its child in the replica's placement group and waits until the child is ready; the data plane
calls the child directly.

* The child dies: its host starts another incarnation at once, under a new name and with a newer epoch. The manager's
  host keeps a standby, a process that has imported everything and waits: the next manager is at work sooner by the time
  that a process takes to start.
* The child answers nothing for `CHECK_TIMEOUT_S`: its host kills it, and has the manager count it.
* An incarnation does not start: its host tries again, after growing pauses. While `MAX_FAILURES` or more have failed in
  a row the host is unhealthy, and Serve replaces it.
* Serve stops the host (fewer replicas, an update, a node that is drained): the child's requests and blocks go to other
  workers first.
* The host dies: Ray ends its child, whose owner is gone, and Serve starts another host.

Serve asks the hosts of elastic workers every 2 s for the wanted number of workers (`raydix.actors.scaling`); the hosts
ask the manager.

Serve calls `reconfigure` once before a host counts as started, and then for each change of the deployment's
`user_config`, in a form that depends on who deployed (`raydix.configs.sections`). The host keeps the new values for the
next incarnation and hands them to the running child. A child that dies meanwhile is replaced by one with the new
values; a child that answers nothing is killed and replaced; where the child refuses them, Serve replaces the host.
Invalid values are refused by a line in the log (`change_refused`), and host and child go on with the old ones: a
mistake in a Serve config file, which nobody checks before Serve applies it, ends no process. A host that starts with
them does not start.

The host looks for changes of the tenants' file, whose shares of caches concern its child.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError

from raydix.actors.calls import answer
from raydix.actors.changes import log_refused, when_changed
from raydix.actors.hosted import hosted
from raydix.actors.last_words import condemn
from raydix.actors.logs import log_to_ray, set_level
from raydix.actors.manager.succession import Succession
from raydix.actors.messages import STARTING_REPORT_S
from raydix.actors.names import announce_manager, incarnation_name
from raydix.actors.rpc import ActorClient, ManagerClient, SuccessionClient, find_manager
from raydix.actors.scaling import MAY_SHRINK, WANTED
from raydix.configs.sections import CHECK_TIMEOUT_S, MANAGER, live_part
from raydix.engine.core.errors import StartupError
from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 1800  # limit of a child's start, from its creation to a loaded model and a laid-out pool
# First pause before a child that did not start is started again; each further pause is twice as long.
RETRY_S = 0.5
MAX_RETRY_S = 30.0
MAX_FAILURES = 3  # starts in a row that may fail before Serve is to try with another host
LEAVE_S = 0.2  # between two questions whether a worker's requests and blocks are elsewhere
LEAVE_TIMEOUT_S = 50.0  # limit of a worker's leaving; less than Serve's `graceful_shutdown_timeout_s` of hosts
UNKNOWN_S = 10.0  # a worker that no manager has known for so long is not waited for: the application may be ending
ASK_TIMEOUT_S = 2.0
STANDBY_AFTER_S = 10.0  # age of a manager at which it gets a standby, so that the rest of the cluster starts first


class ActorIncarnation(NamedTuple):
    """An actor that was created, and may have started."""

    name: str
    epoch: int
    child: ActorClient
    num_changes: int
    """Changes of the live values before it was created."""


class ActorHost:
    """Starts one actor, replaces the actor after its death, and reports its health to Serve."""

    def __init__(self, kind: str, arguments: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> None:
        context = serve.get_replica_context()
        self._kind = kind
        self._base = base  # what the `user_config` is laid over; None: it is whole
        self._live: Mapping[str, Any] = {}  # the `user_config` applied last
        self._app_name = context.app_name
        self._hosted = hosted(kind, arguments, context.replica_id.unique_id, context.app_name)
        self._actor_id = self._hosted.actor_id
        self._num_failures = 0
        self._failure = ""
        self._num_changes = 0
        self._child: ActorClient | None = None
        self._child_name = ""  # the name of the incarnation started last
        self._last_epoch = 0
        self._started_at = 0.0
        self._standby: ActorIncarnation | None = None  # the manager's next incarnation, created and not started
        self._num_uncounted = 0  # children that were killed because they hung, and of which no manager knows yet
        self._changing = asyncio.Lock()

    async def reconfigure(self, live: Mapping[str, Any]) -> None:
        """Called by Serve with the values that change in place; the first call starts the child.

        Raises:
            StartupError: a value is invalid, and no child runs yet.
            RayTaskError: the child cannot start with them, or refuses them.
        """
        async with self._changing:
            if self._child is None:
                self._take(live)
                log_to_ray(f"host-{self._kind}", self._hosted.logs)
                self._child = await self._start_first_child()
                self._watch = asyncio.create_task(self._replace_when_dead(self._child))
                self._tenants_watch = asyncio.create_task(when_changed(self._hosted.tenants_file, self._reread))
            else:
                await self._change(self._child, live)

    async def _reread(self) -> None:
        """Take the present values again, with another content of the tenants' file."""
        async with self._changing:
            if self._child is not None:  # otherwise the first one is made of the present content
                with contextlib.suppress(RayTaskError):  # A child refuses no shares; it may be dying.
                    await self._change(self._child, self._live)

    async def _change(self, child: ActorClient, live: Mapping[str, Any]) -> None:
        """Change a running child in place; values that are invalid change nothing."""
        try:
            is_change = self._take(live)
        except StartupError as error:
            log_refused(self._actor_id, error)
            return
        if is_change:
            set_level(self._hosted.logs.level)
            await self._tell(child)

    def _take(self, live: Mapping[str, Any]) -> bool:
        """Keep values for this and all later incarnations; False if nothing changes for these. Raises StartupError for
        invalid values, and keeps the old."""
        is_change = self._hosted.take(live if self._base is None else live_part(self._kind, self._base, live))
        self._live = live
        self._num_changes += is_change
        return is_change

    async def _tell(self, child: ActorClient) -> None:
        """Hand the present values to a child."""
        try:
            await answer(self._hosted.tell(child), CHECK_TIMEOUT_S)
        except TimeoutError:
            await self._kill_hanging(child, "takes no changes")
        except RayTaskError:
            raise
        except RayError:
            pass  # The child died, and the next one has the values.

    async def check_health(self) -> None:
        """Called by Serve; kills a child that hangs, and raises while the child cannot be brought back."""
        if self._num_uncounted:
            await self._report_hung()
        if self._num_failures >= MAX_FAILURES:
            raise RuntimeError(self._failure)
        if self._child is None:
            raise RuntimeError(f"{self._actor_id} has no user_config, and so no limits yet")
        try:
            await answer(self._child.check(), CHECK_TIMEOUT_S)
            if self._kind == MANAGER:
                await self._stay_announced(self._child)
                await self._keep_standby()
        except TimeoutError:
            await self._kill_hanging(self._child, "does not answer")
        except RayError:
            pass  # The child died, and `_replace_when_dead` starts another.

    async def _kill_hanging(self, child: ActorClient, what: str) -> None:
        """End a child that has answered nothing for `CHECK_TIMEOUT_S`."""
        extra = about("child_hangs", child=self._actor_id)
        logger.error("%s %s for %d s and is killed", self._actor_id, what, CHECK_TIMEOUT_S, extra=extra)
        await asyncio.to_thread(condemn, self._child_name)
        child.kill()
        # Told with the next check: it may have been the manager itself.
        self._num_uncounted += 1

    async def _report_hung(self) -> None:
        """Have the manager count the children that hung; without an answer the next check tells it again."""
        with contextlib.suppress(RayError, TimeoutError, AttributeError):  # away, silent, or of older code
            manager = await find_manager(self._app_name)
            if manager is not None:
                number = self._num_uncounted
                await answer(manager.children_hung(self._kind, number), ASK_TIMEOUT_S)
                # Another child may have hung meanwhile.
                self._num_uncounted -= number

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the number of replicas follows the load; empty while no manager can say."""
        wanted = None
        with contextlib.suppress(RayError, TimeoutError):  # away, or silent
            manager = await find_manager(self._app_name)
            if manager is not None:
                with contextlib.suppress(AttributeError):  # of older code
                    wanted = await answer(manager.wanted_workers(), ASK_TIMEOUT_S)
        return {} if wanted is None else {WANTED: wanted.number, MAY_SHRINK: float(wanted.may_shrink)}

    async def greet(self) -> None:
        """Answered once the child is there (`raydix.actors.scaling.start_first_worker`)."""

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Called by Serve before the host's process ends; awaited by Serve if a worker is to leave first."""
        watch: asyncio.Task[None] | None = getattr(self, "_watch", None)  # None before the first child is ready
        is_over = watch is None or watch.done() or watch.cancelling()
        return None if is_over or self._kind == MANAGER else self._leave()

    async def _leave(self) -> None:
        """Return when other workers have the child's requests and blocks, at the latest after `LEAVE_TIMEOUT_S`, or
        when no manager has known the child for `UNKNOWN_S`."""
        began = known_at = time.monotonic()
        while time.monotonic() - began < LEAVE_TIMEOUT_S and time.monotonic() - known_at < UNKNOWN_S:
            with contextlib.suppress(RayError, TimeoutError):  # the manager may be away and come back
                manager = await find_manager(self._app_name)
                if manager is not None:
                    has_left = await answer(manager.worker_leaving(self._actor_id), ASK_TIMEOUT_S)
                    if has_left:
                        break
                    known_at = known_at if has_left is None else time.monotonic()
            await asyncio.sleep(LEAVE_S)

        self._watch.cancel()
        extra = about("child_leaves", child=self._actor_id, took_s=round(time.monotonic() - began, 3))
        logger.info("%s leaves", self._actor_id, extra=extra)

    async def _start_first_child(self) -> ActorClient:
        """Start a child. Raises the constructor's error, so that Serve can say why the application does not start. A
        child killed during its start is started again, `MAX_FAILURES` starts in all."""
        for number in itertools.count(1):
            try:
                return await self._start_child()
            except RayActorError as error:
                if error.actor_init_failed or number == MAX_FAILURES:
                    raise
                reason = type(error).__name__
                extra = about("child_died", child=self._actor_id, reason=reason)
                logger.warning("%s died while it started (%s)", self._actor_id, reason, extra=extra)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("counting does not end")

    async def _start_child(self) -> ActorClient:
        """Start a new incarnation; returns when it is ready, and nothing is awaited since it got the present values.
        Raises RayError if the start fails."""
        began = time.monotonic()
        incarnation, self._standby = self._standby or self._create(), None
        name, epoch, child, num_changes = incarnation
        try:
            if self._kind == MANAGER:
                await self._start_manager(child, name)
            else:
                await self._ready(child)
            while num_changes < self._num_changes:  # Changed since the child was made.
                num_changes = self._num_changes
                await self._tell(child)
        except BaseException:
            child.kill()
            raise

        self._child_name, self._started_at = name, time.monotonic()
        took_s = round(self._started_at - began, 3)
        extra = about("child_started", child=self._actor_id, epoch=epoch, took_s=took_s)
        logger.info("%s started in %.1f s", name, took_s, extra=extra)
        return child

    def _create(self) -> ActorIncarnation:
        # Everybody takes a lower epoch for an older incarnation: never one, also when the clock was put back.
        self._last_epoch = epoch = max(time.time_ns(), self._last_epoch + 1)
        name = incarnation_name(self._actor_id, epoch)
        return ActorIncarnation(name, epoch, self._hosted.create(name, epoch), self._num_changes)

    async def _keep_standby(self) -> None:
        """Create a standby if there is none, and end one that is dead or hangs, for the next call to create another."""
        standby = self._standby
        if standby is None:
            if time.monotonic() >= self._started_at + STANDBY_AFTER_S:
                self._standby = self._create()
            return
        try:
            await answer(standby.child.check(), CHECK_TIMEOUT_S)
        except (RayError, TimeoutError):
            if self._standby is standby:  # and not the manager by now
                self._standby = None
                standby.child.kill()

    async def _start_manager(self, child: ActorClient, name: str) -> None:
        """Start a manager that takes over from the one announced last, if that lives; returns when everything is taken
        over. The host of the last one ends when this host has started (`max_surge_percent`)."""
        successor = SuccessionClient(child.handle)
        predecessor, terms = await self._find_manager(), dict[str, object]()
        if predecessor is not None:
            leaving = SuccessionClient(predecessor.handle)
            try:
                terms |= await answer(leaving.of_succession(Succession.prepare, [child.handle]), ASK_TIMEOUT_S)
            except (RayError, TimeoutError, AttributeError) as error:  # dead, silent, or of older code
                logger.info("no manager hands over (%s)", type(error).__name__)

        await self._ready(child)
        if terms:
            await answer(successor.of_succession(Succession.expect_memory), CHECK_TIMEOUT_S)
        await announce_manager(name, self._app_name)
        if predecessor is not None and terms:
            taken = successor.of_succession(Succession.take_over, [predecessor.handle], terms)
            await answer(taken, CHECK_TIMEOUT_S)

    async def _find_manager(self) -> ManagerClient | None:
        """The manager announced last, alive or not; None if there is none, or Ray cannot say."""
        with contextlib.suppress(RayError):
            return await find_manager(self._app_name)
        return None

    async def _while_succeeded(self, child: ActorClient) -> None:
        """Return when the manager that was announced after this host's is dead: until then this host starts none."""
        announced = await self._find_manager()
        if announced is not None and announced.handle != child.handle:
            logger.info("another manager has taken over", extra=about("succeeded"))
            with contextlib.suppress(RayError):
                await announced.join()

    async def _stay_announced(self, child: ActorClient) -> None:
        """Announce this host's manager again if the one announced after it is dead."""
        announced = await self._find_manager()
        if announced is not None and announced.handle != child.handle:
            try:
                await answer(announced.check(), ASK_TIMEOUT_S)
            except TimeoutError:
                pass
            except RayError:
                await announce_manager(self._child_name, self._app_name)

    async def _ready(self, child: ActorClient) -> None:
        """Wait until a child has started; meanwhile tell the manager that a worker is starting."""
        started = asyncio.ensure_future(answer(child.start(), RESTART_TIMEOUT_S))
        try:
            while not (await asyncio.wait({started}, timeout=STARTING_REPORT_S))[0]:
                await self._report_starting()
            started.result()
        finally:
            started.cancel()

    async def _report_starting(self) -> None:
        if self._kind != MANAGER and self._num_failures < MAX_FAILURES:
            with contextlib.suppress(RayError, TimeoutError):
                manager = await find_manager(self._app_name)
                if manager is not None:
                    await answer(manager.worker_starting(self._actor_id), STARTING_REPORT_S)

    async def _replace_when_dead(self, child: ActorClient) -> None:
        while True:
            try:
                await child.join()
            except Exception as error:  # Of any kind: no other process would start another child.
                reason = type(error).__name__
                extra = about("child_died", child=self._actor_id, reason=reason)
                logger.warning("%s died (%s) and is replaced", self._actor_id, reason, extra=extra)
                child.kill()  # The child may be only out of reach.
                if self._kind == MANAGER:
                    await self._while_succeeded(child)
            self._child = child = await self._start_next_child()

    async def _start_next_child(self) -> ActorClient:
        """Start a new incarnation, with as many tries as needed."""
        pause_s = RETRY_S
        while True:
            try:
                child = await self._start_child()
            except Exception as error:  # Of any kind: the next try may succeed.
                self._num_failures += 1
                self._failure = f"{self._actor_id} does not start again: {type(error).__name__}: {error}"
                extra = about("child_not_started", child=self._actor_id, failures=self._num_failures)
                logger.exception("%s does not start; next try in %.1f s", self._actor_id, pause_s, extra=extra)
            else:
                self._num_failures = 0
                return child
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
