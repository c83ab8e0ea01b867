"""The ingress replicas, as the manager hears of them: their admitted requests, and their signs of life."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raydix.actors.calls import sleep
from raydix.actors.manager.executor import Executor
from raydix.actors.messages import INGRESS_SILENCE_S
from raydix.actors.processes import ProcessWatch
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.signs_of_life import SignsOfLife
from raydix.engine.core.types import AdapterReport, ProcessName

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replica:
    """An ingress replica and its admitted requests."""

    requests: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    """Requests that the last message did not name; requests missing from two messages in a row are over."""
    process: ProcessName | None = None
    adapters: AdapterReport | None = None
    """Its last report of adapters; None before the first one."""


class IngressWatch:
    """Ends the requests of a directory: those that replicas report, and those of replicas that are gone."""

    def __init__(self, directory: Directory, executor: Executor, processes: ProcessWatch) -> None:
        self._directory = directory
        self._executor = executor
        self._processes = processes
        self._replicas: dict[str, _Replica] = {}
        self._signs = SignsOfLife()  # signs of the replicas in `_replicas`

    def heard(
        self,
        ingress_id: str,
        active: Sequence[str],
        process: ProcessName | None,
        adapters: AdapterReport | None = None,
    ) -> None:
        """Take a replica's sign of life. `active`: its living requests; `adapters`: what it knows of adapters."""
        replica = self._replica(ingress_id)
        replica.process = process
        replica.adapters = adapters
        self._signs.heard(ingress_id, time.monotonic())

        # Once is not enough: a request may be admitted while this message is under way.
        missing = replica.requests.difference(active)
        self._release(replica, missing & replica.missing)
        replica.missing = missing & replica.requests

    def adapter_reports(self) -> Mapping[str, AdapterReport | None]:
        """The last report of adapters of each replica that is not silent; None before its first one."""
        return {ingress_id: replica.adapters for ingress_id, replica in self._replicas.items()}

    def admitted(self, ingress_id: str, request_id: str) -> None:
        """Count a request as one of a replica."""
        self._replica(ingress_id).requests.add(request_id)

    def release(self, ingress_id: str, request_ids: Iterable[str]) -> None:
        """End requests that a replica has reported."""
        self._release(self._replica(ingress_id), request_ids)

    async def run(self) -> None:
        """Release the requests of replicas that are gone, again and again."""
        while True:
            # A stopped process hears nobody, so the time that the sleep took longer counts for no one's silence.
            self._signs.stood_still(await sleep(INGRESS_SILENCE_S / 4))
            processes = {ingress_id: replica.process for ingress_id, replica in self._replicas.items()}
            self._processes.look_at_quiet(self._signs, processes, INGRESS_SILENCE_S / 4)
            for ingress_id in self._signs.silent(time.monotonic(), INGRESS_SILENCE_S):
                self._signs.forget(ingress_id)
                replica = self._replicas.pop(ingress_id)
                logger.log(
                    logging.WARNING if replica.requests else logging.INFO,
                    "ingress %s is silent for %d s: %d requests released",
                    ingress_id,
                    INGRESS_SILENCE_S,
                    len(replica.requests),
                    extra=about("ingress_lost", ingress=ingress_id, requests=len(replica.requests)),
                )
                self._release(replica, list(replica.requests))

    def _replica(self, ingress_id: str) -> _Replica:
        if ingress_id not in self._replicas:
            self._replicas[ingress_id] = _Replica()
            self._signs.heard(ingress_id, time.monotonic())
        return self._replicas[ingress_id]

    def _release(self, replica: _Replica, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            replica.requests.discard(request_id)
            self._executor.carry_out(self._directory.end_request(request_id, time.time()))
