"""Answers of `/v1/responses`: the response as a whole, and as server-sent events.

A stream is `response.created` and `response.in_progress`; for each item `response.output_item.added` and
`response.output_item.done`; between these, of a message or reasoning `response.content_part.added`, any number of
`response.output_text.delta` or `response.reasoning_text.delta`, and the `done` of text and part, and of a call any
number of `response.function_call_arguments.delta` and their `done`, or of `response.custom_tool_call_input.delta` where
the tool is a custom one; at last `response.completed` or
`response.incomplete` with the response as a whole. Events are numbered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import orjson

from raydix.engine.api.answers import AnswerContext
from raydix.engine.api.assembler import Piece
from raydix.engine.api.openai_responses.compaction import item as compaction_item
from raydix.engine.api.responses import ID_PREFIXES, Choice, Json, ResponseHead, TokenUsage
from raydix.engine.api.slices import array_of, document, ids_of
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.wire import OPENAI, WireFormat
from raydix.engine.core.errors import RaydixError, ServiceError
from raydix.engine.core.ingress.parsers.answer import AssembledMessage, Call, Reasoning
from raydix.engine.core.ingress.parsers.events import (
    AnswerEvent,
    AnswerText,
    ArgumentsPart,
    CallBegins,
    CallEnds,
    InputPart,
    ReasoningPart,
)
from raydix.engine.core.types import FinishReason

Part: TypeAlias = str | Reasoning | Call


class ResponseWriter:
    """Writes one response. A choice with a `message_id` is stored."""

    def __init__(self, context: AnswerContext) -> None:
        assert context.spec.turn is not None
        self._context = context
        self._turn = context.spec.turn
        # Ids of items are made of the response's, so a response that is generated again has the same ones.
        self._unique = context.head.id.removeprefix("resp_")
        self._num_events = 0  # events so far, with those that the reader has already
        self._first = len([*self._summary()])  # index of the answer's first item, behind that of a summary
        self.is_in_conversation = True
        """False: the answer could not be added to its conversation."""
        self._index = self._first  # number of the item that is open in the stream, or else of the next one
        self._open: Part | None = None  # text so far of the open message, or the open reasoning or call
        self._logprobs: list[orjson.Fragment] = []  # log-probabilities of the open message, a JSON text for each token
        self.wire: WireFormat = replace(OPENAI, error_event=self._error_event)

    def response(self, choice: Choice, usage: TokenUsage) -> Json:
        is_cut = choice.finish_reason is FinishReason.LENGTH
        return self._response(
            "incomplete" if is_cut else "completed",
            self.output(choice, [] if choice.logprobs is None else choice.logprobs["content"]),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            store=choice.message_id is not None,
            usage=_usage(usage),
            **self._messages(choice),
        )

    def output(self, choice: Choice, logprobs: object = ()) -> list[Json]:
        """The items of the answer, the first one with these log-probabilities."""
        is_cut = choice.finish_reason is FinishReason.LENGTH
        parts, items = _parts(choice), [*self._summary()]
        for index, part in enumerate(parts):
            # Only the last item can have been cut: the others ended before the limit was reached.
            status = "incomplete" if is_cut and index == len(parts) - 1 else "completed"
            items.append(self._item(self._first + index, part, status, () if index else logprobs))
        return items

    def _summary(self) -> Iterator[Json]:
        """The item of a summary that was made for this request, if there is one."""
        summary = self._context.summary
        if summary is not None and summary.text is not None:
            yield compaction_item(summary.unique, summary.text)

    def _messages(self, choice: Choice) -> Json:
        """Prompt and answer as vLLM shows them: texts, with special tokens by their names, and token ids."""
        if not self._turn.shows_messages:
            return {}
        raw = {"input_messages": choice.prompt_token_ids, "output_messages": choice.token_ids}
        return {name: [self._raw_message(token_ids or ())] for name, token_ids in raw.items()}

    def _raw_message(self, token_ids: Sequence[int]) -> Json:
        text = b"".join(map(self._context.token_bytes, token_ids)).decode("utf-8", "replace")
        return {"type": "raw_message_tokens", "message": text, "tokens": ids_of(token_ids)}

    def body(self, choice: Choice, usage: TokenUsage) -> Iterator[bytes]:
        return document(self.response(choice, usage))

    def first(self, usage: TokenUsage) -> bytes:
        response = self._response("in_progress", [], store=self._turn.is_stored)
        opening = self._event("response.created", {"response": response})
        opening += self._event("response.in_progress", {"response": response})
        # A summary is whole before the answer begins, so its item opens and closes at once.
        for item in self._summary():
            for kind in ("added", "done"):
                opening += self._event(f"response.output_item.{kind}", {"output_index": 0, "item": item})
        return opening

    def piece(self, piece: Piece) -> bytes:
        # A parsed answer is told by its parts; without a parser all of the answer is text.
        if self._context.message is not None:
            return b"".join(self._part(event, self._context.message) for event in piece.events)
        logprobs = []
        if self._context.logprobs is not None:
            content = self._context.logprobs(piece)["content"]
            assert isinstance(content, list)
            logprobs = [orjson.Fragment(orjson.dumps(token)) for token in content]
        return self._text(piece.text, logprobs) if piece.text or logprobs else b""

    def end(self, choice: Choice, usage: TokenUsage) -> Iterator[bytes]:
        # An answer without any text has one message all the same.
        if self._index == self._first and self._open is None:
            yield self._opened("")
        is_cut = choice.finish_reason is FinishReason.LENGTH
        yield from self._closing("incomplete" if is_cut else "completed")
        response = self.response(choice, usage)
        yield from self._slices(f"response.{response['status']}", {"response": response})

    def _part(self, event: AnswerEvent, message: AssembledMessage) -> bytes:
        """Events of a part of a parsed answer; `message` has all parts."""
        match event:
            case AnswerText(text):
                return self._text(text, [])
            case ReasoningPart(text):
                return self._reasoning(text)
            case CallBegins(index, name):
                begun = message.begun[index]
                return self._closed() + self._opened(Call(begun.id, name, input=None if begun.input is None else []))
            case InputPart(_, text) if isinstance(self._open, Call):
                self._open.take_input(text)
                return self._event("response.custom_tool_call_input.delta", self._at({"delta": text}))
            # Arguments of a custom tool's call only carry its input, which has events of its own.
            case ArgumentsPart(_, text) if isinstance(self._open, Call) and self._open.input is None:
                self._open.arguments.append(text)
                return self._event("response.function_call_arguments.delta", self._at({"delta": text}))
            case CallEnds():
                return self._closed()
            case _:
                return b""

    def _text(self, text: str, logprobs: Sequence[orjson.Fragment]) -> bytes:
        """Events of more text."""
        # Text behind a call, or behind reasoning, is a new item.
        opening = b"" if isinstance(self._open, str) else self._closed() + self._opened("")
        assert isinstance(self._open, str)
        self._open += text
        self._logprobs += logprobs
        data = {"content_index": 0, "delta": text, "logprobs": logprobs}
        return opening + self._event("response.output_text.delta", self._at(data))

    def _reasoning(self, text: str) -> bytes:
        """Events of more reasoning."""
        opening = b"" if isinstance(self._open, Reasoning) else self._closed() + self._opened(Reasoning())
        assert isinstance(self._open, Reasoning)
        self._open.text += text
        return opening + self._event("response.reasoning_text.delta", self._at({"content_index": 0, "delta": text}))

    def _opened(self, part: Part) -> bytes:
        """Events that open an item: an empty text, reasoning without text, or a call without arguments."""
        self._open, self._logprobs = part, []
        item = self._item(self._index, part, "in_progress", [])
        if isinstance(part, Call):
            return self._event("response.output_item.added", {"output_index": self._index, "item": item})
        added = {"output_index": self._index, "item": item | {"content": []}}
        opening = self._event("response.output_item.added", added)
        return opening + self._event(
            "response.content_part.added", self._at({"content_index": 0, "part": _content_part(part, [])})
        )

    def _closed(self) -> bytes:
        """Events that close the open item, if there is one."""
        return b"".join(self._closing("completed"))

    def _closing(self, status: str) -> Iterator[bytes]:
        """Yield the events that close the open item, if there is one, in slices."""
        part, self._open = self._open, None
        if part is None:
            return
        # Kept apart: the writing of slices is lazy, and the next item has another list.
        known = self._logprobs
        logprobs = array_of(lambda: known)
        if isinstance(part, Call) and part.input is not None:
            data: Json = {"input": "".join(part.input)}
            yield self._event("response.custom_tool_call_input.done", self._at(data, part))
        elif isinstance(part, Call):
            data = {"name": part.name, "arguments": "".join(part.arguments)}
            yield self._event("response.function_call_arguments.done", self._at(data, part))
        else:
            kind, done = "output_text", _content_part(part, logprobs)
            data = {"content_index": 0, "text": done["text"]}
            if isinstance(part, Reasoning):
                kind = "reasoning_text"
            else:
                data["logprobs"] = logprobs
            yield from self._slices(f"response.{kind}.done", self._at(data, part))
            yield from self._slices("response.content_part.done", self._at({"content_index": 0, "part": done}, part))

        item = self._item(self._index, part, status, logprobs)
        yield from self._slices("response.output_item.done", {"output_index": self._index, "item": item})
        self._index += 1

    def _response(self, status: str, output: Sequence[Json], **fields: object) -> Json:
        if not self.is_in_conversation:
            fields["conversation"] = None
        return _response(self._context.head, self._context.spec, status, output, **fields)

    def _item(self, index: int, part: Part, status: str, logprobs: object) -> Json:
        """An item of the output: a message with a text, reasoning, or a call."""
        item: Json = {"id": self._item_id(index, part), "status": status}
        if isinstance(part, str):
            return item | {"type": "message", "role": "assistant", "content": [_content_part(part, logprobs)]}
        if isinstance(part, Reasoning):
            return item | {"type": "reasoning", "summary": [], "content": [_content_part(part, [])]}
        if part.input is not None:
            custom = {"call_id": part.id, "name": part.name, "input": "".join(part.input)}
            return item | {"type": "custom_tool_call", **custom}
        call = {"call_id": part.id, "name": part.name, "arguments": "".join(part.arguments)}
        # The model knows one name; the client has the function in a namespace.
        if part.name in self._turn.namespaces:
            call["namespace"], call["name"] = self._turn.namespaces[part.name]
        return item | {"type": "function_call", **call}

    def _item_id(self, index: int, part: Part) -> str:
        prefix = "msg" if isinstance(part, str) else "rs"
        if isinstance(part, Call):
            prefix = "fc" if part.input is None else "ctc"
        return f"{prefix}_{self._unique}_{index}" if index else f"{prefix}_{self._unique}"

    def _at(self, data: Json, part: Part | None = None) -> Json:
        """Data of an event of the open item, or of the item of `part`."""
        of = self._open if part is None else part
        item_id = self._item_id(self._index, "" if of is None else of)
        return {"item_id": item_id, "output_index": self._index, **data}

    def _event(self, kind: str, data: Json) -> bytes:
        """The next event."""
        return b"".join(self._slices(kind, data))

    def _slices(self, kind: str, data: Json) -> Iterator[bytes]:
        """The next event in slices."""
        numbered = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        # Counted and not sent: a reader that comes back has these, and the numbers go on.
        if self._num_events <= self._context.num_had_events:
            return
        yield b"event: %s\ndata: " % kind.encode()
        yield from document(numbered)
        yield b"\n\n"

    def _error_event(self, error: RaydixError) -> bytes:
        """The last event of a stream that cannot go on. OpenAI's client raises it as an APIError."""
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})


