"""The events of one worker on their way to ingress replicas."""

import asyncio
from dataclasses import replace

from raydix.actors.worker.token_streams import TokenStreams
from raydix.engine.core.types import AttemptOver, TokenEvent
from tests.unit.builders import make_assignment

INGRESS = "ingress"


def event(position: int) -> TokenEvent:
    token = 100 + position
    return TokenEvent("a", 0, position, token_id=token, finish=None, logprobs=None, cached_tokens=0)


def test_a_replica_that_is_given_up_gets_what_waits_for_it_before_the_end() -> None:
    async def play() -> None:
        streams = TokenStreams()
        streams.begin([make_assignment("a")])
        reader = streams.read(INGRESS)
        streams.put([event(0)])
        assert await anext(reader) == [event(0)]
        streams.put([event(1), event(2)])
        assert streams.drop_silent(-1.0) == {INGRESS: [("a", 0)]}
        assert [events async for events in reader] == [[event(1), event(2)]]

    asyncio.run(play())


def test_a_replica_that_is_given_up_with_nothing_waiting_gets_the_end() -> None:
    async def play() -> None:
        streams = TokenStreams()
        streams.begin([make_assignment("a")])
        reader = streams.read(INGRESS)
        waiting = asyncio.ensure_future(anext(reader, None))
        await asyncio.sleep(0)
        assert streams.drop_silent(-1.0) == {INGRESS: [("a", 0)]}
        assert await waiting is None
        assert streams.drop_silent(-1.0) == {}

    asyncio.run(play())


def test_a_later_reader_takes_over() -> None:
    async def play() -> None:
        streams = TokenStreams()
        streams.begin([make_assignment("a")])
        first, second = streams.read(INGRESS), streams.read(INGRESS)
        waiting = asyncio.ensure_future(anext(first, None))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        streams.put([event(0)])
        assert (await later, await waiting) == ([event(0)], None)

    asyncio.run(play())


def test_calls_of_an_earlier_attempt_come_too_late_for_a_later_one() -> None:
    """Ray does not keep the order of calls."""

    async def play() -> None:
        streams = TokenStreams()
        earlier, later = make_assignment("a"), replace(make_assignment("a"), attempt=1)
        streams.begin([later])
        streams.begin([earlier])
        assert not streams.attempts.forget("a", 0)
        token = event(0)._replace(attempt=1)
        streams.put([token])
        assert await anext(streams.read(INGRESS)) == [token]
        assert streams.attempts.forget("a", 1)
        assert streams.attempts.forget("a", 1), "unknown"

    asyncio.run(play())


def test_an_attempt_is_called_over_behind_its_last_event() -> None:
    async def play() -> None:
        streams = TokenStreams()
        streams.begin([make_assignment("a")])
        streams.put([event(0)])
        streams.attempts.end("a", 0)
        over = AttemptOver("a", 0)
        assert streams.compare(INGRESS, [over], [], 1.0) == []
        assert await anext(streams.read(INGRESS)) == [event(0), over]

    asyncio.run(play())
