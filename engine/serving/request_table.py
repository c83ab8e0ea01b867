"""Table of one replica's requests, under way and lately ended, for people who look at the server.

A request costs an entry in a dictionary, and one row when it ends. The rows of requests under way are made of their
jobs when somebody asks, so that nothing is computed while nobody looks. No row has text of a prompt or of an answer.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import orjson

from raydix.engine.core.errors import OverloadedError
from raydix.engine.core.tenants import Tenant
from raydix.engine.serving.accounting import outcome_of
from raydix.engine.serving.job import Job

Row: TypeAlias = dict[str, Any]

NUM_ENDED = 100  # ended requests remembered of each tenant
# Requests under way, the oldest ones, and as many ended ones, the latest, in one answer; the counts have all.
MAX_ROWS = 200
PERIOD_S = 0.5  # interval between two looks at the table for a follower
MAX_FOLLOWERS = 8  # followers of each tenant at the same time, so that none keeps the others out


class State(StrEnum):
    """Part of a request's life."""

    WAITING = "waiting"
    """No worker has the request yet."""
    PREFILLING = "prefilling"
    """A worker has it, and computes the prompt or will; no token has come."""
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the requests that a table has had, those under way included. Tokens of a prompt count from the first
    token of the answer on, when it is known how many were cached."""

    num_ended: int
    num_prompt: int
    num_cached: int
    num_generated: int
    num_waiting: int
    """Of now, as those below."""
    num_prefilling: int
    num_decoding: int

    @property
    def num_under_way(self) -> int:
        """Requests of now."""
        return self.num_waiting + self.num_prefilling + self.num_decoding


class RequestTable:
    """The requests of one replica. `clock` is that of the jobs' times, `wall` gives times for people."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        period_s: float = PERIOD_S,
    ) -> None:
        self._clock = clock
        # Monotonic clocks of different processes have nothing in common; the wall's is for people to read.
        self._wall_offset_s = wall() - clock()
        """Read once, so that the time of an arrival is the same in each row of a request."""
        self._period_s = period_s
        # Jobs in the order of their beginning, by a number: clients may give two requests the same name.
        self._under_way: dict[int, Job] = {}
        # Rows by tenant, the latest first. Tenants are configured, so there are few.
        self._ended: defaultdict[str, deque[Row]] = defaultdict(lambda: deque(maxlen=NUM_ENDED))
        self._num_begun = self._num_ended = 0
        self._past = (0, 0, 0)  # tokens of ended requests: of prompts, cached, generated
        self._num_followers: Counter[str] = Counter()  # followers by tenant

    @contextmanager
    def shown(self, job: Job) -> Iterator[None]:
        """Have a request in the table: under way until the block ends, and as ended from then on."""
        number = self._num_begun = self._num_begun + 1
        self._under_way[number] = job
        try:
            yield
        finally:
            del self._under_way[number]
            self._num_ended += 1
            self._past = _added(self._past, job)
            self._ended[job.tenant.name].appendleft(self._row(number, job, ended_at=self._clock()))

    def report(self, tenant: Tenant) -> Row:
        """The tenant's own requests, for an administrator all: those under way, oldest first, and the latest ended."""
        under_way = self._jobs_of(tenant)
        states = Counter(state_of(job) for _, job in under_way)
        return {
            "object": "requests",
            "counts": {str(state): states[state] for state in State if state is not State.ENDED},
            "requests": [self._row(number, job) for number, job in under_way[:MAX_ROWS]] + self._ended_of(tenant),
        }

    def states(self) -> dict[str, int]:
        """Numbers of requests under way by state, of all tenants."""
        states = Counter(map(state_of, self._under_way.values()))
        return {str(state): states[state] for state in State if state is not State.ENDED}

    def totals(self) -> Totals:
        """The sums of now, of all tenants."""
        tokens = self._past
        for job in self._under_way.values():
            tokens = _added(tokens, job)
        states = self.states()
        counts = (states[state] for state in (State.WAITING, State.PREFILLING, State.DECODING))
        return Totals(self._num_ended, *tokens, *counts)

    async def events(self, tenant: Tenant) -> AsyncGenerator[bytes]:
        """Server-sent events `requests`, each with the counts and the rows that are new or have changed.

        Raises:
            OverloadedError: the tenant has as many followers already as a replica takes of one.
        """
        if self._num_followers[tenant.name] >= MAX_FOLLOWERS:
            raise OverloadedError(
                f"{MAX_FOLLOWERS} of your clients follow the requests and no more are accepted; try again later",
                retry_after_s=5,
            )
        self._num_followers[tenant.name] += 1
        try:
            sent: dict[int, bytes] = {}
            is_first = True
            while True:
                report = self.report(tenant)
                rows = {row["number"]: orjson.dumps(row) for row in report["requests"]}
                # Compared as bytes, since that is what the follower has; a row that left the table is simply no longer
                # sent.
                changed = [data for number, data in rows.items() if sent.get(number) != data]
                if changed or is_first:
                    parts = orjson.dumps(report["counts"]), b",".join(changed)
                    yield b'event: requests\ndata: {"counts":%s,"requests":[%s]}\n\n' % parts
                sent, is_first = rows, False
                await asyncio.sleep(self._period_s)
        finally:
            self._num_followers[tenant.name] -= 1

    def _jobs_of(self, tenant: Tenant) -> list[tuple[int, Job]]:
        return [(n, job) for n, job in self._under_way.items() if tenant.is_admin or job.tenant.name == tenant.name]

    def _ended_of(self, tenant: Tenant) -> list[Row]:
        if not tenant.is_admin:
            return list(self._ended.get(tenant.name, ()))
        rows = sorted((row for own in self._ended.values() for row in own), key=lambda row: -row["ended_at"])
        return rows[:MAX_ROWS]

    def _row(self, number: int, job: Job, ended_at: float | None = None) -> Row:
        """A row of the table. Times are in seconds since the arrival, but `arrived_at` and `ended_at` in seconds since
        1970. `workers` are those of the last attempts, and where none is placed, of none."""
        generations = [answer.generation for answer in job.answers]
        usage = job.usage()
        firsts = [answer.first_token_at for answer in job.answers if answer.first_token_at is not None]
        placed = [each.first_placed_at for each in generations if each.first_placed_at]
        # Placed a second time: the worker of the first attempt died, or gave the request up.
        moved = [each.placed_at for each in generations if each.placed_at > each.first_placed_at]
        return {
            "number": number,
            "id": job.head.id,
            "request": job.request_id,
            "tenant": job.tenant.name,
            "kind": _kind(job),
            "stream": job.spec.form.stream,
            "state": State.ENDED if ended_at is not None else state_of(job),
            "outcome": None if ended_at is None else outcome_of(job),
            "choices": len(job.answers),
            "attempts": 1 + max(each.attempt for each in generations),
            "priority": max(each.priority for each in generations),
            "prefill_workers": _names(each.prefill for each in generations),
            "decode_workers": _names(each.decode for each in generations),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "imported_tokens": min(usage.cached_tokens, sum(each.imported_tokens for each in generations)),
            "generated_tokens": usage.completion_tokens,
            "max_tokens": max(each.sampling.max_tokens for each in generations),
            "accepted_tokens": usage.accepted_tokens,
            "preemptions": sum(each.num_preemptions for each in generations),
            "arrived_at": round(job.arrived_at + self._wall_offset_s, 3),
            "ended_at": None if ended_at is None else round(ended_at + self._wall_offset_s, 3),
            "placed_s": _since(job, min(placed, default=None)),
            "moved_s": _since(job, max(moved, default=None)),
            "first_token_s": _since(job, min(firsts, default=None)),
            "ended_s": _since(job, ended_at),
        }


def state_of(job: Job) -> State:
    """The state of a request under way: of several choices that of the one that has come farthest."""
    generations = [answer.generation for answer in job.answers]
    if any(each.tokens for each in generations):
        return State.DECODING
    return State.PREFILLING if any(each.prefill is not None for each in generations) else State.WAITING


def _added(tokens: tuple[int, int, int], job: Job) -> tuple[int, int, int]:
    """Tokens of prompts, cached and generated ones, with those of a job whose prompt is computed."""
    if all(answer.first_token_at is None for answer in job.answers):
        return tokens
    usage = job.usage()
    return tokens[0] + usage.prompt_tokens, tokens[1] + usage.cached_tokens, tokens[2] + usage.completion_tokens


def _since(job: Job, at: float | None) -> float | None:
    return None if at is None else round(max(0.0, at - job.arrived_at), 4)


def _kind(job: Job) -> str:
    """What was asked for: chat, completion, messages, responses, embedding or scoring."""
    spec = job.spec
    if spec.embedding is not None:
        return "embedding"
    if spec.scoring is not None:
        return "scoring"
    return spec.kind if spec.api == "openai" else spec.api


def _names(workers: Iterable[str | None]) -> list[str]:
    return sorted({worker for worker in workers if worker is not None})
