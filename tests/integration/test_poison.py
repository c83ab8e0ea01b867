"""A request that the model cannot compute ends alone; a device that computes nothing any more costs its worker."""

from pathlib import Path
from typing import Any

import ray

from tests.integration.cluster import paced
from tests.integration.conftest import WAIT_S, Server, eventually, random_prompt
from tests.integration.test_faults import collect, num_attempts

POISON = 300
"""The first token of prompts that make a step raise, in the middle of their answers."""


def spoil(server: Server, *, is_broken: bool) -> ray.ObjectRef[Any]:
    """Have the decode worker's model raise: for good, or whenever a poisoned request has five tokens."""

    def replace(worker: Any) -> None:  # runs in the worker's process
        runner = worker._engine.runner
        compute = type(runner).hidden

        def hidden(chunks: Any) -> Any:
            requests = [chunk.request for chunk in chunks]
            if is_broken or any(each.token_ids[0] == POISON and each.num_output >= 5 for each in requests):
                raise RuntimeError("an illegal memory access was encountered")
            return compute(runner, chunks)

        runner.hidden = hidden

    worker = server.actor(server.workers()["decode"]["worker_id"])
    done: ray.ObjectRef[Any] = worker.__ray_call__.remote(replace)
    return done


def mend(server: Server) -> None:
    def restore(worker: Any) -> None:
        del worker._engine.runner.hidden

    ray.get(server.actor(server.workers()["decode"]["worker_id"]).__ray_call__.remote(restore), timeout=WAIT_S)


def test_a_poisoned_stream_ends_alone(server: Server) -> None:
    prompts = [[POISON if index in (1, 2) else 301 + index, *range(400, 440)] for index in range(4)]
    expected = [server.complete(prompt, max_tokens=60)["choices"][0]["token_ids"] for prompt in prompts]
    epoch = server.workers()["decode"]["epoch"]
    ray.get(spoil(server, is_broken=False), timeout=WAIT_S)
    try:
        streams = [server.stream(prompt, max_tokens=60) for prompt in prompts]
        begun = [[next(stream)] for stream in streams]
        for index, (first, rest, tokens) in enumerate(zip(begun, streams, expected, strict=True)):
            if index not in (1, 2):
                assert collect([*first, *rest]) == tokens
                continue
            chunks = [*first, *rest]
            got = [
                token for chunk in chunks[:-1] for choice in chunk["choices"] for token in choice.get("token_ids", [])
            ]
            assert got == tokens[: len(got)], "with a draft, a step more or less"
            assert 5 <= len(got) < len(tokens)
            assert "illegal memory access" in chunks[-1]["error"]["message"]
    finally:
        mend(server)
    assert server.workers()["decode"]["epoch"] == epoch, "the worker stays"
    eventually(server.is_idle, "everything is free")


def test_a_worker_whose_device_is_broken_is_replaced_and_its_streams_go_on(server: Server, tmp_path: Path) -> None:
    prompt = random_prompt(61, 200)
    expected = server.complete(prompt, max_tokens=60)["choices"][0]["token_ids"]
    epoch = server.workers()["decode"]["epoch"]
    with paced(server, tmp_path / "gate"):
        stream = server.stream(prompt, max_tokens=60)
        seen = [next(stream), next(stream)]
        spoil(server, is_broken=True)
    assert collect([*seen, *stream]) == expected
    eventually(lambda: server.workers()["decode"]["epoch"] > epoch, "the decode worker is back")
    assert num_attempts(server, seen[0]["id"]) == 2
