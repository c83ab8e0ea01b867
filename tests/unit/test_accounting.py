"""The account of requests: one log line and one set of observations each, however they end."""

import asyncio
import logging
from typing import Any

import pytest

from raydix.actors.metrics import OUTCOMES
from raydix.engine.api.generate import GenerateChunk, GenerateRequest
from raydix.engine.core.errors import RequestError, ServiceError
from raydix.engine.core.types import FinishReason
from raydix.engine.serving.accounting import FinishedRequest
from tests.unit.ingress import ANSWER, Replica

NUM_TOKENS = len(ANSWER) + 1


def lines(caplog: pytest.LogCaptureFixture, event: str = "request") -> list[dict[str, Any]]:
    """Fields of the log records of one event."""
    return [record.about for record in caplog.records if record.about.get("event") == event]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raydix")


def test_a_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    asyncio.run(replica.whole())
    # The clock says 1 at the arrival, 2 at the first token, 3 at the end.
    hits = {"local": 2, "imported": 0}
    expected = FinishedRequest(
        tenant="anonymous",
        outcome="stop",
        num_prompt=2,
        num_generated=NUM_TOKENS,
        hits=hits,
        ttft_s=1.0,
        tpot_s=1 / (NUM_TOKENS - 1),
        duration_s=2.0,
        decode_s=1.0,
        operation="text_completion",
        num_longest=NUM_TOKENS,
        max_tokens=20,
    )
    assert replica.ledger.ended == [expected]
    [line] = lines(caplog)
    assert line["outcome"] == "stop" and line["error"] is None and line["hits"] == hits
    assert (line["ttft_s"], line["duration_s"], line["choices"], line["attempts"]) == (1.0, 2.0, 1, 1)
    assert ANSWER not in caplog.text


def test_a_prompt_that_no_worker_began_was_not_computed() -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 0
    with pytest.raises(ServiceError):
        asyncio.run(replica.whole())
    [ended] = replica.ledger.ended
    assert (ended.outcome, ended.num_prompt, ended.num_computed) == ("failed", 2, 0)


def test_usage_counts_a_prompt_once_and_tokens_of_every_choice() -> None:
    replica = Replica()
    asyncio.run(replica.whole(prompt=["abc", "d"], n=2, max_tokens=3))
    [ended] = replica.ledger.ended
    assert (ended.num_prompt, ended.num_generated, ended.outcome) == (4, 12, "length")
    assert ended.hits == {"local": 3, "imported": 0}, "no more hits than prompt tokens"
    assert ended.tpot_s is None, "the time per token is one choice's"


