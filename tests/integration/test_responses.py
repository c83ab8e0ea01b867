"""OpenAI's Responses API as its official client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.conftest import MODEL, WAIT_S, Server, eventually
from tests.integration.test_chats import spelled, tokenizer
from tests.integration.test_transcripts import TURN, full_blocks

QUESTION = "Name three rivers of Europe."


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.fixture
def client(one_process: Server) -> Iterator[openai.OpenAI]:
    with client_of(one_process) as client:
        yield client


def ask(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": MODEL, "input": question, "temperature": 0, "max_output_tokens": 24, **fields}
    )


def chat(client: openai.OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    )


def test_a_response_has_the_text_of_a_chat(client: openai.OpenAI) -> None:
    response = ask(client, QUESTION, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = chat(client, messages)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == expected.usage.completion_tokens
    is_cut = expected.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")


def test_a_stream_is_the_same_response(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTION)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[0].type == "response.created"
    final = events[-1].response  # type: ignore[union-attr]
    assert events[-1].type == f"response.{final.status}" and final.output_text == whole.output_text
    assert client.responses.retrieve(final.id).output_text == whole.output_text


def test_a_conversation_goes_on_from_its_ids_and_hits_all_of_them(client: openai.OpenAI, one_process: Server) -> None:
    """Letter by letter, as no text is tokenized: going on from the text would be another prompt."""
    letters = {name: value for name, value in spelled().items() if name in ("logit_bias", "seed")}
    fields: Any = {"temperature": 1, "max_output_tokens": 45, "extra_body": letters}
    before = ask(client, "Spell something. " * 5, **fields)
    for question in ("Once more.", "And again, please."):
        text = before.output_text
        assert len(tokenizer().encode(text)) < 45, "the case is of no use if its text gives the same ids"
        now = ask(client, question, previous_response_id=before.id, **fields)
        assert now.usage.input_tokens == before.usage.total_tokens + len(tokenizer().encode(TURN.format(question)))
        assert now.usage.input_tokens_details.cached_tokens == full_blocks(before.usage.total_tokens - 1)
        before, previous = now, before

    assert one_process.request("POST", "/v1/cache/reset")[0] == 200
    again = ask(client, "And again, please.", previous_response_id=previous.id, **fields)
    assert again.output_text == before.output_text, "the ids are kept, whatever the cache holds"


def test_the_input_is_listed_and_a_response_deleted(client: openai.OpenAI) -> None:
    response = ask(client, QUESTION)
    items: Any = client.responses.input_items.list(response.id).data
    assert [item.content[0].text for item in items] == [QUESTION]
    client.responses.delete(response.id)
    for call in (
        lambda: client.responses.retrieve(response.id),
        lambda: ask(client, "Go on.", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError, match="not kept") as gone:
            call()
        assert gone.value.code == "response_not_found"


def test_logprobs(client: openai.OpenAI) -> None:
    response = ask(client, QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    expected = chat(client, [{"role": "user", "content": QUESTION}], logprobs=True, top_logprobs=2, max_tokens=4)
    got = response.output[0].content[0].logprobs
    assert [each.logprob for each in got] == [each.logprob for each in expected.choices[0].logprobs.content]


def test_ids_of_every_api_are_explained(server: Server) -> None:
    """Serve names each request in a header, so a response's id is another name."""
    messages = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": QUESTION}]}
    message = json.loads(server.request("POST", "/v1/messages", messages)[2])
    with client_of(server) as client:
        chatted = chat(client, [{"role": "user", "content": QUESTION}], max_tokens=2)
        response = ask(client, QUESTION, max_output_tokens=2)
    for name in (response.id, message["id"], chatted.id):
        status, _, data = server.request("GET", f"/v1/requests/{name}/explain")
        assert status == 200, data
        assert json.loads(data)["id"] == name and json.loads(data)["choices"]


def test_stored_responses_go_with_the_manager(server: Server) -> None:
    with client_of(server) as client:
        response = ask(client, QUESTION)
        server.kill(server.manager())
        eventually(lambda: server.request("GET", "/v1/cache")[0] == 200, "a new manager")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        assert ask(client, QUESTION).output_text == response.output_text


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    queued = ask(client, QUESTION, background=True)
    assert (queued.status, queued.background, queued.output_text) == ("queued", True, "")
    eventually(lambda: client.responses.retrieve(queued.id).status not in ("queued", "in_progress"), "the end")
    shown, whole = client.responses.retrieve(queued.id), ask(client, QUESTION)
    assert (shown.status, shown.output_text) == (whole.status, whole.output_text)
    assert shown.usage is not None and shown.usage.output_tokens == whole.usage.output_tokens
    later = ask(client, "Which is the longest?", previous_response_id=queued.id)
    same = ask(client, "Which is the longest?", previous_response_id=whole.id)
    assert later.output_text == same.output_text


def test_a_stream_in_the_background_is_read_again_behind_an_event(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"background": True, "stream": True, "temperature": 1, "max_output_tokens": 40}
    stream = ask(client, QUESTION, **fields)
    events = [event for event, _ in zip(stream, range(8), strict=False)]
    stream.close()  # the client leaves in the middle
    response_id = events[0].response.id
    last = events[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    numbers = [event.sequence_number for event in [*events, *rest]]
    assert numbers == list(range(len(numbers)))
    deltas = [event.delta for event in [*events, *rest] if event.type == "response.output_text.delta"]
    eventually(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"), "the end")
    assert "".join(deltas) == client.responses.retrieve(response_id).output_text


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI) -> None:
    queued = ask(client, "Tell a long story.", background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    cancelled = client.responses.cancel(queued.id)
    assert (cancelled.id, cancelled.status) == (queued.id, "cancelled")
    assert client.responses.retrieve(queued.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        ask(client, "Go on.", previous_response_id=queued.id)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(ask(client, QUESTION).id)


def test_a_kept_conversation(client: openai.OpenAI) -> None:
    """Its answers stand in later prompts with exactly their ids, as those of stored responses do."""
    created = client.conversations.create(metadata={"topic": "rivers"})
    fields: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 40}
    first = ask(client, QUESTION, conversation=created.id, **fields)
    assert first.conversation.id == created.id
    second = ask(client, "Which is the longest?", conversation=created.id, **fields)
    alone = ask(client, QUESTION, **fields)
    same = ask(client, "Which is the longest?", previous_response_id=alone.id, **fields)
    assert second.output_text == same.output_text and second.usage.input_tokens == same.usage.input_tokens
    items: list[Any] = list(client.conversations.items.list(created.id, order="asc", limit=3))
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", QUESTION),
        ("assistant", first.output_text),
        ("user", "Which is the longest?"),
        ("assistant", second.output_text),
    ], "in two pages"

    note: Any = {"type": "message", "role": "user", "content": "The Danube."}
    [added] = client.conversations.items.create(created.id, items=[note]).data
    assert added.id is not None
    assert client.conversations.items.retrieve(added.id, conversation_id=created.id).id == added.id
    client.conversations.items.delete(added.id, conversation_id=created.id)
    changed = client.conversations.update(created.id, metadata={"topic": "longest"})
    assert client.conversations.retrieve(created.id).metadata == changed.metadata == {"topic": "longest"}
    assert client.conversations.delete(created.id).deleted
    with pytest.raises(openai.NotFoundError):
        ask(client, "Go on.", conversation=created.id)
