"""Conversations that begin anew with a summary, at OpenAI's Responses API."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.actors.ingress.http import CLIENT_CLOSED_REQUEST
from raydix.engine.api.compaction import BEGIN, END, REQUEST, user_texts
from raydix.engine.api.openai_responses.compaction import content_of, text_of
from raydix.engine.api.openai_responses.requests import parse_compact, parse_responses
from raydix.engine.core.errors import RequestError
from raydix.engine.core.tenants import EVERYONE
from raydix.engine.core.types import FinishReason
from tests.unit.ingress import ANSWER, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

LONG = "a long word " * 100
CHAT = [
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": "first"},
    {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": LONG},
    {"role": "assistant", "content": "it is noon"},
    {"role": "user", "content": "and now?"},
]
RULE = [{"type": "compaction", "compact_threshold": 1000}]
SUMMARY = f"{BEGIN}{ANSWER}{END}"
ANEW = f"first\n\n{SUMMARY}\n\nand now?"


def post(path: str = "/v1/responses", **fields: Any) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "POST", path, body_of("responses", **fields))


def replica() -> Replica:
    return Replica(max_model_len=40_000)


def prompts_of(made: Replica) -> list[str]:
    """The prompts that workers have got."""
    return ["".join(map(chr, generation.prompt)) for generation in made.dispatcher.begun]


def test_a_long_conversation_begins_anew_before_the_answer(served: Served) -> None:
    made = replica()
    reply = served(made, post(input=CHAT, instructions="brief", context_management=RULE))
    assert reply.status == 200, reply.body
    compaction, message = reply.json["output"]
    assert compaction["type"] == "compaction" and text_of(compaction["encrypted_content"]) == ANEW
    assert message["content"][0]["text"] == ANSWER
    about, answered = prompts_of(made)
    # The summary's prompt is the session's own with one more message, and the question is not part of it.
    assert about.startswith(f"briefbe kindfirst{LONG}") and about.endswith(f"it is noon{REQUEST}")
    assert answered == f"briefbe kind{ANEW}"


def test_the_next_request_begins_with_the_same_prompt_whether_or_not_it_sends_all(served: Served) -> None:
    made = replica()
    output = served(made, post(input=CHAT, context_management=RULE)).json["output"]
    more = {"role": "user", "content": "thanks"}
    for sent in ([*CHAT, *output, more], [CHAT[0], *output, more]):
        served(made, post(input=sent, context_management=RULE))
        assert prompts_of(made)[-1] == f"be kind{ANEW}{ANSWER}thanks"
    assert len(prompts_of(made)) == 4, "neither needs a summary of its own"


def test_a_conversation_goes_on_by_the_id_of_its_compacted_response(served: Served) -> None:
    made = replica()
    first = served(made, post(input=CHAT[:4])).json
    second = served(made, post(input="and now?", previous_response_id=first["id"], context_management=RULE)).json
    assert [item["type"] for item in second["output"]] == ["compaction", "message"]
    assert second["previous_response_id"] == first["id"]
    served(made, post(input="thanks", previous_response_id=second["id"]))
    assert prompts_of(made)[-1] == f"be kind{ANEW}{ANSWER}thanks"


def test_a_stream_has_the_summary_before_the_answer(served: Served) -> None:
    reply = served(replica(), post(input=CHAT, context_management=RULE, stream=True))
    events = [json.loads(event.split("\ndata: ")[1]) for event in reply.body.decode().strip().split("\n\n")]
    items = [(event["output_index"], event["item"]["type"]) for event in events if event["type"].endswith("item.done")]
    assert items == [(0, "compaction"), (1, "message")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert {event["output_index"] for event in deltas} == {1}
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["compaction", "message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "short"},
        {"input": CHAT, "context_management": []},
        # No summary helps where the user or the system alone has said so much: each request would have another one.
        {"input": [*CHAT[:3], {**CHAT[3], "output": "noon"}, CHAT[4], {"role": "user", "content": LONG}]},
        {"input": [*CHAT[:3], {**CHAT[3], "output": "noon"}, *CHAT[4:]], "instructions": LONG},
    ],
    ids=str,
)
def test_what_is_short_or_not_to_be_compacted_is_answered_alone(served: Served, fields: dict[str, Any]) -> None:
    made = replica()
    [item] = served(made, post(**{"context_management": RULE, **fields})).json["output"]
    assert item["type"] == "message" and len(prompts_of(made)) == 1


def test_a_conversation_is_compacted_by_its_route(served: Served) -> None:
    made = replica()
    reply = served(made, post("/v1/responses/compact", input=CHAT, instructions="brief"))
    assert reply.status == 200, reply.body
    compacted = reply.json
    assert compacted["object"] == "response.compaction" and compacted["usage"]["output_tokens"] == len(ANSWER) + 1
    *said, item = compacted["output"]
    assert [each["content"][0]["text"] for each in said] == ["first", "and now?"]
    assert text_of(item["encrypted_content"]) == ANEW
    assert prompts_of(made) == [f"briefbe kindfirst{LONG}it is noonand now?\n\n{REQUEST}"]
    served(made, post(input=[*compacted["output"], {"role": "user", "content": "thanks"}], instructions="brief"))
    assert prompts_of(made)[-1] == f"brief{ANEW}\n\nthanks"
    assert [ended.outcome for ended in made.ledger.ended] == ["stop", "stop"]


def test_the_beginning_of_the_shortened_conversation_is_computed_at_idle_priority() -> None:
    async def run() -> str:
        made = replica()
        body = body_of("responses", input=CHAT, instructions="brief")
        job = await made.frontend.compaction.of_body(body, made.frontend.tenants.named(None))
        for _ in range(5):
            await asyncio.sleep(0)
        return "".join(map(chr, made.dispatcher.prepared[-1])) if job else ""

    assert asyncio.run(run()) == f"briefbe kind{ANEW}"


def test_a_stored_conversation_is_compacted_by_its_id(served: Served) -> None:
    made = replica()
    first = served(made, post(input=CHAT[:2])).json
    compacted = served(made, post("/v1/responses/compact", input=None, previous_response_id=first["id"])).json
    assert text_of(compacted["output"][-1]["encrypted_content"]) == f"first\n\n{SUMMARY}"
    assert prompts_of(made)[-1].endswith(f"{ANSWER}{REQUEST}")


def test_summaries_are_in_the_table_of_requests_with_the_objectives_of_their_headers(served: Served) -> None:
    made = replica()
    headers = {"x-slo-ttft-ms": "250"}
    for path in ("/v1/responses", "/v1/responses/compact"):
        body = body_of("responses", input=CHAT, context_management=RULE)
        assert served(made, lambda: call(app, "POST", path, body, headers=headers)).status == 200  # noqa: B023
    assert [generation.objectives.ttft_s for generation in made.dispatcher.begun] == [0.25] * 3
    rows = made.requests.report(EVERYONE)["requests"]
    assert [row["outcome"] for row in rows] == ["stop"] * 3 and len(made.ledger.ended) == 3
    assert made.room.num_held == 0


def test_a_conversation_without_a_summary_is_answered_as_it_is(served: Served) -> None:
    """A model that reasons may have no tokens left for the summary."""
    made = replica()
    made.dispatcher.answer = " \n"
    [item] = served(made, post(input=CHAT, context_management=RULE)).json["output"]
    assert item["type"] == "message"
    about, answered = prompts_of(made)
    assert about.endswith(REQUEST) and answered == f"be kindfirst{LONG}it is noonand now?"
    reply = served(made, post("/v1/responses/compact", input=CHAT))
    assert reply.status == 503 and "no summary" in reply.json["error"]["message"]
    assert made.room.num_held == 0


def test_a_summary_that_is_cut_takes_no_conversations_place(served: Served) -> None:
    made = replica()
    made.dispatcher.finish = FinishReason.LENGTH
    [item] = served(made, post(input=CHAT, context_management=RULE)).json["output"]
    assert item["type"] == "message"
    _, answered = prompts_of(made)
    assert answered == f"be kindfirst{LONG}it is noonand now?"
    reply = served(made, post("/v1/responses/compact", input=CHAT))
    assert (reply.status, "cut at" in reply.json["error"]["message"]) == (503, True)
    reply = served(made, post("/v1/responses/compact", input=CHAT, max_output_tokens=3))
    assert (reply.status, reply.json["error"]["param"]) == (400, "max_output_tokens")
    assert made.room.num_held == 0


def test_a_client_that_leaves_ends_its_summary(served: Served) -> None:
    made = replica()
    made.dispatcher.hangs_after = 2
    body = body_of("responses", input=CHAT, context_management=RULE)
    reply = served(made, lambda: call(app, "POST", "/v1/responses", body, leaves_at=lambda _: True))
    assert reply.status == CLIENT_CLOSED_REQUEST
    assert len(made.dispatcher.begun) == len(made.dispatcher.ended) <= 1, "nobody waits for an answer"
    assert made.room.num_held == 0


def test_a_job_that_comes_in_the_moment_in_which_its_request_is_cancelled_is_closed(served: Served) -> None:
    made = replica()
    add = made.records.add

    async def cancelled() -> None:
        asking = asyncio.ensure_future(post(input=CHAT, context_management=RULE)())

        def added(*arguments: Any, **fields: Any) -> None:
            add(*arguments, **fields)
            if made.dispatcher.begun:  # behind the summary: the job that answers is made in this step of the loop
                asking.cancel()

        made.records.add = added  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await asking

    served(made, cancelled)
    assert len(made.dispatcher.begun) == 1 and made.room.num_held == 0


def test_a_summary_is_not_summarised_as_the_users_words() -> None:
    item = {"type": "compaction", "encrypted_content": content_of(ANEW)}
    spec = parse_compact(json.dumps({"input": [item, {"role": "user", "content": "thanks"}]}).encode())
    assert [message["role"] for message in spec.messages] == ["user"]
    assert str(spec.messages[0]["content"]).startswith(f"{ANEW}\n\nthanks")


def test_a_summary_has_the_tools_in_its_prompt_and_calls_none() -> None:
    tool = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}
    spec = parse_compact(json.dumps({"input": CHAT, "tools": [tool], "tool_choice": "required"}).encode())
    assert spec.tools is not None and spec.tools.definitions and not (spec.tools.may_call or spec.tools.required)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "item 0"),
        ({"input": [{"type": "compaction", "encrypted_content": "raydix.1.!"}]}, "item 0"),
        ({"input": [{"type": "compaction"}]}, "encrypted_content"),
        ({"input": "x", "context_management": [{"type": "compaction", "compact_threshold": 999}]}, "compact_threshold"),
    ],
    ids=str,
)
def test_what_cannot_be_gone_on_from_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_responses(json.dumps(body).encode())


def test_a_compaction_of_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="'input' or 'previous_response_id'"):
        parse_compact(b"{}")


def test_a_conversation_that_leaves_no_room_for_a_summary_is_refused_by_name(served: Served) -> None:
    reply = served(Replica(max_model_len=1100), post("/v1/responses/compact", input=CHAT))
    assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded"


@given(st.lists(st.sampled_from([BEGIN, END, "a", " b\n"]), max_size=12).map("".join))
def test_what_the_user_said_is_the_text_outside_summaries(text: str) -> None:
    outside = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), "", text, flags=re.DOTALL).strip()
    assert user_texts([{"role": "user", "content": text}]) == ([outside] if outside else [])


def test_many_beginnings_of_summaries_are_read_in_one_pass() -> None:
    """One that follows each of them to the end of the text takes an hour."""
    text = BEGIN * 200_000
    assert user_texts([{"role": "user", "content": text}]) == [text.strip()]
