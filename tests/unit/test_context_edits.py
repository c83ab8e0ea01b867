"""Edits of a chat before its prompt is made, as Anthropic's clients ask for them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from raydix.engine.api.anthropic.requests import parse_messages
from raydix.engine.api.context_edits import CLEARED, ClearThinking, ClearToolUses, edited
from raydix.engine.core.errors import RequestError
from raydix.engine.serving.reader_work import NextTurn
from tests.unit.ingress import ANSWER, Replica, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_agents import reader

LONG = "long " * 50


def turns(number: int, name: str = "look", content: str = LONG) -> list[dict[str, Any]]:
    """A user's message and so many calls with their results, in Anthropic's form."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for index in range(number):
        call = {"type": "tool_use", "id": f"c{index}", "name": name, "input": {"at": index}}
        thought = {"type": "thinking", "thinking": f"thought {index}", "signature": ""}
        chat.append({"role": "assistant", "content": [thought, call]})
        result = {"type": "tool_result", "tool_use_id": f"c{index}", "content": f"{index} {content}"}
        chat.append({"role": "user", "content": [result]})
    return chat


def messages_of(chat: list[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return parse_messages(json.dumps({"max_tokens": 5, "messages": chat}).encode()).messages


def num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    return len(json.dumps([*messages]))


def results(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_all_but_the_last_results_are_left_out_above_the_trigger() -> None:
    messages = messages_of(turns(5))
    now, edits = edited(messages, [ClearToolUses(above=100)], num_chars)
    assert [each == CLEARED for each in results(now)] == [True, True, False, False, False]
    [applied] = edits.applied
    assert (applied.num_cleared, applied.num_tokens) == (2, num_chars(messages) - num_chars(now))
    assert edits.original_tokens == num_chars(messages) and edits.original == messages
    # The calls stay, so that the model knows what it has done.
    assert [message.get("tool_calls") for message in now] == [message.get("tool_calls") for message in messages]


@pytest.mark.parametrize(
    "edit",
    [
        ClearToolUses(),  # fewer than 100,000 tokens
        ClearToolUses(trigger="tool_uses", above=5),
        ClearToolUses(above=100, keep=5),
        ClearToolUses(above=100, clear_at_least=10_000),
        ClearToolUses(above=100, excluded=("look",)),
        ClearThinking(None),
        ClearThinking(1),
    ],
    ids=str,
)
def test_a_chat_that_no_edit_is_for_stays_as_it_is(edit: Any) -> None:
    messages = messages_of(turns(5))
    now, edits = edited(messages, [edit], num_chars)
    assert now == messages and not edits.applied


def test_arguments_are_left_out_where_the_client_asks() -> None:
    messages = messages_of([*turns(1, "look"), *turns(1, "edit")[1:], *turns(2)[3:]])
    for inputs, expected in ((True, [True, True]), (("edit",), [False, True])):
        edit = ClearToolUses(trigger="tool_uses", above=1, keep=1, cleared_inputs=inputs)
        # Two calls of one id count once: results name their calls by the id alone.
        now, _ = edited(messages, [edit], num_chars)
        calls = [call["function"] for message in now for call in message.get("tool_calls", ())]
        assert [call["arguments"] == "{}" for call in calls[:2]] == expected


def test_the_result_of_a_last_call_stays_whose_id_an_old_one_had() -> None:
    messages = messages_of([*turns(2), *turns(1)[1:]])
    now, edits = edited(messages, [ClearToolUses(trigger="tool_uses", above=1, keep=1)], num_chars)
    assert [each == CLEARED for each in results(now)] == [False, True, False]
    assert [each.num_cleared for each in edits.applied] == [1]


def test_a_prompt_is_counted_once_for_each_edit_and_once_before() -> None:
    counted: list[int] = []

    def num_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
        counted.append(num_chars(messages))
        return counted[-1]

    messages = messages_of([*turns(5), {"role": "user", "content": "more"}, *turns(1)[1:]])
    _, edits = edited(messages, [ClearThinking(1), ClearToolUses(above=100)], num_tokens)
    before, between, after = counted
    assert [each.num_tokens for each in edits.applied] == [before - between, between - after]


def test_a_second_edit_of_a_type_is_refused() -> None:
    edits = {"edits": [*MANAGED["edits"], *MANAGED["edits"]]}
    with pytest.raises(RequestError, match="one edit of a type"):
        parse_messages(json.dumps({"max_tokens": 5, "messages": turns(1), "context_management": edits}).encode())


def test_reasoning_of_the_last_turns_stays() -> None:
    chat = [*turns(2), {"role": "user", "content": "more"}, *turns(1)[1:], {"role": "user", "content": "end"}]
    for keep, expected in ((1, [False, False, True]), (2, [True] * 3), (None, [True] * 3)):
        now, edits = edited(messages_of(chat), [ClearThinking(keep)], num_chars)
        asked = [message for message in now if message["role"] == "assistant"]
        assert ["reasoning_content" in message for message in asked] == expected
        assert [each.num_cleared for each in edits.applied] == ([1] if keep == 1 else [])


def test_every_edit_is_judged_by_the_chat_as_the_client_sent_it() -> None:
    chat = [*turns(5), {"role": "user", "content": "more"}, *turns(1)[1:]]
    messages = messages_of(chat)
    above = num_chars(messages) - 1
    _, edits = edited(messages, [ClearThinking(1), ClearToolUses(above=above)], num_chars)
    assert [each.edit.name for each in edits.applied] == ["clear_thinking_20251015", "clear_tool_uses_20250919"]


MANAGED = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 3}}]}


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_reports_what_was_left_out(served: Served, stream: bool) -> None:
    fields = {"messages": turns(5), "context_management": MANAGED, "stream": stream}
    reply = served(
        Replica(max_model_len=40_000),
        lambda: call(app, "POST", "/v1/messages", body_of("messages", **fields)),
    )
    assert reply.status == 200 and "x-raydix-ignored" not in reply.headers
    data = (
        reply.json if not stream else json.loads(reply.body.split(b"event: message_delta\ndata: ")[1].split(b"\n")[0])
    )
    [applied] = data["context_management"]["applied_edits"]
    assert applied == {
        "type": "clear_tool_uses_20250919",
        "cleared_tool_uses": 2,
        "cleared_input_tokens": 2 * (len(f"0 {LONG}") - len(CLEARED)),
    }


