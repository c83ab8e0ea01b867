"""A cluster in virtual time: events from the heap until every request has ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from benchmarks.replaying.routers import Router
from benchmarks.replaying.traces import TraceRequest
from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker

ASK_AGAIN_S = 0.25  # between two questions of a paused request, as at an ingress replica


class Cluster:
    """Runs a trace on workers behind a router."""

    def __init__(
        self,
        workers: Sequence[ReplayWorker],
        router: Router,
        on_end: Callable[[ReplayedRequest, float], None] | None = None,
    ) -> None:
        """`on_end`: called at the end of each job."""
        self.workers = {worker.worker_id: worker for worker in workers}
        self.router = router
        self._on_end = on_end
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0

    def run(self, trace: Sequence[TraceRequest]) -> Iterator[ReplayedRequest]:
        """Yields each job on its arrival; at the end all have ended (or are refused: no blocks)."""
        for number, request in enumerate(trace):
            while self._events and self._events[0][0] <= request.arrival_s:
                self._next()
            job = ReplayedRequest(number, request)
            self._arrive(job, request.arrival_s)
            yield job
        while self._events:
            self._next()

    def submit(self, job: ReplayedRequest) -> None:
        """Have a job arrive at its time, which is not in the past."""
        self._at(job.request.arrival_s, lambda now: self._arrive(job, now))

    def run_until(self, end_s: float) -> None:
        """Let everything happen that happens before a time."""
        while self._events and self._events[0][0] < end_s:
            self._next()

    def _next(self) -> None:
        now, _, happen = heapq.heappop(self._events)
        happen(now)

    def _at(self, when: float, happen: Callable[[float], None]) -> int:
        self._num_events += 1
        # The number keeps events of one time in their order, and no functions are compared.
        heapq.heappush(self._events, (when, self._num_events, happen))
        return self._num_events

    def _arrive(self, job: ReplayedRequest, now: float) -> None:
        pool = next(iter(self.workers.values())).pool
        num_blocks = len(job.request.hashes) - (-job.request.num_output_tokens // pool.block_size)
        # No worker could ever hold the request: it is refused, and has no blocks.
        if num_blocks > pool.num_blocks:
            return
        self._ask(job, now)

    def _ask(self, job: ReplayedRequest, now: float) -> None:
        """Have a job placed, which asks again while it is to pause."""
        route = self.router.route(job, now)
        if route is None:
            self._at(now + ASK_AGAIN_S, lambda then: self._ask(job, then))
            return
        job.prefill, job.decode = route
        worker = self.workers[job.prefill]
        worker.enqueue(job)
        self._start(worker, now)

    def _start(self, worker: ReplayWorker, now: float) -> None:
        """Start all work that can start on a worker: handed-over jobs first, since they have been computed."""
        while worker.incoming and worker.take_blocks(worker.incoming[0], now):
            job = worker.incoming.popleft()
            worker.publish(job)
            self._decode(worker, job, now)
        if worker.prefilling is None and worker.waiting and self._can_start(worker, worker.waiting[0], now):
            job = worker.waiting.popleft()
            self._at(worker.start_prefill(job, now), lambda then: self._prefilled(worker, job, then))
            self._set_timer(worker, now)
        self.router.pool_changed(worker)

    def _can_start(self, worker: ReplayWorker, job: ReplayedRequest, now: float) -> bool:
        if not job.promised:
            return worker.take_blocks(job, now)
        self.router.pool_changed(worker)
        return worker.take_blocks(job, now, self.router.num_reachable(job))

    def _prefilled(self, worker: ReplayWorker, job: ReplayedRequest, now: float) -> None:
        worker.end_prefill(now)
        worker.publish(job)
        job.first_token_s = now
        self.router.first_token(job)
        if job.decode == worker.worker_id:
            self._decode(worker, job, now)
        else:
            worker.give_back(job, now)
            took_s = worker.speeds.move_s(len(job.request.hashes))
            self._at(now + took_s, lambda then: self._handed_over(job, then))
            self._set_timer(worker, now)
        self._start(worker, now)

    def _handed_over(self, job: ReplayedRequest, now: float) -> None:
        worker = self.workers[job.decode]
        worker.incoming.append(job)
        self._start(worker, now)

    def _decode(self, worker: ReplayWorker, job: ReplayedRequest, now: float) -> None:
        worker.start_decode(job, now)
        self._set_timer(worker, now)

    def _set_timer(self, worker: ReplayWorker, now: float) -> None:
        """Wake up when the worker's next answer is complete; an earlier plan is void."""
        when = worker.next_decoded_s(now)
        if when is not None:
            timer = self._at(when, lambda then: self._decoded(worker, timer, then))
            worker.timer = timer

    def _decoded(self, worker: ReplayWorker, timer: int, now: float) -> None:
        # Another request has begun or ended since, which changed the pace.
        if worker.timer != timer:
            return
        job = worker.pop_decoded(now)
        worker.give_back(job, now)
        job.finished_s = now
        self.router.ended(job, now)
        if self._on_end is not None:
            self._on_end(job, now)
        self._set_timer(worker, now)
        self._start(worker, now)
