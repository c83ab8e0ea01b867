"""A trace of this replica, the manager and all workers for some seconds, in Chrome's format, which Perfetto shows.

Each process has its rows: a worker its steps, its transfers of KV, and one row for each request with the parts of steps
that computed it; the manager its decisions; the replica one row for each request with the time that each token took.
Arrows lead from the end of a prefill to the worker that takes the request over. All times are seconds since the epoch
in each process, so that between nodes they are as exact as the nodes' clocks.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime

import orjson
from ray.exceptions import RayError

from raydix.actors.calls import answer
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.rpc import WorkerClient
from raydix.actors.tracing import Recorded, Recorder, Span
from raydix.configs.sections import MANAGER
from raydix.engine.api.responses import Json
from raydix.engine.core.errors import OverloadedError, ServiceError
from raydix.engine.core.types import WorkerInfo

TIMEOUT_S = 5.0  # limit of one worker's answer, besides the recording
US = 1e6


class ClusterTrace:
    """Records traces, one at a time."""

    def __init__(
        self,
        own: Recorder,
        workers: Callable[[], Sequence[WorkerInfo]],
        find: Callable[[str, int], Awaitable[WorkerClient | None]],
        manager: ManagerLink,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`workers` lists the workers to ask; `find` gives a worker's client, by id and epoch. `timeout_s` is the limit
        of an answer, besides the recording."""
        self._manager = manager
        self._own = own
        self._workers = workers
        self._find = find
        self._timeout_s = timeout_s

    async def record(self, seconds: float) -> bytes:
        """Record for so long; returns the trace as JSON. Raises OverloadedError while another one is recorded here."""
        if self._own.is_on:
            raise OverloadedError("A trace is being recorded; try again later.", retry_after_s=int(seconds) + 1)
        workers, began_at = self._workers(), time.time()
        asked = asyncio.gather(self._of_manager(seconds), *(self._of_worker(each, seconds) for each in workers))
        own, others = await asyncio.gather(self._own.record(seconds), asked)
        names = [MANAGER, *(worker.worker_id for worker in workers)]
        missing = [name for name, each in zip(names, others, strict=True) if each is None]
        answered = [own, *(each for each in others if each is not None)]
        # Not in the event loop: a full trace is some hundred thousand objects.
        return await asyncio.to_thread(_written, answered, missing, began_at)

    async def _of_manager(self, seconds: float) -> Recorded | None:
        """None if the manager does not answer in time."""
        try:
            return await self._manager.ask(lambda manager: manager.trace(seconds), timeout_s=seconds + self._timeout_s)
        except ServiceError:
            return None

    async def _of_worker(self, worker: WorkerInfo, seconds: float) -> Recorded | None:
        """None if the worker does not answer in time."""
        try:
            async with asyncio.timeout(seconds + self._timeout_s):
                client = await self._find(worker.worker_id, worker.epoch)
                return None if client is None else await answer(client.trace(seconds))
        except (RayError, TimeoutError):
            return None


def _written(recorded: Sequence[Recorded], missing: Sequence[str], began_at: float) -> bytes:
    return orjson.dumps(chrome_trace(recorded, missing, began_at), default=str)


def chrome_trace(recorded: Sequence[Recorded], missing: Sequence[str], began_at: float) -> Json:
    """The recordings as a Chrome trace, with microseconds since its start: `began_at`, or the beginning of a span that
    was under way then. `missing` names processes that did not answer."""
    zero = min([began_at, *(span.started_at for each in recorded for span in each.spans)])
    events = [event for pid, each in enumerate(recorded, start=1) for event in _events_of(pid, each, zero)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "started_at": datetime.fromtimestamp(zero, UTC).isoformat(),
            "dropped": sum(each.num_dropped for each in recorded),
            "missing": list(missing),
        },
    }


def _events_of(pid: int, recorded: Recorded, zero: float) -> Iterator[Json]:
    yield _named(pid, 0, "process_name", f"{recorded.kind} {recorded.process}")
    rows: dict[str, list[Span]] = {}
    for span in sorted(recorded.spans, key=lambda span: (span.started_at, -span.seconds)):
        rows.setdefault(span.row, []).append(span)
    tid = 0
    for row, spans in rows.items():
        for lane in _lanes(spans):
            tid += 1
            yield _named(pid, tid, "thread_name", row)
            for span in lane:
                yield from _events(pid, tid, span, zero)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of one row, ascending, in as few lines as need be so that none overlaps another on its line."""
    lanes: list[list[Span]] = []
    for span in spans:
        for lane in lanes:
            # Times of a trace are in microseconds: a wait ends where the step that ended it begins.
            if lane[-1].started_at + lane[-1].seconds <= span.started_at + 1 / US:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _events(pid: int, tid: int, span: Span, zero: float) -> Iterator[Json]:
    at: Json = {"pid": pid, "tid": tid, "ts": round((span.started_at - zero) * US)}
    # A span without a length could not be seen, nor an arrow begin at it.
    length = max(1, round(span.seconds * US))
    yield {**at, "ph": "X", "cat": span.row, "name": span.name, "dur": length, "args": dict(span.about)}
    if span.transfer:
        flow: Json = {**at, "cat": "hand-over", "name": "hand-over", "id": span.transfer}
        yield {**flow, "ph": "f", "bp": "e"} if span.is_arrival else {**flow, "ph": "s"}


def _named(pid: int, tid: int, what: str, name: str) -> Json:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
