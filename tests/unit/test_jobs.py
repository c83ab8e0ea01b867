"""A request's permits: each choice releases its own at its end, the job those of choices that never ran."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from raydix.actors.ingress.http import EventStreamResponse
from raydix.engine.api.assembler import ChoiceAssembler, Piece
from raydix.engine.api.responses import ResponseHead
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.errors import RaydixError
from raydix.engine.core.ingress.detokenizer import ByteDetokenizer
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.room import Room
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import CacheHints, FinishReason, Salt, Sampling, TokenEvent
from raydix.engine.serving.job import Answer, Job
from raydix.engine.serving.output import OutputProcessor

ANYONE = Tenant("anyone")


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room(10)
    yield room
    room.check_integrity()
    assert room.num_held == 0


def job_of(room: Room, num_choices: int) -> Job:
    answers = [
        Answer(
            Generation(f"r-{index}", (1, 2, 3), Sampling(1), Salt(), CacheHints()),
            ChoiceAssembler(ByteDetokenizer([b"a"]), (), False, 0),
            index,
            permit=permit,
        )
        for index, permit in enumerate(room.acquire(num_choices, ANYONE))
    ]
    head = ResponseHead("completion", "r", 0, "m")
    spec = GenerationSpec(kind="completion", model="m", prompts=((1, 2, 3),), n=num_choices)
    return Job(request_id="r", spec=spec, tenant=ANYONE, head=head, answers=answers, arrived_at=0.0)


def test_a_choice_releases_its_permit_when_it_ends(room: Room) -> None:
    job = job_of(room, 2)
    for num_left, answer in zip((1, 0), job.answers, strict=True):
        with answer.running():
            assert room.num_held == num_left + 1
        assert room.num_held == num_left
    job.close()


def test_a_permit_is_free_when_its_last_piece_comes(room: Room) -> None:
    first, other = job_of(room, 2).answers

    async def generate(generation: Generation) -> AsyncGenerator[list[TokenEvent]]:
        for position, finish in enumerate((None, FinishReason.LENGTH)):
            yield [TokenEvent("r", 0, position, 0, finish, None, 0)]

    def stopped(generation: Generation) -> None:
        raise AssertionError("no stop string")

    async def held() -> list[int]:
        nobody: Any = None
        output = OutputProcessor(generate, stopped, nobody)
        return [room.num_held async for _ in output.pieces(first)]

    assert asyncio.run(held()) == [2, 1]
    with other.running() as over:
        over()
        assert room.num_held == 0


def test_a_choice_that_fails_releases_its_permit_and_the_job_those_of_the_others(room: Room) -> None:
    job = job_of(room, 3)
    with pytest.raises(ZeroDivisionError), job.answers[0].running():
        raise ZeroDivisionError
    assert room.num_held == 2
    job.close()
    assert room.num_held == 0


def test_a_running_choice_keeps_its_permit_when_its_job_is_closed(room: Room) -> None:
    job = job_of(room, 2)
    with job.answers[0].running():
        job.close()
        assert room.num_held == 1


def test_tokens_of_drafts_behind_a_stop_string_are_no_part_of_the_answer(room: Room) -> None:
    job = job_of(room, 1)
    [answer] = job.answers
    answer.generation.accepted, answer.generation.num_rejected = [1, 2, 4, 5], 3
    answer.take(Piece("one", (7, 8, 9), (), None))
    assert (answer.usage().accepted_tokens, answer.usage().rejected_tokens) == (2, 3)
    answer.take(Piece(" two", (7,), (), FinishReason.STOP))
    assert (answer.usage().accepted_tokens, answer.usage().rejected_tokens) == (2, 5)
    job.close()


def test_a_choice_runs_once(room: Room) -> None:
    job = job_of(room, 1)
    with job.answers[0].running():
        pass
    with pytest.raises(AssertionError, match="runs once"), job.answers[0].running():
        pass


@pytest.mark.parametrize("num_turns", range(1, 7))
def test_a_stream_that_ends_early_leaves_no_permit_held(room: Room, num_turns: int) -> None:
    """The response is cancelled after `num_turns` of the event loop: before its first event, after it, at its end."""
    job = job_of(room, 2)

    async def events() -> AsyncGenerator[bytes]:
        for answer in job.answers:
            with answer.running():
                yield b"data: 1\n\n"
                await asyncio.sleep(0)

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    async def send(message: object) -> None:
        pass

    def fail(error: RaydixError) -> None:
        raise error

    async def run() -> None:
        response = asyncio.create_task(EventStreamResponse(events(), fail, job.close)({"type": "http"}, receive, send))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        response.cancel()
        await asyncio.gather(response, return_exceptions=True)

    asyncio.run(run())
