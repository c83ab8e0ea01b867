"""The whole server in one process: manager, one worker and an ingress replica, in one event loop, without Ray's
cluster. The engine computes in its own thread, and long requests are read in the reader's process, as anywhere else.

There is nothing to fail over to: the server lives and dies as one.
"""

import asyncio
import threading
import time

from starlette.applications import Starlette

from raydix.actors.changes import log_refused, when_changed
from raydix.actors.ingress.application import application
from raydix.actors.ingress.replica import IngressReplica
from raydix.actors.local import LocalHandle, LocalRuntime
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.names import incarnation_name
from raydix.actors.worker.worker import WORKER_CLASSES, Worker
from raydix.configs.schema import Config
from raydix.configs.sections import INGRESS, MANAGER, manager_arguments, manager_live
from raydix.configs.settings import engine_settings, manager_settings
from raydix.configs.tenants import TenantsFile
from raydix.engine.core.errors import StartupError
from raydix.engine.core.types import Role
from raydix.engine.model.host import num_cores

REGISTER_POLL_S = 0.005  # interval between two looks whether the worker has registered


class UnwantedError(Exception):
    """The server is stopped while its model is loaded."""


class OneProcess:
    """One server, and the way to its replica."""

    def __init__(self, config: Config) -> None:
        """Raises StartupError for a configuration of more than one worker or ingress replica, and for wrong tenants."""
        sections = config.workers.sections
        section = sections.get(Role.MIXED)
        if section is None or len(sections) > 1 or section.replicas != 1 or config.ingress.replicas != 1:
            raise StartupError(
                "one process has one worker, of the role mixed, and one ingress replica; the configuration has "
                f"workers of {', '.join(sections)}: leave --local out, or take another configuration"
            )
        self._tenants_file = TenantsFile()
        self._declared, self._config = config, self._tenants_file.resolved(config)
        self._section = section
        self._runtime = LocalRuntime()
        self._worker: Worker | None = None
        self._is_stopped = threading.Event()
        self.replica = IngressReplica()

    async def start(self) -> None:
        """Load the model and start everything in the running event loop. Raises StartupError."""
        config, runtime = self._config, self._runtime
        manager_values = manager_settings(manager_arguments(config), manager_live(config))
        manager = KVCacheManager(**manager_values, runtime=runtime, logs=config.logging)
        runtime.handles[MANAGER], runtime.manager_name = LocalHandle(manager), MANAGER
        await manager.start()

        epoch = time.time_ns()
        worker = await asyncio.to_thread(
            WORKER_CLASSES[Role.MIXED],
            engine_settings(config, self._section),
            Role.MIXED,
            "mixed",
            epoch,
            runtime,
            config.logging,
            num_threads=self._section.num_threads or num_cores(),
            on_tensor=self._go_on,
        )
        self._worker = worker
        runtime.handles[incarnation_name("mixed", epoch)] = LocalHandle(worker)
        await asyncio.gather(worker.start(), self.replica.build(config, runtime, "local"))
        while not (await manager.workers()).workers:
            if worker.registrar.refused_for is not None:
                raise StartupError(f"the manager refuses the worker: {worker.registrar.refused_for}")
            await asyncio.sleep(REGISTER_POLL_S)
        await self.replica.frontend.check_ready()
        self._tenants_watch = asyncio.create_task(when_changed(self._tenants_file, self._reread))

    def _go_on(self) -> None:
        """Called in the thread that loads the model, which nothing else can end."""
        if self._is_stopped.is_set():
            raise UnwantedError

    async def _reread(self) -> None:
        """Take the keys and limits of a changed tenants' file; shares of caches stay as they were at the start."""
        try:
            self.replica.change(self._tenants_file.resolved(self._declared))
        except StartupError as error:
            log_refused(INGRESS, error)

    def application(self) -> Starlette:
        """The HTTP application, the same that Serve runs."""
        return application(self.replica)

    async def stop(self) -> None:
        """End the engine's thread, or the loading of its model, and the processes that were started beside this one."""
        self._is_stopped.set()
        if self.replica.is_built:
            await self.replica.frontend.close()
        if self._worker is not None:
            self._worker.stop_engine()  # not in a thread: there are no more of them when a program ends

        # Elsewhere the actors' duties end with their process; here the process may go on. The event loop is this
        # server's alone, so all of its other tasks are duties.
        duties = asyncio.all_tasks() - {asyncio.current_task()}
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
