"""A chat goes on from the token ids of an answer that its client names, and hits what was computed for them."""

import json
from typing import Any

import pytest
from ray import serve

from raydix.cli.cluster import APP_NAME
from raydix.engine.api.generate import GenerateRequest
from raydix.engine.core.errors import AnswerNotFoundError
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually
from tests.integration.test_chats import BLOCK_SIZE, Messages, chat, spelled, text_of, tokenizer

TURN = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def sequence(answer: dict[str, Any]) -> list[int]:
    """The ids of a chat up to the end of its answer, without the token that ended it."""
    token_ids: list[int] = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    return token_ids[:-1] if token_ids[-1] in tokenizer().eos_token_ids else token_ids


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def request_of(messages: Messages, **fields: Any) -> GenerateRequest:
    return GenerateRequest.model_validate({"messages": messages, **fields})


def ask(messages: Messages, question: str) -> Messages:
    messages.append({"role": "user", "content": question})
    return messages


def as_text(messages: Messages) -> list[int]:
    return list(tokenizer().encode_chat([{k: m[k] for k in ("role", "content")} for m in messages]).token_ids)


def refused(server: Server, messages: Messages, **fields: Any) -> tuple[int, str, str]:
    """Status, code and parameter of a refusal."""
    body = {"model": MODEL, "messages": messages, **fields}
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    error = json.loads(data)["error"]
    return status, error["code"], error["param"]


def test_each_turn_goes_on_from_a_reference_and_hits_all_of_the_turn_before(server: Server) -> None:
    messages = ask([], "Spell something. " * 10)
    before = chat(server, messages, **spelled(), store=True)
    for question in ("Once more.", "And again, please.", "Thank you."):
        messages.append(before["choices"][0]["message"])
        now = chat(server, ask(messages, question), **spelled(), store=True)
        assert now["prompt_token_ids"] == sequence(before) + tokenizer().encode(TURN.format(question))
        assert now["prompt_token_ids"] != as_text(messages), "the case is of no use if its text gives the same ids"
        assert cached(now) == full_blocks(before["usage"]["total_tokens"] - 1)
        before = now


def test_the_ids_themselves_say_the_same_as_their_reference(server: Server) -> None:
    messages = ask([], "Spell anything.")
    answer = chat(server, messages, **spelled(), store=True)
    message, token_ids = answer["choices"][0]["message"], answer["choices"][0]["token_ids"]
    expected = sequence(answer) + tokenizer().encode(TURN.format("Go on."))
    for fields in (
        {"id": message["id"]},
        {"id": message["id"], "content": None},
        {"content": message["content"], "token_ids": token_ids},
        {"token_ids": token_ids},
    ):
        turns = ask([*messages, {"role": "assistant", **({"content": message["content"]} | fields)}], "Go on.")
        assert chat(server, turns, max_tokens=1)["prompt_token_ids"] == expected


def test_an_answer_that_the_model_ended_and_one_that_a_stop_string_cut(server: Server) -> None:
    first = ask([], "What is the capital of France?")
    end = tokenizer().eos_token_ids[0]
    ended = chat(server, first, store=True, min_tokens=6, logit_bias={str(end): 100})
    assert ended["choices"][0]["finish_reason"] == "stop"
    turns = ask([*first, ended["choices"][0]["message"]], "And of Italy?")
    assert chat(server, turns, max_tokens=1)["prompt_token_ids"][: len(sequence(ended))] == sequence(ended)

    whole = text_of(chat(server, first, **spelled()))
    cut = chat(server, first, **spelled(), stop=[whole[4:8]], store=True)
    turns = ask([*first, cut["choices"][0]["message"]], "Go on.")
    assert len(text_of(cut)) < 8
    expected = [tokenizer().encode(letter)[0] for letter in text_of(cut)]
    assert chat(server, turns, max_tokens=1)["prompt_token_ids"] == cut[
        "prompt_token_ids"
    ] + expected + tokenizer().encode(TURN.format("Go on."))


def test_a_reference_is_handed_out_only_where_it_was_asked_for(server: Server) -> None:
    answer = chat(server, ask([], "Say hello."), max_tokens=4)
    assert answer["choices"][0]["message"].keys() == {"role", "content", "refusal"}


def test_a_reference_that_is_unknown_gone_or_of_another_salt_is_an_error_that_names_it(server: Server) -> None:
    messages = ask([], "Spell a secret.")
    answer = chat(server, messages, **spelled(), store=True)
    turns = ask([*messages, answer["choices"][0]["message"]], "Go on.")
    gone = 404, "answer_not_found", "messages[1].id"
    own = chat(server, turns, max_tokens=1)
    assert own["prompt_token_ids"] != as_text(turns)

    guess = [messages[0], turns[1] | {"id": "raydix-" + "A" * 32}, turns[2]]
    foreign = [messages[0], turns[1] | {"id": "chatcmpl-123"}, turns[2]]
    assert chat(server, foreign, max_tokens=1)["prompt_token_ids"] == as_text(turns), "ids of other servers are ignored"
    for body, fields in ((guess, {}), (turns, {"cache_salt": "somebody else"})):
        assert refused(server, body, **fields) == gone
        text = chat(server, body, max_tokens=1, continue_from_missing="text", **fields)
        assert text["prompt_token_ids"] == as_text(turns)
    assert server.request("POST", "/v1/cache/reset")[0] == 200
    assert refused(server, turns) == gone
    assert refused(server, [turns[0], turns[1] | {"content": None}, turns[2]], continue_from_missing="text") == gone