def test_nothing_is_reported_to_a_client_that_does_not_ask(served: Served) -> None:
    reply = served(Replica(), lambda: call(app, "POST", "/v1/messages", body_of("messages")))
    assert reply.json["content"][0]["text"] == ANSWER and "context_management" not in reply.json


def test_a_count_has_the_length_before_the_edits(served: Served) -> None:
    def counted(**fields: Any) -> Any:
        body = json.dumps({"messages": turns(5), **fields}).encode()
        return served(Replica(max_model_len=40_000), lambda: call(app, "POST", "/v1/messages/count_tokens", body)).json

    plain, managed = counted(), counted(context_management=MANAGED)
    assert managed["input_tokens"] < plain["input_tokens"]
    assert managed["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    untouched = counted(context_management={"edits": []})
    assert untouched == {**plain, "context_management": {"original_input_tokens": plain["input_tokens"]}}


def test_an_edit_of_another_type_is_a_hint(served: Served) -> None:
    fields = {"context_management": {"edits": [{"type": "forget_20270112"}]}}
    reply = served(Replica(), lambda: call(app, "POST", "/v1/messages", body_of("messages", **fields)))
    assert reply.headers["x-raydix-ignored"] == "context_management.edits.forget_20270112"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"type": "clear_tool_uses_20250919", "keep": "all"}, "'keep' at 0"),
        ({"type": "clear_thinking_20251015", "keep": {"type": "tool_uses", "value": 1}}, "'keep' at 0"),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "words", "value": 1}}, "trigger"),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": -1}}, "trigger"),
    ],
    ids=str,
)
def test_what_no_edit_can_be_is_refused_by_name(edit: dict[str, Any], named: str) -> None:
    body = json.dumps({"max_tokens": 5, "messages": turns(1), "context_management": {"edits": [edit]}})
    with pytest.raises(RequestError, match="context_management") as caught:
        parse_messages(body.encode())
    assert named in caught.value.message


def test_a_chat_that_fits_only_without_the_old_results_is_served() -> None:
    """The context of the test's model has 4,096 tokens, and the chat has more."""
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}}}]
    body = {"max_tokens": 5, "messages": turns(12, content=LONG * 10), "tools": tools}
    with pytest.raises(RequestError, match="context"):
        reader().read_body("messages", json.dumps(body).encode())
    reading = reader().read_body("messages", json.dumps({**body, "context_management": MANAGED}).encode())
    assert reading.chat is not None and reading.edits is not None
    [applied] = reading.edits.applied
    assert len(reading.chat.token_ids) + applied.num_tokens == reading.edits.original_tokens


def test_the_prompt_that_the_next_turn_will_have_is_known_when_the_answer_ends() -> None:
    """With the result of the answer's call one more result will be left out: this prompt is computed ahead."""
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}}}]
    chat = turns(6)

    def read(number: int) -> Any:
        body = {"max_tokens": 5, "messages": chat[:number], "tools": tools, "context_management": MANAGED}
        return reader().read_body("messages", json.dumps(body).encode())

    before, after = read(len(chat) - 2), read(len(chat))
    answer = after.edits.original[-2]
    spec = before.spec
    turn = NextTurn(
        before.edits.original,
        before.chat,
        answer,
        tools=spec.tools.definitions,
        edits=spec.edits,
        template=spec.template,
    )
    known = reader().next_turn(turn)
    result = after.chat.text.rindex("5 long")
    assert known == after.chat.token_ids[: len(known)]
    # All but the few tokens between the last special one and the result, which may join with it.
    assert len(known) >= len(reader()._tokenizer.encode(after.chat.text[:result])) - 10


def test_the_next_turn_of_an_edited_chat_is_as_long_as_the_chat_that_the_client_sends(served: Served) -> None:
    """Its size says whether it is read on the event loop."""
    made, sizes = Replica(max_model_len=40_000), []

    async def next_turn(turn: NextTurn, size: int) -> Sequence[int]:
        sizes.append(size)
        return ()

    made.reader.next_turn = next_turn  # type: ignore[method-assign]
    fields = {"messages": turns(5, content=LONG * 10), "context_management": MANAGED}
    served(made, lambda: call(app, "POST", "/v1/messages", body_of("messages", **fields)))
    [size] = sizes
    assert size > 5 * len(LONG * 10)
