"""Sending a workload: open loop, closed loop, conversations.

Every run ends by itself: `Limits` bounds the requests, the timeout bounds each, and an interrupt keeps the records so
far.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import workload
from benchmarks.load.arrivals import Limits, arrival_times, think_times
from benchmarks.load.client import Client, Record, Ticket, find_model, find_version
from benchmarks.load.options import BenchmarkError, Options
from benchmarks.load.progress import Progress
from benchmarks.load.workload import RequestShape

# A closed loop against a server that refuses at once must not become a busy loop.
PAUSE_AFTER_ERROR_S = 0.1

Issue = Callable[[Ticket], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Outcome:
    """All records of a run in the order of their ends, and the generator's own cost."""

    model: str
    server_version: str | None
    records: list[Record] = field(default_factory=list)
    cpu_fraction: float = 0.0
    interrupted: bool = False


async def run(options: Options) -> Outcome:
    """Find the server, warm it up, send the workload; raises BenchmarkError when the server cannot take it."""
    key = os.environ.get(options.api_key_env or "OPENAI_API_KEY")
    if options.api_key_env and not key:
        raise BenchmarkError(f"--api-key-env {options.api_key_env}: no such variable in the environment")
    async with Client(options, key) as client:
        outcome = Outcome(await find_model(client, options), await find_version(client))
        sender = Sender(
            options, client, RequestShape(outcome.model, options.output_tokens, options.extra_body), outcome
        )
        await sender.warm_up()
        await _measure(sender, outcome)
    return outcome


async def _measure(sender: Sender, outcome: Outcome) -> None:
    """Run the load between two readings of this process's CPU time."""
    gc.collect()
    gc.freeze()
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    sender.client.restart_clock()
    try:
        async with Progress(sender.limits, sender.client.now, outcome.records, sender.options.progress):
            await sender.load()
    except asyncio.CancelledError:
        outcome.interrupted = True
    finally:
        gc.unfreeze()
    outcome.cpu_fraction = (time.process_time() - cpu_s) / (time.perf_counter() - begin_s)


class Sender:
    """Turns options into requests; `load` is one whole run."""

    def __init__(self, options: Options, client: Client, shape: RequestShape, outcome: Outcome) -> None:
        self.options = options
        self.client = client
        self.limits = Limits(options.requests, options.duration)
        self._shape = shape
        self._records = outcome.records

    async def warm_up(self) -> None:
        """Send unmeasured requests one by one; the first failure is the user's to see before any load."""
        options = self.options
        for index in range(options.warmup):
            if options.workload == "chat":
                text = workload.user_text(options.seed, -2, index, options.input_tokens)
                path, body = "/v1/chat/completions", self._shape.chat_body([{"role": "user", "content": text}])
            else:
                prompt = workload.unique_prompt(options.seed, index, 64, options.vocab, workload.WARMUP)
                path, body = "/v1/completions", self._shape.completion_body(prompt)
            record = await self.client.send(path, body, Ticket(index))
            if record.error is not None:
                raise BenchmarkError(f"{options.url}{path}: {record.error}: {record.message}")

    async def load(self) -> None:
        """Send everything and wait for all answers."""
        chat = self.options.workload == "chat"
        issue = self._converse if chat else self._complete
        # Conversations are numbered apart from requests: a turn takes its number from the run's limits when sent.
        tickets = Limits(self.options.users, self.options.duration) if chat else self.limits
        if self.options.rate is not None:
            await self._open_loop(issue, tickets, self.options.rate)
        else:
            await self._closed_loop(issue, tickets)

    async def _open_loop(self, issue: Issue, tickets: Limits, rate: float) -> None:
        """Send each request when it is due, whatever the answers; lateness is this process's own and recorded."""
        async with asyncio.TaskGroup() as group:
            for due_s in arrival_times(rate, self.options.arrivals, self.options.seed):
                if not tickets.open(due_s):
                    return
                await asyncio.sleep(max(0.0, due_s - self.client.now()))
                index = tickets.take(due_s)
                assert index is not None
                group.create_task(issue(Ticket(index, late_s=self.client.now() - due_s)))

    async def _closed_loop(self, issue: Issue, tickets: Limits) -> None:
        """Keep `concurrency` under way, each followed by the next."""

        async def work() -> None:
            while (index := tickets.take(self.client.now())) is not None:
                await issue(Ticket(index))

        num_workers = self.options.concurrency
        if tickets.requests is not None:
            num_workers = min(num_workers, tickets.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())

    async def _complete(self, ticket: Ticket) -> None:
        options = self.options
        if options.workload == "shared":
            prompt = workload.shared_prompt(
                options.seed,
                ticket.index,
                options.shared_tokens,
                options.unique_tokens,
                options.vocab,
                options.prefixes,
            )
        else:
            prompt = workload.unique_prompt(options.seed, ticket.index, options.input_tokens, options.vocab)
        body = self._shape.completion_body(prompt)
        await self._keep(await self.client.send("/v1/completions", body, ticket))

    async def _converse(self, ticket: Ticket) -> None:
        """All turns of one user: the model's own answer becomes part of the next prompt. An error ends it."""
        options, user = self.options, ticket.index
        thinks = think_times(options.think, f"{options.seed} {user}")
        messages = workload.open_conversation(options.seed, options.shared_tokens)

        for turn in range(options.turns):
            if turn:
                await asyncio.sleep(next(thinks))

            index = self.limits.take(self.client.now())
            if index is None:
                return

            text = workload.user_text(options.seed, user, turn, options.input_tokens)
            messages.append({"role": "user", "content": text})
            body = self._shape.chat_body(messages)
            record = await self.client.send(
                "/v1/chat/completions",
                body,
                Ticket(index, 0.0 if turn else ticket.late_s, user, turn),
                keep_text=True,
            )
            await self._keep(record)
            if record.error is not None:
                return

            messages.append({"role": "assistant", "content": record.text})

    async def _keep(self, record: Record) -> None:
        self._records.append(record)
        if record.error is not None and self.options.rate is None:
            await asyncio.sleep(PAUSE_AFTER_ERROR_S)
