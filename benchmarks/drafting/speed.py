"""Speed of a workload with drafts and without, in turns, with a number of streams.

Each stream is a client that asks the questions of the workload one after the other, every client from another one on
and with seeds of its own. Clients share the KV of prompts, which a turn before the first has computed; what an earlier
round has answered is forgotten, so answers are drafted from what the same client asked in the same round.
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise

from benchmarks.drafting.engines import SteppedWorker, Workshop
from benchmarks.drafting.questions import Question
from benchmarks.drafting.statistics import AnsweredWorkload, since
from raydix.engine.core.types import Assignment, DraftSource
from raydix.engine.core.worker.drafts.draft import DraftCounts

MODES = ("off", "auto")
Client = list[Assignment]


class Speed:
    """Two engines, with drafts and without, that take turns."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self.workers: dict[str, SteppedWorker] = {}
        for mode in MODES:
            grammars = workshop.grammars()
            drafter = workshop.drafter(grammars) if mode == "auto" else None
            self.workers[mode] = SteppedWorker(workshop.engine(grammars, drafter))

    def measure(
        self, questions: Sequence[Question], num_streams: int, rounds: int, *, asked_before: bool
    ) -> dict[str, list[AnsweredWorkload]]:
        """The turns of each mode; every other round goes the other way round."""
        turns: dict[str, list[AnsweredWorkload]] = {mode: [] for mode in MODES}
        for number in range(-1, rounds):  # the first one computes the prompts and warms up
            for mode in sorted(MODES, reverse=number % 2 == 0):
                turn = self._turn(mode, clients_of(questions, num_streams), asked_before)
                if number >= 0:
                    turns[mode].append(turn)
        return turns

    def _turn(self, mode: str, clients: Sequence[Client], asked_before: bool) -> AnsweredWorkload:
        """Answer all clients' questions once."""
        worker = self.workers[mode]
        engine = worker.engine
        if engine.drafter is not None and engine.grammars is not None:
            engine.drafter = self._workshop.drafter(engine.grammars)  # knows no answer
        if asked_before:
            _answer(worker, [[_again(each) for each in client] for client in clients])
        return _answer(worker, clients)


def clients_of(questions: Sequence[Question], num_streams: int) -> list[Client]:
    """The questions of each stream, in order, under names of their own."""
    clients = []
    for stream in range(num_streams):
        first = stream % len(questions)
        numbered = list(enumerate(questions))
        clients.append(
            [
                replace(question, sampling=replace(question.sampling, seed=question.sampling.seed + stream)).assignment(
                    f"{question.workload} {stream} {number}", stream.to_bytes(4)
                )
                for number, question in numbered[first:] + numbered[:first]
            ]
        )
    return clients


def _again(assignment: Assignment) -> Assignment:
    return replace(assignment, request_id=f"{assignment.request_id} before")


def _answer(worker: SteppedWorker, clients: Sequence[Client]) -> AnsweredWorkload:
    """Have each client ask its questions one after the other."""
    following = {one.request_id: other for client in clients for one, other in pairwise(client)}
    num_left = sum(map(len, clients))
    worker.answers = {}
    before, started = counts_now(worker), time.perf_counter()
    for client in clients:
        worker.submit(client[0])
    while num_left:
        for event in worker.step():
            num_left -= 1
            if event.request_id in following:
                worker.submit(following[event.request_id])

    answers = worker.answers
    seconds = max(answer.times[-1] for answer in answers.values()) - started
    return AnsweredWorkload(
        tokens=sum(len(answer.token_ids) for answer in answers.values()),
        seconds=seconds,
        decode_tokens=sum(len(answer.token_ids) - 1 for answer in answers.values()),
        decode_s=sum(answer.seconds for answer in answers.values()),
        decode_steps=sum(len(answer.times) - 1 for answer in answers.values()),
        drafts=since(counts_now(worker), before),
        answers=blake2b(repr(sorted((name, it.token_ids) for name, it in answers.items())).encode()).hexdigest(),
    )


def counts_now(worker: SteppedWorker) -> dict[DraftSource, DraftCounts]:
    """Drafts so far, by source."""
    return deepcopy(worker.engine.scheduler.drafting.counts)
