"""A chat goes on from the token ids that it had, whatever its text would tokenize to."""

import json
from functools import cache
from typing import Any

import pytest
import ray
from ray import serve

from cli.serve import APP_NAME
from engine.api.generate import GenerateRequest
from engine.model.sources import DEFAULT_MODEL, resolve_model
from engine.model.tokenizer import Tokenizer
from tests.integration.conftest import MODEL, Server, eventually

BLOCK_SIZE = 16
Messages = list[dict[str, str]]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(DEFAULT_MODEL))


def spelled() -> dict[str, Any]:
    """Fields that make the model answer letter by letter, as no text is tokenized."""
    letters = [tokenizer().encode(letter)[0] for letter in "there"]
    return {"logit_bias": {str(letter): 100 for letter in letters}, "temperature": 1, "seed": 5, "max_tokens": 45}


def chat(server: Server, messages: Messages, **fields: Any) -> dict[str, Any]:
    """The answer to a chat, greedy unless `fields` say otherwise; it is appended to the messages."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "return_token_ids": True, **fields}
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return answer


def sequence(answer: dict[str, Any]) -> list[int]:
    """The ids of a chat up to the end of its answer, without the token that ended it."""
    token_ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    return token_ids[:-1] if token_ids[-1] in tokenizer().eos_token_ids else token_ids


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def full_blocks(answer: dict[str, Any]) -> int:
    """Tokens in full blocks after an answer, whose last token was sampled and never computed."""
    tokens: int = answer["usage"]["total_tokens"] - 1
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def ask(messages: Messages, question: str) -> Messages:
    messages.append({"role": "user", "content": question})
    return messages


def as_text(messages: Messages) -> list[int]:
    """What the messages of a chat that was answered were asked with, tokenized anew."""
    return list(tokenizer().encode_chat(messages[:-1]).token_ids)


def test_each_turn_hits_every_full_block_of_the_turn_before(server: Server) -> None:
    messages = ask([], "Spell something. " * 10)
    before = chat(server, messages, **spelled())
    for question in ("Once more.", "And again, please.", "Thank you."):
        now = chat(server, ask(messages, question), **spelled())
        fresh = tokenizer().encode(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        assert now["prompt_token_ids"] == sequence(before) + fresh
        assert now["prompt_token_ids"] != as_text(messages), "the case is of no use if its text gives the same ids"
        assert cached(now) == full_blocks(before)
        before = now


def test_an_answer_that_the_model_ended_goes_on_as_well(server: Server) -> None:
    messages = ask([], "What is the capital of France?")
    first = chat(server, messages)
    assert first["choices"][0]["finish_reason"] == "stop"
    second = chat(server, ask(messages, "And of Italy?"), max_tokens=5)
    assert second["prompt_token_ids"][: len(sequence(first))] == sequence(first)
    assert cached(second) == full_blocks(first)


def test_an_edited_answer_and_another_salt_are_tokenized_anew(server: Server) -> None:
    messages = ask([], "Spell anything.")
    chat(server, messages, **spelled())
    ask(messages, "Good.")
    other = chat(server, [*messages], max_tokens=2, cache_salt="somebody else")
    assert other["prompt_token_ids"] == as_text([*messages, {}])
    messages[1] = {"role": "assistant", "content": messages[1]["content"] + "e"}
    edited = chat(server, [*messages], max_tokens=2)
    assert edited["prompt_token_ids"] == as_text([*messages, {}])


def test_an_earlier_turn_can_be_taken_up_again(server: Server) -> None:
    messages = ask([], "Spell a name.")
    first = chat(server, messages, **spelled())
    chat(server, ask([*messages], "One way."), **spelled())
    other = chat(server, ask(messages, "Another way."), **spelled())
    assert other["prompt_token_ids"][: len(sequence(first))] == sequence(first)
    assert cached(other) >= full_blocks(first)


def test_an_answer_cut_by_a_stop_string_is_not_remembered(server: Server) -> None:
    messages = ask([], "Spell until the end.")
    letters = spelled()
    whole = chat(server, [*messages], **letters)["choices"][0]["message"]["content"]
    chat(server, messages, **letters, stop=[whole[4:8]], cache_salt="cut")
    answer = chat(server, ask(messages, "Go on."), max_tokens=2, cache_salt="cut")
    assert len(messages[1]["content"]) < 8
    assert answer["prompt_token_ids"] == as_text(messages)


def test_streams_and_the_handle_share_what_they_were_told(server: Server) -> None:
    messages = ask([], "Spell it over the handle.")
    handle: Any = serve.get_app_handle(APP_NAME)
    fields = spelled()
    request = GenerateRequest(
        messages=messages,
        return_token_ids=True,
        **fields | {"logit_bias": {int(k): v for k, v in fields["logit_bias"].items()}},
    )
    text, token_ids = "", []
    for chunk in handle.options(stream=True).stream.remote(request):
        token_ids += [*(chunk.prompt_token_ids or ()), *chunk.token_ids]
        text += chunk.text
    messages.append({"role": "assistant", "content": text})

    second = chat(server, ask(messages, "Now over HTTP."), **fields)
    assert second["prompt_token_ids"][: len(token_ids)] == token_ids
    third = handle.generate.remote(
        GenerateRequest(messages=ask(messages, "And back."), max_tokens=2, return_token_ids=True)
    ).result(timeout_s=60)
    assert list(third.prompt_token_ids[: len(sequence(second))]) == sequence(second)
    assert third.usage.cached_tokens == full_blocks(second)


def test_a_new_manager_knows_none_and_learns_again(server: Server) -> None:
    messages = ask([], "Spell and forget.")
    chat(server, messages, **spelled())
    ray.kill(server.actor("kv_cache_manager"), no_restart=True)
    forgotten = chat(server, ask(messages, "What was it?"), **spelled())
    assert forgotten["prompt_token_ids"] == as_text(messages)
    eventually(lambda: len(server.workers()) == 2, "workers have registered with the new manager")
    learnt = chat(server, ask(messages, "And now?"), **spelled())
    eventually(lambda: server.manager()["num_transcripts"] > 0, "it is remembered")
    later = chat(server, ask(messages, "And then?"), **spelled())
    assert later["prompt_token_ids"][: len(sequence(learnt))] == sequence(learnt)


@pytest.mark.parametrize(
    ("length", "same", "expected"),
    [
        (BLOCK_SIZE - 1, BLOCK_SIZE - 1, 0),
        (3 * BLOCK_SIZE, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE - 1),
        (3 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE),
        (3 * BLOCK_SIZE + 9, 3 * BLOCK_SIZE + 9, 3 * BLOCK_SIZE),
        (3 * BLOCK_SIZE + 9, 2 * BLOCK_SIZE + 9, 2 * BLOCK_SIZE + 9),
        (3 * BLOCK_SIZE, BLOCK_SIZE - 1, BLOCK_SIZE - 1),
    ],
)
def test_what_a_prompt_hits_of_one_with_the_same_beginning(
    server: Server, length: int, same: int, expected: int
) -> None:
    """Both prompts have `length` tokens, of which the first `same` are equal."""
    prompt = [1000 + length, 1000 + same, *range(2000, 2000 + length - 2)]
    server.complete(prompt, max_tokens=1)
    changed = prompt[:same] + [token + 7000 for token in prompt[same:]]
    answer = server.complete(changed, max_tokens=4)
    assert cached(answer) == expected
    alone = server.complete(changed, max_tokens=4, cache_salt="alone")
    assert alone["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
