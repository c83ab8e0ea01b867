"""The line of a replica's load: what it counts, and that there is none without load."""

import json
import logging
from typing import Any

import pytest

from raydix.engine.core.tenants import EVERYONE
from raydix.engine.core.types import Admission
from raydix.engine.serving.load_log import LoadLog
from tests.unit.ingress import ANSWER, MODEL, Replica, Served


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    found = [vars(record)["about"] for record in caplog.records if record.name == "raydix.engine.serving.load_log"]
    caplog.clear()
    return found


def test_a_line_has_what_was_served_since_the_last_one(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica = Replica()
    now = [100.0]
    log = LoadLog(replica.requests, lambda: now[0])

    def look() -> list[Any]:
        now[0] += 10.0
        log.look()
        return lines(caplog)

    async def life() -> None:
        assert look() == [], "nothing has come"
        body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 20}).encode()
        job = await replica.frontend.preparation.of_body("completion", body, EVERYONE)
        [answer] = job.answers
        with replica.frontend.accounted(job):
            [waiting] = look()
            assert (waiting["waiting"], waiting["prompt_tokens"], waiting["over_s"]) == (1, 0, 10.0)
            answer.generation.place(Admission("r", 0, "p", "d", 1, 1, (), ()), 4, job.arrived_at)
            [prefilling] = look()
            assert (prefilling["waiting"], prefilling["prefilling"], prefilling["ended"]) == (0, 1, 0)
            pieces = replica.output.pieces(answer)
            await anext(pieces)
            [decoding] = look()
            assert (decoding["decoding"], decoding["prompt_tokens"], decoding["cached_tokens"]) == (1, 2, 2)
            assert decoding["completion_tokens"] == 1
            async for _ in pieces:
                pass
        [ended] = look()
        assert (ended["ended"], ended["decoding"], ended["prompt_tokens"]) == (1, 0, 0)
        assert ended["completion_tokens"] == len(ANSWER), "without the one before"
        assert look() == [], "nothing more has come"

    served(replica, life)


def test_the_line_is_for_people(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica = Replica()
    now = [0.0]
    log = LoadLog(replica.requests, lambda: now[0])
    served(replica, lambda: replica.whole())
    now[0] = 2.0
    caplog.clear()
    log.look()
    [record] = caplog.records
    assert record.getMessage() == (
        "load: 1 prompt tokens/s (100 % cached), 4.5 tokens/s generated, 1 requests ended; now 0 decoding, "
        "0 prefilling, 0 waiting"
    )
