"""The id of a request in the log of each process that worked for it, so that one search tells its life."""

import asyncio
import logging
from typing import Any

import pytest

from tests.unit.ingress import Replica
from tests.unit.local_actors import answer_of
from tests.unit.test_data_plane import NUM_TOKENS, Scene, abouts, expected, prompt_of, scene
from tests.unit.waits import until

__all__ = ["scene"]


def lines_of(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    """Fields of the records about a request."""
    return [each for each in abouts(caplog) if each.get("request") == name]


def test_manager_and_both_workers_tell_of_a_request(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "raydix")

    async def play() -> None:
        manager, dispatcher = await scene.start()
        assert await answer_of(dispatcher, "r", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        # The bookkeeping of a worker's last step comes a turn of the event loop behind its tokens.
        await until(lambda: len([each for each in lines_of(caplog, "r") if each["event"] == "computed"]) == 2)
        [decision] = manager._directory.decisions.of("r")["r"]
        lines = lines_of(caplog, "r")
        placed, *others = lines
        assert (placed["event"], placed["attempt"], placed["tokens"]) == ("placed", 0, len(prompt_of(1)))
        assert (placed["prefill"], placed["decode"]) == (decision.prefill, decision.decode)
        taken = sorted(each["stage"] for each in others if each["event"] == "taken_on")
        assert taken == ["decode", "prefill"]
        computed = {each["stage"]: each for each in others if each["event"] == "computed"}
        assert computed["prefill"]["completion_tokens"] == 1
        assert computed["decode"]["completion_tokens"] == NUM_TOKENS, "with the one that was handed over"
        # As the ingress tells the prefill worker of each request that ends, which is nothing new to it.
        await scene.workers[decision.prefill].abort("r", 0, has_ended=True)
        assert len(lines_of(caplog, "r")) == 5

    scene.run(play())


def test_a_request_that_is_cut_short_has_a_line_at_its_worker(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raydix")

    async def play() -> None:
        _, dispatcher = await scene.start()
        crowd = await scene.begin(dispatcher, ["d0"])
        crowd.leave()
        scene.hold.end()
        await until(lambda: any(each["event"] == "aborted" for each in abouts(caplog)))

    scene.run(play())


def test_a_request_s_beginning_is_a_line_for_those_who_debug(caplog: pytest.LogCaptureFixture) -> None:
    for level, begun in ((logging.INFO, []), (logging.DEBUG, ["request_begun"])):
        caplog.clear()
        caplog.set_level(level, "raydix")
        replica = Replica()
        asyncio.run(replica.whole())
        assert [each["event"] for each in abouts(caplog) if each["event"].startswith("request")] == [*begun, "request"]
