"""`/v1/embeddings` from a body to a response: limits, tenants, failures, clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable
from struct import unpack
from typing import Any

import orjson
import pytest
from ray import serve

from raydix.actors.ingress.http import CLIENT_CLOSED_REQUEST
from raydix.engine.api.embeddings import EmbedResponse
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.tenants import EVERYONE, Tenant, salt_of
from raydix.engine.core.types import Pooling
from raydix.engine.serving.preparation import INPUTS_AT_ONCE, LINE_PRIORITY, LINES_AT_ONCE
from tests.unit.ingress import MODEL, Replica, Reply, Served, call, state_of
from tests.unit.served_app import app

PATH = "/v1/embeddings"


def post(path: str = PATH, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    body = orjson.dumps({"model": MODEL, "input": "hello", **fields})
    return lambda: call(app, "POST", path, body)


def test_a_vector_for_each_input(served: Served) -> None:
    replica = Replica()
    reply = served(replica, post(input=["one", "three"], use_activation=False, request_id="r"))
    assert reply.status == 200
    assert [each["embedding"] for each in reply.json["data"]] == [
        list(unpack("<2f", state_of([*text.encode()]))) for text in ("one", "three")
    ]
    assert (reply.json["id"], reply.json["model"]) == ("embd-r", MODEL)
    assert reply.json["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 0,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    generations = replica.dispatcher.begun
    assert [(each.sampling.pooling, each.sampling.max_tokens) for each in generations] == [(Pooling.MEAN, 0)] * 2
    assert [ended.num_prompt for ended in replica.ledger.ended] == [8]
    assert replica.room.num_held == 0


def test_the_vector_of_a_chat_is_that_of_its_prompt(served: Served) -> None:
    replica = Replica()
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    reply = served(replica, post(input=None, messages=chat, add_generation_prompt=True))
    assert reply.status == 200, reply.body
    [generation] = replica.dispatcher.begun
    assert "hello" in bytes(generation.prompt).decode()
    assert (generation.sampling.pooling, generation.sampling.max_tokens) == (Pooling.MEAN, 0)
    text = served(Replica(), post(input=list(generation.prompt)))
    assert [each["embedding"] for each in reply.json["data"]] == [each["embedding"] for each in text.json["data"]]
    assert not replica.dispatcher.prepared and replica.room.num_held == 0


def test_priority_tenant_and_session_travel_on(served: Served) -> None:
    replica = Replica()
    served(replica, post(priority=3, user="u", cache_salt="s"))
    [generation] = replica.dispatcher.begun
    assert (generation.priority, generation.session) == (3, "u")
    assert generation.salt == salt_of(EVERYONE.name, "s")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"dimensions": 2}, 200, None),
        ({"dimensions": 1}, 400, "dimensions"),
        ({"model": "other"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
    ],
    ids=str,
)
def test_a_refused_request_says_which_field(
    served: Served, fields: dict[str, Any], status: int, param: str | None
) -> None:
    replica = Replica()
    reply = served(replica, post(**fields))
    assert reply.status == status
    assert status == 200 or reply.json["error"]["param"] == param
    assert replica.room.num_held == 0


def test_an_input_that_does_not_fit(served: Served) -> None:
    reply = served(Replica(max_model_len=4), post(input="hello"))
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")
    assert served(Replica(max_model_len=5), post(input="hello")).status == 200, "no room for an answer is needed"


def test_more_inputs_than_are_accepted_at_a_time_run_one_after_the_other(served: Served) -> None:
    replica = Replica(max_requests=3)
    most: list[int] = []
    generate = replica.output._generate

    def counted(generation: Generation) -> Any:
        most.append(replica.room.num_held)
        return generate(generation)

    replica.output._generate = counted
    reply = served(replica, post(input=["x" * length for length in range(1, 11)], use_activation=False))
    assert [each["embedding"][0] for each in reply.json["data"]] == [*range(1, 11)]
    assert len(most) == 10 and max(most) == 3
    assert replica.room.num_held == 0


@pytest.mark.parametrize(("tenant", "num_held"), [(EVERYONE, INPUTS_AT_ONCE), (Tenant("a", max_requests=2), 2)])
def test_a_body_takes_only_some_places(served: Served, tenant: Tenant, num_held: int) -> None:
    replica = Replica(max_requests=INPUTS_AT_ONCE + 10)

    async def run() -> tuple[int, int]:
        job = await replica.frontend.preparation.of_body("embeddings", orjson.dumps({"input": ["x"] * 100}), tenant)
        held = replica.room.num_held
        with replica.frontend.accounted(job):
            await replica.frontend.output.collect(job)
        return held, len(job.pooled())

    assert served(replica, run) == (num_held, 100)
    assert replica.room.num_held == 0


def test_a_client_that_leaves_ends_all_inputs(served: Served) -> None:
    replica = Replica(max_requests=3)
    replica.dispatcher.hangs_after = 0
    body = orjson.dumps({"input": ["x"] * 10})
    reply = served(replica, lambda: call(app, "POST", PATH, body, leaves_at=lambda reply: True))
    assert reply.status == CLIENT_CLOSED_REQUEST
    assert len(replica.dispatcher.begun) == len(replica.dispatcher.ended) <= 3
    assert replica.room.num_held == 0
    assert [ended.outcome for ended in replica.ledger.ended] == ["aborted"]


@pytest.mark.parametrize("num_inputs", [1, 5])
def test_a_failed_input_fails_the_request(served: Served, num_inputs: int) -> None:
    replica = Replica(max_requests=2)
    replica.dispatcher.fails_after = 0
    reply = served(replica, post(input=["x"] * num_inputs))
    assert reply.status == 503
    assert replica.room.num_held == 0


def test_a_line_of_a_batch(served: Served) -> None:
    async def ask() -> Any:
        ingress: Any = serve.get_replica_context().servable_object
        return await ingress.answer_line(PATH, orjson.dumps({"input": ["a", "b"]}))

    replica = Replica()
    answer = served(replica, ask)
    assert answer.status == 200
    assert len(orjson.loads(answer.body)["data"]) == 2
    assert {each.priority for each in replica.dispatcher.begun} == {LINE_PRIORITY}


def test_lines_with_many_inputs_leave_room_for_each_other() -> None:
    """A line without room is tried again some times, and then fails its batch."""
    replica = Replica(max_requests=2 * LINES_AT_ONCE)
    body = orjson.dumps({"input": ["x"] * 100})

    async def begin() -> list[int]:
        jobs = [await replica.preparation.of_line("embeddings", body, EVERYONE, "line") for _ in range(LINES_AT_ONCE)]
        num_at_once = [sum(answer.permit is not None for answer in job.answers) for job in jobs]
        for job in jobs:
            job.close()
        return num_at_once

    assert asyncio.run(begin()) == [2] * LINES_AT_ONCE


def test_the_python_handle(served: Served) -> None:
    async def ask() -> EmbedResponse:
        ingress: Any = serve.get_replica_context().servable_object
        response: EmbedResponse = await ingress.embed({"input": ["hi", "you"], "use_activation": False})
        return response

    response = served(Replica(), ask)
    assert response.embeddings == tuple(unpack("<2f", state_of([*text.encode()])) for text in ("hi", "you"))
    assert response.usage.prompt_tokens == 5


@pytest.mark.parametrize("path", ["/score", "/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking_is_refused_by_name(served: Served, path: str) -> None:
    reply = served(Replica(), post(path))
    assert reply.status == 404
    assert "no model for ranking" in reply.json["error"]["message"]
    assert PATH in reply.json["error"]["message"]
