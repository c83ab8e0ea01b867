"""One chat body has one prompt and one answer, whatever was asked before, by whom, and whatever has died since."""

import json
from functools import cache
from typing import Any

from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from tests.integration.conftest import MODEL, Server, eventually

BLOCK_SIZE = 16
Messages = list[dict[str, Any]]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(DEFAULT_MODEL))


def spelled() -> dict[str, Any]:
    """Fields that make the model answer letter by letter, as no text is tokenized."""
    letters = [tokenizer().encode(letter)[0] for letter in "there"]
    return {"logit_bias": {str(letter): 100 for letter in letters}, "temperature": 1, "seed": 5, "max_tokens": 45}


def chat(server: Server, messages: Messages, **fields: Any) -> dict[str, Any]:
    """The answer to a chat, greedy unless `fields` say otherwise."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "return_token_ids": True, **fields}
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def told(answer: dict[str, Any]) -> tuple[list[int], list[int], str]:
    """What a client can see of how a body was answered: the ids of the prompt and of the answer, and its text."""
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"], text_of(answer)


def test_a_body_is_answered_alike_whatever_is_remembered(server: Server) -> None:
    first = [{"role": "user", "content": "Spell something. " * 5}]
    answered = text_of(chat(server, first, **spelled()))
    body = [*first, {"role": "assistant", "content": answered}, {"role": "user", "content": "What was that?"}]
    expected = told(chat(server, body, max_tokens=24))
    assert expected[0] == list(tokenizer().encode_chat(body).token_ids)

    assert told(chat(server, body, max_tokens=24)) == expected, "asked again"
    assert told(chat(server, body, max_tokens=24, cache_salt="somebody else")) == expected
    assert server.request("POST", "/v1/cache/reset")[0] == 200
    assert told(chat(server, body, max_tokens=24)) == expected, "after a reset"
    for number in range(12):  # fills the pool with other prompts
        server.complete([1000 + number] * 600, max_tokens=1)
    assert told(chat(server, body, max_tokens=24)) == expected, "after eviction"
    server.kill(server.manager())
    assert told(chat(server, body, max_tokens=24)) == expected, "after the manager's death"
    eventually(lambda: server.request("GET", "/health")[0] == 200, "a new manager knows the workers")
    assert told(chat(server, body, max_tokens=24)) == expected, "with a new manager"


def test_a_neighbour_cannot_change_what_a_prompt_is_made_of(one_process: Server) -> None:
    """The neighbour has the same question answered with a text that the victim's chat will have, in unusual tokens."""
    first = [{"role": "user", "content": "Is the sky blue? Say yes or no."}]
    body = [*first, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Why?"}]
    alone = told(chat(one_process, body, max_tokens=24, cache_salt="alone"))

    pieces = [tokenizer().encode(piece)[0] for piece in ("Y", "es")]
    assert pieces != tokenizer().encode("Yes"), "the case is of no use if these are the usual tokens"
    forced = {"logit_bias": {str(token_id): 100 for token_id in pieces}, "max_tokens": 2}
    for fields in ({}, {"store": True}):
        planted = chat(one_process, first, **forced, **fields)
        assert (text_of(planted), planted["choices"][0]["token_ids"]) == ("Yes", pieces)
        assert told(chat(one_process, body, max_tokens=24)) == alone