def _response(head: ResponseHead, spec: GenerationSpec, status: str, output: Sequence[Json], **fields: object) -> Json:
    assert spec.turn is not None
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": output,
        "background": spec.turn.in_background,
        "conversation": None if spec.turn.conversation is None else {"id": spec.turn.conversation},
        "reasoning": {"effort": spec.reasoning.effort, "summary": None},
        "service_tier": "default",
        "truncation": "disabled",
        "usage": None,
        **spec.turn.repeated,
        **fields,
    }


# Stands in a response under way before anything that a client has written.
_UNDER_WAY = b'"status":"in_progress","error":null,'


def under_way(head: ResponseHead, spec: GenerationSpec) -> bytes:
    """A response in the background before its answer."""
    response = orjson.dumps(_response(head, spec, "in_progress", [], store=True))
    assert _UNDER_WAY in response[:512]
    return response


def queued(response: bytes) -> bytes:
    """The response `under_way` as the request for it is answered."""
    return response.replace(_UNDER_WAY, b'"status":"queued","error":null,', 1)


def cancelled(response: bytes) -> bytes:
    """The response `under_way` when it has been cancelled."""
    return response.replace(_UNDER_WAY, b'"status":"cancelled","error":null,', 1)


def failed(response: bytes, error: RaydixError) -> bytes:
    """The response `under_way` when it has failed by an error."""
    code = "server_error" if isinstance(error, ServiceError) else "invalid_prompt"
    shown = orjson.dumps({"code": code, "message": error.message})
    return response.replace(_UNDER_WAY, b'"status":"failed","error":%s,' % shown, 1)


def _parts(choice: Choice) -> list[Part]:
    """The items of an answer in their order, at least one."""
    if choice.message is None:
        return [choice.text]
    return [*choice.message.parts] or [""]


def _content_part(part: str | Reasoning, logprobs: object) -> Json:
    """The content of a message or of reasoning."""
    if isinstance(part, Reasoning):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part, "annotations": [], "logprobs": logprobs}


def count_body(num_tokens: int) -> bytes:
    """Body of `/v1/responses/input_tokens`."""
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": num_tokens})


def compact_body(head: ResponseHead, user_texts: Sequence[str], compaction: Json, usage: TokenUsage) -> bytes:
    """Body of `/v1/responses/compact`: the user's messages, for clients that show them, and the summary."""
    unique = head.id.removeprefix(ID_PREFIXES["responses"])
    said = [
        {
            "id": f"msg_{unique}_{number}",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": text}],
        }
        for number, text in enumerate(user_texts)
    ]
    return orjson.dumps(
        {
            "id": head.id,
            "object": "response.compaction",
            "created_at": head.created,
            "output": [*said, compaction],
            "usage": _usage(usage),
        }
    )


def _usage(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
