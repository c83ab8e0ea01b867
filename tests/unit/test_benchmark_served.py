"""The loads of `benchmarks.served`, and what it makes of their figures."""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.conversations import ConversationLoad, ConversationTurn, figures, measure
from benchmarks.peers.roster import Site
from benchmarks.served import SCENARIOS, random_prompts, raydix_servers, row, table, vllm_program

LOADER = """
import json, sys
given = dict(zip(sys.argv, sys.argv[1:]))
json.dump(sys.argv, open("said.json", "w"))
result = {"completed": 2, "num_prompts": int(given["--num-prompts"]), "itls": [[0.01, 0.04], [0.02]]}
result |= {"output_throughput": 10.0, "median_ttft_ms": 5.0}
json.dump(result, open(given["--result-filename"], "w"))
"""

FIGURES = {
    "output_tokens_per_s": 200.0,
    "first_token_ms": 80.0,
    "later_first_token_ms": 60.0,
    "longest_gap_ms": 30.0,
}


def test_each_load_is_read_three_ways() -> None:
    for scenario in SCENARIOS:
        own, first_token, gap = scenario.readings()
        assert own == scenario and FIGURES[own.figure] in (200.0, 60.0)
        assert (FIGURES[first_token.figure], FIGURES[gap.figure]) == (80.0, 30.0)
    names = [reading.name for scenario in SCENARIOS for reading in scenario.readings()]
    assert len(set(names)) == len(names)


def test_the_random_prompts_of_vllm_are_read(tmp_path: Path) -> None:
    """A program in place of vLLM's writes its arguments, and a result with the fields that are read."""
    site = Site(tmp_path, tmp_path / "model")
    vllm_program(site).parent.mkdir(parents=True)
    vllm_program(site).write_text(f"#!{sys.executable}\n{LOADER}")
    vllm_program(site).chmod(0o755)

    async def load(options: str) -> tuple[str, dict[str, float]]:
        async with TestServer(application()) as server:
            url = str(server.make_url("")).rstrip("/")
            return url, await asyncio.to_thread(random_prompts, url, options, site, tmp_path)

    url, found = asyncio.run(load("--random-input-len 8 --num-prompts 2"))
    assert found == {"output_tokens_per_s": 10.0, "first_token_ms": 5.0, "longest_gap_ms": 40.0}
    said = json.loads((tmp_path / "said.json").read_text())
    options = dict(itertools.pairwise(said))
    assert options["--model"] == "small" and options["--base-url"] == url
    assert options["--ready-check-timeout-sec"] == "0" and options["--random-input-len"] == "8"
    with pytest.raises(RuntimeError, match="2 of 3 requests"):
        asyncio.run(load("--num-prompts 3"))


def test_conversations_carry_the_answers_on() -> None:
    def converse(load: ConversationLoad) -> tuple[list[dict[str, Any]], dict[str, float]]:
        async def run() -> tuple[list[dict[str, Any]], dict[str, float]]:
            async with TestServer(app := application()) as server:
                return app[BODIES], await measure(str(server.make_url("")).rstrip("/"), load)

        return asyncio.run(run())

    bodies, found = converse(ConversationLoad(users=2, turns=3, think_s=0.0, output_tokens=2))
    assert found["cached_share"] == 0.5 and found["later_first_token_ms"] > 0 and found["output_tokens_per_s"] > 0
    assert sorted(len(body["messages"]) for body in bodies) == [1, 1, 3, 3, 5, 5]
    longest = [body["messages"] for body in bodies if len(body["messages"]) == 5]
    assert [[each["content"] for each in messages[1::2]] for messages in longest] == [["one two", "one two"]] * 2
    assert longest[0][0] != longest[1][0], "each user asks something else"
    with pytest.raises(RuntimeError, match="overloaded"):
        converse(ConversationLoad(users=1, turns=1, output_tokens=FAILS))


def test_figures_of_conversations() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    first = ConversationTurn(0, 1.0, [3.0, 4.0], "ab", usage)
    later = [
        ConversationTurn(1, 10.0, [10.5, 10.6, 12.5], "abc", usage | {"prompt_tokens_details": None}),
        ConversationTurn(1, 0.0, [0.1]),
    ]
    later[1].usage = usage
    assert figures([first, *later], 9.0) == {
        "first_token_ms": 500.0,
        "later_first_token_ms": 300.0,
        "ms_per_token": 500.0,
        "longest_gap_ms": 1900.0,
        "output_tokens_per_s": 1.0,
        "cached_share": 0.333,
    }


BODIES = web.AppKey("bodies", list[dict[str, Any]])
FAILS = 99
"""A length of answers in whose streams an error comes."""


def application() -> web.Application:
    """A server with one model, whose answers are two pieces of text."""
    app = web.Application()
    app[BODIES] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        app[BODIES].append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": text}}]} for text in ("one ", "two")]
        usage = {"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        events.append({"choices": [], "usage": usage})
        if body["max_tokens"] == FAILS:
            events[2] = {"error": {"message": "overloaded"}}
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def test_the_first_server_is_set_over_the_others() -> None:
    figures = {"vLLM": [100.0, 50.0, 90.0], "raydix cpu": [180.0, 200.0]}  # the last round began with the last server
    result = row(SCENARIOS[0], figures, "raydix cpu")
    assert result["medians"] == {"raydix cpu": 190.0, "vLLM": 90.0}
    assert result["first_over"] == {"vLLM": 2.111}
    assert table([result]).splitlines()[-1] == "| 512 in, 64 out, 8 streams, tok/s | 190.0 | 90.0 (x 2.11) |"


def test_each_configuration_is_a_server(tmp_path: Path) -> None:
    servers = raydix_servers(Site(tmp_path, tmp_path), ["cpu_mixed", "cpu"])
    assert [server.name for server in servers] == ["raydix cpu_mixed", "raydix cpu"]
    assert [server.command[-2] for server in servers] == ["cpu_mixed", "cpu"]