def test_ids_that_are_no_ids_or_not_those_of_the_text_are_refused(server: Server) -> None:
    user = {"role": "user", "content": "Hello."}
    hello = tokenizer().encode("Hello there")
    for message, param in (
        ({"content": "Goodbye", "token_ids": hello}, "messages[1].token_ids"),
        ({"content": "Hello there", "token_ids": [49_152]}, "messages[1].token_ids"),
        ({"content": "Hello there", "token_ids": [-1]}, "messages[1].token_ids"),
        ({"content": "Hello there", "token_ids": [1.5]}, "messages[1].token_ids"),
        ({"content": "Hello there", "token_ids": hello, "id": "raydix-x"}, "messages[1].token_ids"),
        ({"token_ids": hello * 3000}, "messages"),
    ):
        status, _, named = refused(server, [user, {"role": "assistant", **message}, user])
        assert (status, named) == (400, param), message
    assert refused(server, [user | {"token_ids": hello}])[::2] == (400, "messages[0].token_ids")
    assert refused(server, [user | {"id": "raydix-x"}])[::2] == (400, "messages[0].id")


def test_streams_and_the_handle_share_what_they_were_told(server: Server) -> None:
    messages = ask([], "Spell it over the handle.")
    handle: Any = serve.get_app_handle(APP_NAME)
    fields = spelled()
    of_handle = fields | {"logit_bias": {int(key): bias for key, bias in fields["logit_bias"].items()}}
    request = request_of(messages, return_token_ids=True, store=True, **of_handle)
    text, token_ids, message_id = "", [], None
    for chunk in handle.options(stream=True).stream.remote(request):
        token_ids += [*(chunk.prompt_token_ids or ()), *chunk.token_ids]
        text += chunk.text
        message_id = chunk.message_id
    messages.append({"role": "assistant", "content": text, "id": message_id})

    body = {"model": MODEL, "messages": ask(messages, "Now over HTTP."), **fields, "store": True, "stream": True}
    status, _, data = server.request("POST", "/v1/chat/completions", body | {"return_token_ids": True})
    assert status == 200, data
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    assert chunks[0]["prompt_token_ids"][: len(token_ids)] == token_ids
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [("id" in delta) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    sent = chunks[0]["prompt_token_ids"] + [
        token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())
    ]
    messages.append(
        {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas), "id": deltas[-1]["id"]}
    )
    third = handle.generate.remote(request_of(ask(messages, "And back."), max_tokens=2, return_token_ids=True)).result(
        timeout_s=WAIT_S
    )
    assert list(third.prompt_token_ids[: len(sent)]) == sent
    assert third.message_id is None
    unknown = [messages[0], messages[1] | {"id": "raydix-unknown"}, messages[2]]
    with pytest.raises(AnswerNotFoundError, match="continue_from_missing"):
        handle.generate.remote(request_of(unknown, max_tokens=2)).result(timeout_s=WAIT_S)


def test_the_next_turn_hits_though_its_text_has_other_ids(server: Server) -> None:
    """What the answer's text tokenizes to is computed when there is nothing else to do."""
    idle = server.workers()["decode"]["idle"]
    messages = ask([], "Spell something for the next turn. " * 4)
    answer = chat(server, messages, **spelled())

    messages.append({"role": "assistant", "content": text_of(answer)})
    eventually(lambda: server.workers()["decode"]["idle"]["num_computed"] == idle["num_computed"] + 1, "it is computed")
    now = chat(server, ask(messages, "Once more."), max_tokens=1)
    assert now["prompt_token_ids"] == as_text(messages)
    num_before = len(as_text(messages[:1]) + tokenizer().encode(text_of(answer)))
    assert cached(now) >= full_blocks(num_before) > len(answer["prompt_token_ids"])
    alone = chat(server, messages, max_tokens=8, cache_salt="alone")
    assert alone["choices"][0]["token_ids"] == chat(server, messages, max_tokens=8)["choices"][0]["token_ids"]


def test_a_new_manager_knows_no_reference_and_keeps_new_ones(server: Server) -> None:
    messages = ask([], "Spell and forget.")
    messages.append(chat(server, messages, **spelled(), store=True)["choices"][0]["message"])
    server.kill(server.manager())
    ask(messages, "What was it?")
    eventually(lambda: server.manager()["num_transcripts"] == 0, "a new manager is there")
    eventually(lambda: refused(server, messages) == (404, "answer_not_found", "messages[1].id"), "it is asked")
    assert chat(server, messages, continue_from_missing="text", max_tokens=1)["prompt_token_ids"] == as_text(messages)
    del messages[1]["id"]
    answer = chat(server, messages, **spelled(), store=True)
    again = ask([*messages, answer["choices"][0]["message"]], "And then?")
    assert chat(server, again, max_tokens=1)["prompt_token_ids"][: len(sequence(answer))] == sequence(answer)


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
    """Both prompts have `length` tokens, of which the first `same` are equal. They are of one session: for a few tokens
    more or less the second would go to any worker."""
    session = f"hits {length} {same}"
    prompt = [1000 + length, 1000 + same, *range(2000, 2000 + length - 2)]
    server.complete(prompt, max_tokens=1, session_id=session)
    changed = prompt[:same] + [token + 7000 for token in prompt[same:]]
    answer = server.complete(changed, max_tokens=4, session_id=session)
    assert cached(answer) == expected
    alone = server.complete(changed, max_tokens=4, cache_salt="alone")
    assert alone["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
