"""Answers of all routes that OpenAI's and Anthropic's clients know, read strictly by the models of these clients.

The clients themselves are lenient: they take objects with missing fields, which a program then stumbles over.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from openai.types.responses import CompactedResponse, Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from raydix.engine.core.ingress.parsers import HARMONY, HERMES
from tests.unit.ingress import Replica, Served, body_of, call, in_harmony
from tests.unit.served_app import app
from tests.unit.test_batch_routes import begin as begin_batch
from tests.unit.test_batch_routes import ended as batch_ended
from tests.unit.test_batch_routes import quick, serving, upload
from tests.unit.test_message_batches import asked
from tests.unit.test_message_batches import begin as begin_messages
from tests.unit.test_message_batches import ended as messages_ended
from tests.unit.waits import WAIT_S

__all__ = ["quick", "serving"]

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
CHANNELS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}'
)
"""gpt-oss' form of reasoning, a text and a call."""
REASONED = "<think>\nhm\n</think>\n\nyes"
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}
TOOL = {"type": "function", "name": "clock", "parameters": PARAMETERS}
MESSAGES_TOOL = {"name": "clock", "input_schema": PARAMETERS}
USER = {"type": "message", "role": "user", "content": "hi"}
LONG = 16_384


def strictly(kind: Any, body: bytes) -> Any:
    """The object in a JSON text, every field of its model there and of its type."""
    return TypeAdapter(kind).validate_json(body, strict=True)


def events(body: bytes) -> Iterator[bytes]:
    """The data of a stream's events, without pings, which the clients pass over."""
    for line in body.splitlines():
        data = line.removeprefix(b"data: ")
        if data != line and data not in (b"[DONE]", b'{"type":"ping"}'):
            yield data


def replica_of(answer: str | None = None, *, reasons: bool = False) -> Replica:
    in_channels = answer == CHANNELS
    tool_format = HARMONY if in_channels else HERMES
    replica = Replica(max_model_len=LONG, has_reasoning=reasons or in_channels, tool_format=tool_format)
    if in_channels:
        replica.dispatcher.answer = in_harmony(CHANNELS)
    elif answer is not None:
        replica.dispatcher.answer = answer
    return replica


