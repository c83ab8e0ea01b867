"""Chats whose prompt comes as token ids: `input_ids`, and `kv_transfer_params.prompt_token_ids`."""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from raydix.engine.api.requests import parse_chat
from raydix.engine.core.errors import RequestError
from tests.unit.ingress import MODEL, VOCAB, Replica, Reply, Served, call
from tests.unit.served_app import app

IDS = [*b"user: other\nassistant: "]
MESSAGES = [{"role": "user", "content": "hi"}]


def post(**fields: Any) -> Callable[[], Awaitable[Reply]]:
    body = orjson.dumps({"model": MODEL, "messages": MESSAGES, **fields})
    return lambda: call(app, "POST", "/v1/chat/completions", body)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": IDS},
        {"kv_transfer_params": {"prompt_token_ids": IDS}},
        {"kv_transfer_params": {"prompt_token_ids": IDS, "do_remote_prefill": False}, "input_ids": IDS},
    ],
    ids=["input_ids", "kv_transfer_params", "both"],
)
def test_the_ids_are_the_prompt(served: Served, fields: dict[str, Any]) -> None:
    replica = Replica()
    reply = served(replica, post(**fields, return_token_ids=True))
    assert reply.status == 200, reply.json
    assert [list(generation.prompt) for generation in replica.dispatcher.begun] == [IDS]
    assert reply.json["prompt_token_ids"] == IDS
    assert reply.json["choices"][0]["message"]["content"]


def test_a_part_of_the_ids_is_kept(served: Served) -> None:
    replica = Replica()
    served(replica, post(input_ids=IDS, truncate_prompt_tokens=5))
    assert [list(generation.prompt) for generation in replica.dispatcher.begun] == [IDS[-5:]]


def test_no_next_turn_is_prepared_of_messages_that_were_not_the_prompt(served: Served) -> None:
    replica = Replica()
    served(replica, post(input_ids=IDS))
    assert replica.reader.next_turns == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": IDS, "kv_transfer_params": {"prompt_token_ids": [1]}}, "input_ids"),
        ({"input_ids": IDS, "store": True}, "store"),
        ({"input_ids": IDS, "messages": [*MESSAGES, {"role": "assistant", "token_ids": [1]}]}, "messages"),
        ({"kv_transfer_params": {"prompt_token_ids": []}}, "kv_transfer_params.prompt_token_ids"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": {"remote_host": "a"}}, "kv_transfer_params.remote_host"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(orjson.dumps({"messages": MESSAGES, **fields}))
    assert caught.value.param == param


@pytest.mark.parametrize("ids", [[VOCAB], [1] * 65], ids=["outside the vocabulary", "longer than the context"])
def test_ids_that_the_model_cannot_take(served: Served, ids: list[int]) -> None:
    reply = served(Replica(), post(input_ids=ids))
    assert reply.status == 400


def test_nothing_given_is_nothing_changed() -> None:
    spec = parse_chat(orjson.dumps({"messages": MESSAGES, "kv_transfer_params": {}, "input_ids": None}))
    assert spec.given_prompt is None
