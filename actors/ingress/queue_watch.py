"""Reports what waits and runs at one ingress replica."""

import asyncio
from typing import Protocol

from raydix.actors.metrics import ReplicaQueues
from raydix.engine.core.ingress.room import Room
from raydix.engine.serving.reader_pool import RequestReader
from raydix.engine.serving.request_table import RequestTable

PERIOD_S = 1.0  # interval between two reports to Ray's exporter, which no scrape reaches


class QueueMetrics(Protocol):
    """Metrics of queues (`raydix.actors.metrics.IngressMetrics`)."""

    def look(self, queues: ReplicaQueues) -> None: ...


class QueueWatch:
    """Looks at the queues of a replica whose reader has been started."""

    def __init__(self, metrics: QueueMetrics, requests: RequestTable, room: Room, reader: RequestReader) -> None:
        self._metrics = metrics
        self._requests = requests
        self._room = room
        self._reader = reader

    def look(self) -> None:
        """Report the queues of now."""
        load = self._reader.load
        self._metrics.look(
            ReplicaQueues(
                states=self._requests.states(),
                limit=self._room.max_requests,
                num_waiting_to_read=load.num_waiting,
                num_reading=load.num_reading,
                waiting_bytes=load.waiting_bytes,
            )
        )

    async def run(self) -> None:
        """Report again and again."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)