def test_imported_tokens_are_hits_of_their_own() -> None:
    async def run() -> FinishedRequest:
        replica = Replica()
        job = await replica.job()
        job.answers[0].generation.imported_tokens = 1
        with replica.frontend.accounted(job):
            await replica.frontend.output.collect(job)
        return replica.ledger.ended[0]

    assert asyncio.run(run()).hits == {"local": 1, "imported": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_the_middle(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 3
    with pytest.raises(ServiceError, match="every worker died"):
        asyncio.run(replica.streamed() if stream else replica.whole())
    [ended] = replica.ledger.ended
    assert (ended.outcome, ended.num_generated) == ("failed", 3)
    [line] = lines(caplog)
    assert line["error"] == ServiceError.code


def test_a_client_that_leaves_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> Replica:
        replica = Replica()
        replica.dispatcher.hangs_after = 2
        job = await replica.job(stream=True)
        events = replica.frontend.events(job, replica.frontend.renderer(job))
        await anext(events)
        await anext(events)
        assert not replica.ledger.ended
        await events.aclose()
        return replica

    replica = asyncio.run(run())
    assert [(ended.outcome, ended.num_generated) for ended in replica.ledger.ended] == [("aborted", 2)]
    assert len(lines(caplog)) == 1
    assert replica.dispatcher.ended


def test_a_request_that_never_had_a_token() -> None:
    async def run() -> Replica:
        replica = Replica()
        job = await replica.job()
        with replica.frontend.accounted(job):
            pass
        return replica

    [ended] = asyncio.run(run()).ledger.ended
    assert (ended.outcome, ended.ttft_s, ended.tpot_s, ended.num_generated) == ("aborted", None, None, 0)


def test_a_choice_that_ended_before_another_failed_is_no_success() -> None:
    async def run() -> Replica:
        replica = Replica()
        job = await replica.job(n=2)
        job.answers[0].finish = FinishReason.STOP
        job.answers[1].generation.failure = ServiceError("x")
        with replica.frontend.accounted(job):
            pass
        return replica

    [ended] = asyncio.run(run()).ledger.ended
    assert ended.outcome == "failed"


def test_every_outcome_is_declared() -> None:
    replica = Replica()
    asyncio.run(replica.whole())
    asyncio.run(replica.whole(max_tokens=1))
    assert {ended.outcome for ended in replica.ledger.ended} | {"failed", "aborted"} == set(OUTCOMES)


class TestHandle:
    """Requests of other Ray programs."""

    def test_a_whole_answer(self) -> None:
        replica = Replica()
        request = GenerateRequest(
            prompt="hi", max_tokens=3, logprobs=1, prompt_logprobs=0, return_token_ids=True, request_id="r"
        )
        answer = asyncio.run(replica.frontend.generate(request))
        assert (answer.request_id, answer.text, answer.finish_reason) == ("r", ANSWER[:3], FinishReason.LENGTH)
        assert answer.token_ids == tuple(ANSWER[:3].encode()) and answer.prompt_token_ids == (104, 105)
        assert answer.logprobs is not None and len(answer.logprobs) == 3
        assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
        assert answer.usage.completion_tokens == 3
        assert len(replica.ledger.ended) == 1

    def test_a_stream(self) -> None:
        async def run(replica: Replica) -> list[GenerateChunk]:
            request = {"prompt": "hi", "prompt_logprobs": 0, "return_token_ids": True}
            return [chunk async for chunk in replica.frontend.stream(request)]

        replica = Replica()
        first, *middle, last = asyncio.run(run(replica))
        assert "".join(chunk.text for chunk in (first, *middle, last)) == ANSWER
        assert first.prompt_token_ids == (104, 105) and first.prompt_logprobs is not None
        assert {chunk.prompt_logprobs for chunk in (*middle, last)} == {None}
        assert {chunk.usage for chunk in (first, *middle)} == {None}
        assert last.usage is not None and last.finish_reason is FinishReason.STOP
        assert [ended.outcome for ended in replica.ledger.ended] == ["stop"]

    def test_refused_requests_are_counted_and_raised(self, caplog: pytest.LogCaptureFixture) -> None:
        replica = Replica()

        async def stream() -> None:
            async for _ in replica.frontend.stream({"prompt": "hi", "max_tokens": -1}):
                pass

        async def run() -> None:
            with pytest.raises(RequestError, match="max_tokens"):
                await stream()
            with pytest.raises(RequestError, match="no tenant 'x'"):
                await replica.frontend.generate({"prompt": "hi", "tenant": "x"})

        asyncio.run(run())
        assert lines(caplog, "refusals")[0]["counts"] == {"invalid_request": 1}
        assert replica.ledger.ended == []

    def test_an_unforeseen_error_is_logged_and_raised(self, caplog: pytest.LogCaptureFixture) -> None:
        replica = Replica()
        replica.reader.failure = KeyError("x")
        with pytest.raises(KeyError):
            asyncio.run(replica.frontend.generate({"prompt": "hi"}))
        assert len(lines(caplog, "unexpected_error")) == 1

    def test_a_stream_that_fails(self) -> None:
        replica = Replica()
        replica.dispatcher.fails_after = 1

        async def run() -> list[str]:
            texts = []
            with pytest.raises(ServiceError, match="every worker died"):
                async for chunk in replica.frontend.stream({"prompt": "hi"}):
                    texts.append(chunk.text)
            return texts

        assert asyncio.run(run()) == ["o"]
        assert [ended.outcome for ended in replica.ledger.ended] == ["failed"]
