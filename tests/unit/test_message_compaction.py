"""Chats that begin anew with a summary, at Anthropic's Messages API."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from raydix.actors.ingress import http
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.anthropic.requests import parse_messages
from raydix.engine.api.compaction import BEGIN, END, REQUEST_OF_ALL
from raydix.engine.api.context_edits import CLEARED
from raydix.engine.api.spec import CompactionUse
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.room import Permit
from raydix.engine.core.tenants import ANONYMOUS
from raydix.engine.core.types import FinishReason
from tests.unit.ingress import ANSWER, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_messages_app import events_of

MESSAGES = "/v1/messages"
CONTEXT = 6000
LONG = "a long word " * 420
"""5,040 characters, of which each is a token: more than three quarters of the context."""
SUMMARY = f"{BEGIN}{ANSWER}{END}"
CALL = {"type": "tool_use", "id": "c", "name": "clock", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": LONG}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": [RESULT]},
    {"role": "assistant", "content": "it is noon"},
    {"role": "user", "content": "and now?"},
]
EDIT = {"type": "compact_20260112"}
TOOL = {"name": "clock", "input_schema": {"type": "object"}}


def managed(**fields: Any) -> dict[str, Any]:
    """A context management with a compaction of these fields."""
    return {"edits": [EDIT | fields]}


def post(path: str = MESSAGES, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    asked = {"system": "be kind", "messages": CHAT, "context_management": managed(), **fields}
    given = {name: value for name, value in asked.items() if value is not None}
    return lambda: call(app, "POST", path, body_of("messages", **given))


def replica() -> Replica:
    return Replica(max_model_len=CONTEXT)


def prompts_of(made: Replica) -> list[str]:
    """The prompts that workers have got."""
    return ["".join(map(chr, generation.prompt)) for generation in made.dispatcher.begun]


def answered(served: Served, made: Replica, **fields: Any) -> Any:
    """The message that answers, read as the client reads it."""
    reply = served(made, post(**fields))
    assert reply.status == 200, reply.body
    TypeAdapter(BetaMessage).validate_json(reply.body, strict=True)
    return reply.json


def test_a_long_chat_begins_anew_before_the_answer(served: Served) -> None:
    made = replica()
    message = answered(served, made)
    compaction, text = message["content"]
    assert compaction == {"type": "compaction", "content": f"{SUMMARY}\n\nand now?"}
    assert text == {"type": "text", "text": ANSWER} and message["stop_reason"] == "end_turn"
    assert message["context_management"] == {"applied_edits": []}
    about, last = prompts_of(made)
    session = f"be kindfirst{LONG}it is noon"
    assert about == f"{session}{REQUEST_OF_ALL}", "the summary's prompt goes on from the session's own"
    assert about.startswith(session)
    assert last == f"be kind{SUMMARY}\n\nand now?"


def test_the_tokens_of_a_summary_are_an_iteration_of_their_own(served: Served) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    chat = [*CHAT[:3], {"role": "assistant", "content": [{"type": "text", "text": "noon", "cache_control": mark}]}]
    message = answered(served, replica(), messages=[*chat, CHAT[4]])
    about, own = message["usage"].pop("iterations")
    assert (about.pop("type"), own.pop("type")) == ("compaction", "message")
    assert own == message["usage"], "the summary counts nowhere else"
    for tokens, prompt in ((about, f"be kindfirst{LONG}noon{REQUEST_OF_ALL}"), (own, f"be kind{SUMMARY}\n\nand now?")):
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(tokens[name] for name in names) == len(prompt)
        assert tokens["output_tokens"] == len(ANSWER) + 1
    # The mark of a message that is gone is one of the message in its place.
    assert about["input_tokens"] == len(REQUEST_OF_ALL) and own["input_tokens"] == 0
    assert own["cache_creation"]["ephemeral_1h_input_tokens"] == own["cache_creation_input_tokens"] > 0


def test_the_next_request_begins_with_the_same_prompt_whether_or_not_it_sends_all(served: Served) -> None:
    made = replica()
    content = answered(served, made)["content"]
    said, more = {"role": "assistant", "content": content}, {"role": "user", "content": "thanks"}
    for sent in ([*CHAT, said, more], [said, more]):
        [text] = answered(served, made, messages=sent)["content"]
        assert text["type"] == "text" and "iterations" not in served(made, post(messages=sent)).json["usage"]
        assert prompts_of(made)[-1] == f"{prompts_of(made)[1]}{ANSWER}thanks"


def test_a_stream_has_the_summary_before_the_answer(served: Served) -> None:
    reply = served(replica(), post(stream=True))
    events = events_of(reply.body)
    for event in events:
        if event["type"] != "ping":
            TypeAdapter(BetaRawMessageStreamEvent).validate_json(json.dumps(event), strict=True)
    start, _, opened, delta, closed, *others = events
    assert (start["type"], opened["content_block"]) == ("message_start", {"type": "compaction", "content": None})
    assert delta["delta"] == {"type": "compaction_delta", "content": f"{SUMMARY}\n\nand now?"}
    assert (opened["index"], delta["index"], closed) == (0, 0, {"type": "content_block_stop", "index": 0})
    assert {event["index"] for event in others if "index" in event} == {1}
    assert "".join(event["delta"]["text"] for event in others if event["type"] == "content_block_delta") == ANSWER
    assert [each["type"] for each in others[-2]["usage"]["iterations"]] == ["compaction", "message"]


@pytest.mark.parametrize("fails", [False, True], ids=["made", "failed"])
def test_a_stream_has_signs_of_life_while_its_summary_is_made(
    served: Served, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(http, "QUIET_S", 0.01)
    made, commented = replica(), asyncio.Event()
    made.dispatcher.may_begin, made.dispatcher.fails_after = commented, 2 if fails else None

    def look(reply: Reply) -> bool:
        if ANTHROPIC.waiting in reply.body:
            commented.set()
        return False

    body = body_of("messages", messages=CHAT, context_management=managed(), stream=True)
    reply = served(made, lambda: call(app, "POST", MESSAGES, body, leaves_at=look))
    assert reply.status == 200 and reply.body.startswith(ANTHROPIC.waiting)
    events = [event for event in events_of(reply.body) if event["type"] != "ping"]
    if fails:
        assert [event["type"] for event in events] == ["error"] and len(made.dispatcher.begun) == 1
    else:
        assert events[1]["content_block"]["type"] == "compaction" and events[-1]["type"] == "message_stop"
        name = reply.headers["request-id"].removeprefix("req_")
        assert events[0]["message"]["id"] == f"msg_{name}", "the header came before the summary"
    assert made.room.num_held == 0


def test_a_client_that_leaves_a_stream_ends_its_summary(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "QUIET_S", 0.01)
    made = replica()
    made.dispatcher.hangs_after = 2

    def leaves(reply: Reply) -> bool:
        return bool(reply.body and made.dispatcher.begun)

    body = body_of("messages", messages=CHAT, context_management=managed(), stream=True)
    served(made, lambda: call(app, "POST", MESSAGES, body, leaves_at=leaves))
    assert len(made.dispatcher.begun) == len(made.dispatcher.ended) == 1
    assert made.room.num_held == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_pauses_ends_behind_the_summary(served: Served, stream: bool) -> None:
    made = replica()
    fields: dict[str, Any] = {
        "context_management": managed(pause_after_compaction=True),
        "min_tokens": 2,
        "stop_sequences": ["two"],
    }
    reply = served(made, post(**fields, stream=stream))
    if stream:
        *_, block, _, end, _ = events_of(reply.body)
        assert block["delta"]["type"] == "compaction_delta"
        stop, usage = end["delta"]["stop_reason"], end["usage"]
    else:
        stop, usage = reply.json["stop_reason"], reply.json["usage"]
        assert reply.json["content"] == [{"type": "compaction", "content": f"{SUMMARY}\n\nand now?"}]
    assert stop == "compaction"
    assert [each["type"] for each in usage["iterations"]] == ["compaction"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (0, 0), "nothing but the summary was generated"
    # The prompt that the next request begins with is there when the client has the summary.
    _, anew = made.dispatcher.begun
    assert prompts_of(made)[1] == f"be kind{SUMMARY}\n\nand now?" and anew.sampling.max_tokens == 0


def test_a_chat_goes_on_behind_a_pause(served: Served) -> None:
    made = replica()
    content = answered(served, made, context_management=managed(pause_after_compaction=True))["content"]
    paused = [*CHAT, {"role": "assistant", "content": content}]
    [text] = answered(served, made, messages=paused)["content"]
    assert text == {"type": "text", "text": ANSWER}
    assert prompts_of(made)[-1] == prompts_of(made)[1], "its prompt is the one that was computed"
    answered(served, made, messages=[*paused, {"role": "user", "content": "be brief"}])
    assert prompts_of(made)[-1] == f"{prompts_of(made)[1]}\nbe brief"


def test_an_agent_in_the_midst_of_its_calls_goes_on_with_the_summary(served: Served) -> None:
    made = replica()
    called = made.dispatcher.answer = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    message = answered(served, made, messages=CHAT[:3], tools=[TOOL], max_tokens=100)
    summary = f"{BEGIN}{called}{END}"
    assert prompts_of(made) == [f"be kindfirst{LONG}{REQUEST_OF_ALL}", f"be kind{summary}"]
    # The functions stand in the prompt of the summary, too, but no part of a summary is a call.
    compaction, call = message["content"]
    assert compaction["content"] == summary and (call["type"], call["name"]) == ("tool_use", "clock")
    assert message["stop_reason"] == "tool_use"


def test_the_clients_own_words_ask_for_the_summary(served: Served) -> None:
    made = replica()
    answered(served, made, context_management=managed(instructions="Name the files alone."))
    assert prompts_of(made)[0].endswith("it is noonName the files alone.")
    answered(served, made, context_management=managed(instructions=" \n"))
    assert prompts_of(made)[2].endswith(REQUEST_OF_ALL)


def test_a_summary_is_of_the_chat_that_the_model_sees(served: Served) -> None:
    """Edits are made first: the summary's prompt has what the session's has."""
    made = replica()
    cleared = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}, "keep": {}}
    cleared["keep"] = {"type": "tool_uses", "value": 1}
    twice = [*CHAT[:3], {"role": "assistant", "content": [CALL | {"id": "d"}]}]
    twice += [{"role": "user", "content": [RESULT | {"tool_use_id": "d"}]}, *CHAT[3:]]
    answered(served, made, messages=twice, context_management={"edits": [cleared, EDIT]})
    assert prompts_of(made)[0] == f"be kindfirst{CLEARED}{LONG}it is noon{REQUEST_OF_ALL}"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*CHAT[:2], CHAT[2] | {"content": [RESULT | {"content": "noon"}]}, *CHAT[3:]]},
        {"context_management": {"edits": []}},
        {"context_management": managed(trigger={"type": "input_tokens", "value": 50_000})},
        # What stays is the most of the prompt: each request would have one more summary.
        {"messages": [*CHAT[:2], CHAT[2] | {"content": [RESULT | {"content": "noon"}]}], "system": LONG},
        {"messages": [*CHAT[:1], CHAT[3], {"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": LONG}, {"role": "system", "content": "now!"}]},
        # A summary cannot go on in the words that the client has begun.
        {"messages": CHAT[:4]},
    ],
    ids=["short", "no-edit", "trigger", "system", "question", "only", "reminder", "begun"],
)
def test_what_is_short_or_not_to_be_compacted_is_answered_alone(served: Served, fields: dict[str, Any]) -> None:
    made = replica()
    message = answered(served, made, **fields)
    assert [block["type"] for block in message["content"]] == ["text"] and len(made.dispatcher.begun) == 1
    assert "iterations" not in message["usage"]


def test_a_client_that_names_no_trigger_gets_one_within_the_context() -> None:
    assert CompactionUse(None).within(1_000_000).threshold == 150_000
    assert CompactionUse(None).within(100_000).threshold == 75_000
    assert CompactionUse(90_000).within(80_000).threshold == 90_000, "a client may mean never"


def test_a_client_names_the_trigger(served: Served) -> None:
    made = Replica(max_model_len=120_000)
    long = [*CHAT[:2], CHAT[2] | {"content": [RESULT | {"content": LONG * 10}]}, *CHAT[3:]]
    trigger = {"type": "input_tokens", "value": 50_000}
    message = answered(served, made, messages=long, context_management=managed(trigger=trigger))
    assert [block["type"] for block in message["content"]] == ["compaction", "text"]
    about = prompts_of(made)[0]
    assert len(about) - len(REQUEST_OF_ALL) >= 0.98 * len(about), "what the session's own prompt has not is less"


@pytest.mark.parametrize("messages", [CHAT, CHAT[:4], CHAT[:1]], ids=["question", "answer", "one"])
def test_a_client_asks_for_a_summary_alone(served: Served, messages: list[dict[str, Any]]) -> None:
    made = replica()
    fields = {"context_management": None, "compaction": {"type": "summarize"}}
    message = answered(served, made, messages=messages, **fields)
    [block] = message["content"]
    question = "\n\nand now?" if messages is CHAT else ""
    assert block == {"type": "compaction", "content": f"{SUMMARY}{question}"}
    assert message["stop_reason"] == "compaction"
    # In the chat's place it is what an answer pauses with.
    behind = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "thanks"}]
    answered(served, made, messages=behind)
    assert prompts_of(made)[-1] == f"be kind{SUMMARY}{question}\nthanks"


NOW = {"role": "system", "content": "now!"}


@pytest.mark.parametrize(
    ("messages", "session", "system", "question"),
    [
        # Agents send reminders as texts beside a result, or as messages of the system.
        ([*CHAT[:2], CHAT[2] | {"content": [RESULT, {"type": "text", "text": "be brief"}]}], "", "", "be brief"),
        ([*CHAT, NOW], "it is noon", "now!", "and now?"),
        ([*CHAT, NOW, {"role": "user", "content": "so?"}], "it is noon", "now!", "and now?\n\nso?"),
    ],
    ids=["result", "reminder", "both"],
)
def test_the_users_latest_words_stay(
    served: Served, messages: list[dict[str, Any]], session: str, system: str, question: str
) -> None:
    made = replica()
    compaction, _ = answered(served, made, messages=messages)["content"]
    assert compaction["content"] == f"{SUMMARY}\n\n{question}"
    about, last = prompts_of(made)
    assert about == f"be kindfirst{LONG}{session}{REQUEST_OF_ALL}", (
        "the summary's prompt goes on from the session's own"
    )
    assert last == f"be kind{system}{SUMMARY}\n\n{question}"


@pytest.mark.parametrize("pauses", [False, True], ids=["answers", "pauses"])
@pytest.mark.parametrize("cut", [False, True], ids=["empty", "cut"])
def test_a_model_that_writes_no_summary_says_so(served: Served, cut: bool, pauses: bool) -> None:
    made = replica()
    if cut:
        made.dispatcher.finish = FinishReason.LENGTH
    else:
        made.dispatcher.answer = " \n"
    message = answered(served, made, context_management=managed(pause_after_compaction=pauses))
    failed, text = message["content"]
    assert failed == {"type": "compaction", "content": None} and text["type"] == "text"
    # A client that goes on as long as answers pause would never get another.
    assert message["stop_reason"] == ("model_context_window_exceeded" if cut else "end_turn")
    own = message["usage"]["iterations"][1]
    assert own["type"] == "message" and own["output_tokens"] > 0
    assert prompts_of(made)[1] == f"be kindfirst{LONG}it is noonand now?", "the chat stays as it is"
    # The client sends the block back, and the chat goes on behind it as if it were not there.
    answered(served, made, messages=[*CHAT, {"role": "assistant", "content": [failed]}], context_management=None)
    assert prompts_of(made)[-1] == prompts_of(made)[1]
    assert made.room.num_held == 0


def test_a_summary_alone_that_the_model_does_not_write_is_the_whole_answer(served: Served) -> None:
    made = replica()
    made.dispatcher.answer = " \n"
    message = answered(served, made, context_management=None, compaction={"type": "summarize"})
    assert message["content"] == [{"type": "compaction", "content": None}] and message["stop_reason"] == "compaction"
    assert made.dispatcher.begun[1].sampling.max_tokens == 0 and made.room.num_held == 0


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_messages_of_failed_summaries_alone_are_refused_by_name(served: Served, path: str, role: str) -> None:
    for mark in ({}, {"cache_control": {"type": "ephemeral"}}):
        block: dict[str, Any] = {"type": "compaction", "content": None, **mark}
        messages = [{"role": role, "content": [block]}]
        for fields in ({}, mark):
            reply = served(replica(), post(path, messages=messages, system=None, context_management=None, **fields))
            assert reply.status == 400 and "'messages' has nothing but" in reply.json["error"]["message"]


def test_a_mark_on_a_failed_summary_before_the_first_message_keeps_nothing() -> None:
    block = {"type": "compaction", "content": None, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": "hi"}]}]
    spec = parse_messages(json.dumps({"max_tokens": 5, "messages": messages}).encode())
    assert [message["content"] for message in spec.messages] == ["hi"] and spec.retention.marks == ()


def test_a_stream_that_can_be_gone_on_with_is_of_the_chat_and_no_summary_alone(served: Served) -> None:
    headers = {"last-event-id": "0"}

    def ask(**fields: Any) -> Reply:
        body = body_of("messages", messages=CHAT, stream=True, **fields)
        reply: Reply = served(replica(), lambda: call(app, "POST", MESSAGES, body, headers=headers))
        return reply

    refused = ask(compaction={"type": "summarize"})
    assert refused.status == 400 and "'Last-Event-ID' is not for an answer" in refused.json["error"]["message"]
    reply = ask(context_management=managed())
    assert reply.status == 200 and b"text_delta" in reply.body and b"compaction" not in reply.body


def test_all_before_a_summary_is_left_out_with_its_marks(served: Served) -> None:
    """Also of its own message, and whoever made it: Anthropic's blocks are texts as raydix's are."""
    made, mark = replica(), {"type": "ephemeral"}
    block = {"type": "compaction", "content": "<summary>It was noon.</summary>", "encrypted_content": "?"}
    said = [{"type": "text", "text": "gone", "cache_control": mark}, block | {"cache_control": mark}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "gone", "cache_control": mark}]},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": [*said, {"type": "text", "text": "yes"}]},
        {"role": "user", "content": [{"type": "text", "text": "and?", "cache_control": mark}]},
    ]
    usage = answered(served, made, messages=messages)["usage"]
    assert prompts_of(made) == ["be kindbe brief<summary>It was noon.</summary>yesand?"]
    assert usage["input_tokens"] == 0, "the last mark stands behind the whole prompt"


def test_a_count_makes_no_summary_and_has_what_is_behind_one(served: Served) -> None:
    made = replica()
    whole = served(made, post(f"{MESSAGES}/count_tokens", max_tokens=None)).json
    block = {"type": "compaction", "content": "noon"}
    messages = [*CHAT, {"role": "assistant", "content": [block]}]
    anew = served(made, post(f"{MESSAGES}/count_tokens", messages=messages)).json
    assert whole["input_tokens"] == len(f"be kindfirst{LONG}it is noonand now?")
    assert anew["input_tokens"] == len("be kindnoon") and not made.dispatcher.begun


def test_a_chat_that_leaves_no_room_for_a_summary_is_refused_in_the_words_that_agents_know(served: Served) -> None:
    prompt = len(f"be kindfirst{LONG}it is noonand now?")
    made = Replica(max_model_len=prompt + 10)
    reply = served(made, post())
    assert reply.status == 400 and "prompt is too long" in reply.json["error"]["message"]
    assert made.room.num_held == 0 and not made.dispatcher.begun


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (managed(trigger={"type": "input_tokens", "value": 49_999}), "'trigger' at 0 of 49999"),
        (managed(trigger={"type": "tool_uses", "value": 60_000}), "'trigger' at 0"),
        (managed(trigger={"type": "input_tokens", "value": "60000"}), "trigger"),
        (managed(trigger=60_000), "trigger"),
        (managed(pause_after_compaction="yes"), "pause_after_compaction"),
        (managed(instructions=["be brief"]), "instructions"),
        ({"edits": [EDIT, EDIT]}, "one edit of a type"),
    ],
    ids=str,
)
def test_what_no_compaction_can_be_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    body = json.dumps({"max_tokens": 5, "messages": CHAT, "context_management": fields})
    with pytest.raises(RequestError, match="context_management") as caught:
        parse_messages(body.encode())
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"compaction": {"type": "forget"}}, "compaction.type"),
        ({"compaction": {"type": "summarize"}, "context_management": {"edits": []}}, "cannot be given together"),
        ({"messages": [*CHAT, {"role": "assistant", "content": [{"type": "compaction", "content": " "}]}]}, "empty"),
        ({"messages": [*CHAT, {"role": "assistant", "content": [{"type": "compaction", "content": [1]}]}]}, "no text"),
    ],
    ids=str,
)
def test_what_cannot_be_gone_on_from_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_messages(json.dumps({"max_tokens": 5, "messages": CHAT, **fields}).encode())


def test_a_request_that_was_let_in_keeps_its_place_behind_its_summary(served: Served) -> None:
    made = Replica(max_model_len=CONTEXT, max_requests=1)
    released, taken = made.room.released, list[Permit]()

    def taken_at_once(permit: Permit) -> None:
        released(permit)
        if made.dispatcher.begun and not taken:  # another request comes as soon as there is a place behind the summary
            taken.extend(made.room.acquire(1, ANONYMOUS))

    made.room.released = taken_at_once  # type: ignore[method-assign]
    assert [block["type"] for block in answered(served, made)["content"]] == ["compaction", "text"]
    assert len(made.dispatcher.begun) == 2, "the place is free when the answer has ended"
    [permit] = taken
    permit.release()
    assert made.room.num_held == 0


def test_a_summary_that_fails_gives_the_place_back(served: Served) -> None:
    made = replica()
    made.dispatcher.fails_after = 2
    assert served(made, post()).status == 529 and made.room.num_held == 0


def test_a_request_has_waited_since_its_arrival_when_its_summary_is_there(served: Served) -> None:
    """The replica's clock goes a second further at each look."""
    made = replica()
    answered(served, made)
    about, own = made.ledger.ended
    assert about.ttft_s is not None and own.ttft_s is not None
    assert own.ttft_s > about.duration_s and own.duration_s > own.ttft_s


def test_a_line_of_a_batch_begins_anew_too(served: Served) -> None:
    made = replica()

    async def answer() -> Any:
        body = body_of("messages", messages=CHAT, context_management=managed())
        return await made.frontend.answer_line("messages", body, made.frontend.tenants.named(None))

    line = served(made, answer)
    assert [block["type"] for block in json.loads(line.body)["content"]] == ["compaction", "text"]
    assert made.room.num_held == 0, "lines take no places of clients' requests"
    assert {generation.priority for generation in made.dispatcher.begun} == {2**63 - 1}