ANSWERS: list[Any] = [
    # The client has no model of a chunk of a completion, whose choices have no reason of the end yet.
    ("/v1/completions", "completion", Completion, None, {}),
    ("/v1/completions", "completion", Completion, None, {"logprobs": 2}),
    ("/v1/chat/completions", "chat", ChatCompletion, ChatCompletionChunk, {}),
    ("/v1/chat/completions", "chat", ChatCompletion, ChatCompletionChunk, {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", "chat", ChatCompletion, ChatCompletionChunk, {"n": 2}),
    ("/v1/chat/completions", "chat", ChatCompletion, ChatCompletionChunk, {"tools": [CHAT_TOOL]}),
    ("/v1/responses", "responses", Response, ResponseStreamEvent, {}),
    ("/v1/responses", "responses", Response, ResponseStreamEvent, {"tools": [TOOL]}),
    ("/v1/responses", "responses", Response, ResponseStreamEvent, {"tools": [{"type": "custom", "name": "patch"}]}),
    ("/v1/responses", "responses", Response, ResponseStreamEvent, {"max_output_tokens": 2}),
    ("/v1/responses", "responses", Response, ResponseStreamEvent, {"include": ["message.output_text.logprobs"]}),
    ("/v1/responses", "responses", Response, ResponseStreamEvent, {"text": {"format": {"type": "json_object"}}}),
    ("/v1/messages", "messages", Message, RawMessageStreamEvent, {}),
    ("/v1/messages", "messages", Message, RawMessageStreamEvent, {"tools": [MESSAGES_TOOL]}),
    ("/v1/messages", "messages", Message, RawMessageStreamEvent, {"stop_sequences": ["e"]}),
    ("/v1/messages", "messages", BetaMessage, BetaRawMessageStreamEvent, {"context_management": {"edits": []}}),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("reasons", [False, True], ids=["plain", "reasoning"])
@pytest.mark.parametrize(("path", "route", "whole", "event", "fields"), ANSWERS, ids=str)
def test_answers(
    served: Served, path: str, route: str, whole: Any, event: Any, fields: dict[str, Any], reasons: bool, stream: bool
) -> None:
    answer = CALL if "tools" in fields else REASONED if reasons else None
    options = {"stream_options": {"include_usage": True}} if route in ("completion", "chat") else {}
    body = body_of(route, stream=stream, **fields, **(options if stream else {}))
    reply = served(replica_of(answer, reasons=reasons), lambda: call(app, "POST", path, body))
    assert reply.status == 200, reply.body
    if not stream:
        strictly(whole, reply.body)
        return
    for data in events(reply.body):
        if event is not None:
            strictly(event, data)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "route", "whole", "event", "fields"),
    [row for row in ANSWERS if row[1] != "completion" and "tools" in row[4]],
    ids=str,
)
def test_answers_in_channels(
    served: Served, path: str, route: str, whole: Any, event: Any, fields: dict[str, Any], stream: bool
) -> None:
    limit = {"max_output_tokens": 300} if route == "responses" else {"max_tokens": 300}
    body = body_of(route, stream=stream, **fields, **limit)
    reply = served(replica_of(CHANNELS), lambda: call(app, "POST", path, body))
    assert reply.status == 200
    for data in events(reply.body) if stream else [reply.body]:
        strictly(event if stream else whole, data)


def test_models_and_embeddings(served: Served) -> None:
    async def work() -> None:
        listed = (await call(app, "GET", "/v1/models")).json
        for kind in (Model, ModelInfo):
            strictly(kind, json.dumps(listed["data"][0]).encode())
        body = json.dumps({"input": ["a", "b"], "encoding_format": "float"}).encode()
        strictly(CreateEmbeddingResponse, (await call(app, "POST", "/v1/embeddings", body)).body)

    served(replica_of(), work)


def test_counts_and_errors(served: Served) -> None:
    async def work() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        strictly(MessageTokensCount, (await call(app, "POST", "/v1/messages/count_tokens", body)).body)
        strictly(
            InputTokenCountResponse, (await call(app, "POST", "/v1/responses/input_tokens", body_of("responses"))).body
        )
        for path in ("/v1/messages", "/v1/messages/batches", "/v1/messages/none"):
            strictly(ErrorResponse, (await call(app, "POST", path, b"{}")).body)

    served(replica_of(), work)


def test_stored_responses_and_those_in_the_background(served: Served) -> None:
    async def work() -> None:
        response = strictly(Response, (await call(app, "POST", "/v1/responses", body_of("responses"))).body)
        strictly(Response, (await call(app, "GET", f"/v1/responses/{response.id}")).body)
        strictly(ResponseItemList, (await call(app, "GET", f"/v1/responses/{response.id}/input_items")).body)
        background = await call(app, "POST", "/v1/responses", body_of("responses", background=True))
        queued = strictly(Response, background.body)
        assert queued.status == "queued"
        strictly(Response, (await call(app, "GET", f"/v1/responses/{queued.id}")).body)
        strictly(Response, (await call(app, "POST", f"/v1/responses/{queued.id}/cancel")).body)

    served(replica_of(), work)


def test_a_failed_response(served: Served) -> None:
    replica = replica_of()
    replica.dispatcher.fails_after = 2

    async def work() -> None:
        reply = await call(app, "POST", "/v1/responses", body_of("responses", background=True))
        shown = strictly(Response, reply.body)
        async with asyncio.timeout(WAIT_S):
            while shown.status != "failed":
                await asyncio.sleep(0.001)
                shown = strictly(Response, (await call(app, "GET", f"/v1/responses/{shown.id}")).body)
        assert shown.error is not None and shown.error.message

    served(replica, work)


def test_compactions(served: Served) -> None:
    async def work() -> None:
        history = [USER, {"role": "assistant", "content": "x" * 1500}, USER]
        reply = await call(app, "POST", "/v1/responses/compact", json.dumps({"input": history}).encode())
        # The client's model knows no messages of the user in an output, which OpenAI's route returns as well.
        *said, compaction = reply.json["output"]
        for item in said:
            strictly(ConversationItem, json.dumps(item).encode())
        whole = strictly(CompactedResponse, json.dumps({**reply.json, "output": [compaction]}).encode())
        assert [item.type for item in whole.output] == ["compaction"] and len(said) == 2
        rule = [{"type": "compaction", "compact_threshold": 1000}]
        body = body_of("responses", input=history, context_management=rule)
        response = strictly(Response, (await call(app, "POST", "/v1/responses", body)).body)
        assert response.output[0].type == "compaction"
        stream = body_of("responses", input=history, context_management=rule, stream=True)
        for data in events((await call(app, "POST", "/v1/responses", stream)).body):
            strictly(ResponseStreamEvent, data)

    served(replica_of(), work)


def test_conversations(served: Served) -> None:
    replica = replica_of(CALL)

    async def work() -> None:
        made = await call(
            app, "POST", "/v1/conversations", json.dumps({"items": [USER], "metadata": {"a": "b"}}).encode()
        )
        path = f"/v1/conversations/{strictly(Conversation, made.body).id}"
        body = body_of("responses", conversation=path.rpartition("/")[2], tools=[TOOL])
        response = await call(app, "POST", "/v1/responses", body)
        assert strictly(Response, response.body).conversation is not None
        call_id = response.json["output"][0]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "noon"}
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
        said = {"role": "assistant", "content": "noon"}
        added = await call(app, "POST", f"{path}/items", json.dumps({"items": [result, thought, said]}).encode())
        strictly(ConversationItemList, added.body)
        listed = strictly(ConversationItemList, (await call(app, "GET", f"{path}/items?order=asc")).body)
        assert [item.type for item in listed.data] == [
            "message",
            "message",
            "function_call",
            "function_call_output",
            "reasoning",
            "message",
        ]
        for item in listed.data:
            strictly(ConversationItem, (await call(app, "GET", f"{path}/items/{item.id}")).body)
        strictly(Conversation, (await call(app, "DELETE", f"{path}/items/{listed.data[0].id}")).body)
        strictly(Conversation, (await call(app, "POST", path, b'{"metadata": {}}')).body)
        strictly(ConversationDeletedResource, (await call(app, "DELETE", path)).body)

    served(replica, work)


def test_files_and_batches(serving: Callable[..., Any]) -> None:
    async def work() -> None:
        file = strictly(FileObject, (await upload()).body)
        strictly(FileDeleted, (await call(app, "DELETE", f"/v1/files/{file.id}")).body)
        batch = strictly(Batch, json.dumps(await begin_batch()).encode())
        strictly(Batch, json.dumps(await batch_ended(batch.id)).encode())

        made = strictly(MessageBatch, json.dumps(await begin_messages(asked("a"), asked("b", temperature=-1))).encode())
        ended = strictly(MessageBatch, json.dumps(await messages_ended(made.id)).encode())
        path = f"/v1/messages/batches/{ended.id}"
        for line in (await call(app, "GET", f"{path}/results")).body.splitlines():
            strictly(MessageBatchIndividualResponse, line)
        strictly(DeletedMessageBatch, (await call(app, "DELETE", path)).body)

    serving(work)
