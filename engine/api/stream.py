"""A response as server-sent events.

A stream is, for each choice, `ChunkWriter.first` (a chat's role), any number of `text` or `event`, and one `finish`;
then `usage_event` if asked for, and `DONE`. An error ends a stream with `error_event` instead.

Nearly every event is text alone, at tens of thousands a second. The JSON around the text never changes, so a writer
renders it once and `text` only escapes the text.
"""

from collections.abc import Sequence

import orjson

from raydix.engine.api.responses import Json, ResponseHead, TokenUsage, error_body, wire_finish_reason
from raydix.engine.api.slices import ids_of, whole
from raydix.engine.core.errors import RaydixError
from raydix.engine.core.ingress.parsers.answer import AssembledMessage
from raydix.engine.core.ingress.parsers.events import (
    AnswerEvent,
    AnswerText,
    ArgumentsPart,
    CallBegins,
    InputPart,
    ReasoningPart,
)
from raydix.engine.core.types import FinishReason

DONE = b"data: [DONE]\n\n"

_MARK = "\x00raydix-text\x00"


def error_event(error: RaydixError) -> bytes:
    """The last event of a stream that cannot go on. OpenAI's client raises it as an APIError."""
    return _event(error_body(error))


def usage_event(head: ResponseHead, usage: TokenUsage) -> bytes:
    """The last event before `DONE` where `include_usage` was asked for."""
    return _event(orjson.dumps({**head.object(stream=True), "choices": [], "usage": usage.object()}))


class ChunkWriter:
    """Writes the events of one choice. Every method returns complete events (`data: {...}` and an empty line), or
    nothing.

    `include_usage`: the stream will end with a usage, so each chunk carries a usage: null, or `usage` where it is set.
    """

    __slots__ = ("_after", "_before", "_head", "_include_usage", "_index", "_is_chat", "usage")

    def __init__(self, head: ResponseHead, index: int = 0, *, include_usage: bool = False) -> None:
        self._head = head
        self._index = index
        self._include_usage = include_usage
        self._is_chat = head.kind == "chat"
        self.usage: TokenUsage | None = None
        """Usage of the choice so far, for the next chunks."""
        # The mark stands behind all that a caller or operator can have named, so the last one is ours.
        before, _, after = self._chunk(_MARK, None, None, None, None).rpartition(orjson.dumps(_MARK))
        self._before = before
        self._after = after

    def first(self, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The event that opens the choice: a chat's role. A completion has one only to carry `prompt_token_ids`."""
        if not self._is_chat:
            return b"" if prompt_token_ids is None else self._chunk("", None, None, None, prompt_token_ids)
        return self._render({"role": "assistant", "content": ""}, None, None, None, prompt_token_ids)

    def text(self, text: str) -> bytes:
        """An event with text alone, even where `usage` is set."""
        return self._before + orjson.dumps(text) + self._after

    def event(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        logprobs: Json | None = None,
    ) -> bytes:
        """Event with text (possibly empty) and the data of its tokens."""
        if token_ids is None and logprobs is None and self.usage is None:
            return self.text(text)
        return self._chunk(text, token_ids, logprobs, None, None)

    def parts(
        self,
        events: Sequence[AnswerEvent],
        message: AssembledMessage,
        *,
        token_ids: Sequence[int] | None = None,
        logprobs: Json | None = None,
    ) -> bytes:
        """An event for each part of a parsed chat, the first with the data of its tokens. `message` has all parts."""
        deltas = [delta for event in events if (delta := _delta(event, message)) is not None]
        if not deltas and (token_ids or logprobs is not None or self.usage is not None):
            deltas = [{}]
        data = b""
        for delta in deltas:
            data += self._render(delta, token_ids, logprobs, None, None)
            # The data of the tokens stands once, with the first part; further parts have empty ids.
            token_ids, logprobs = None if token_ids is None else (), None
        return data

    def finish(
        self,
        reason: FinishReason,
        text: str = "",
        *,
        token_ids: Sequence[int] | None = None,
        logprobs: Json | None = None,
        stop_reason: str | int | None = None,
        message_id: str | None = None,
    ) -> bytes:
        """The event with the choice's last text, if any, and its end, with the `id` of a chat's message if there is
        one. Raises ValueError for an abort or error."""
        end: Json = {
            "finish_reason": wire_finish_reason(reason),
            "stop_reason": stop_reason,
            "matched_stop": stop_reason,
        }
        if not self._is_chat:
            return self._chunk(text, token_ids, logprobs, end, None)
        delta: Json = {} if message_id is None else {"id": message_id}
        if text:
            delta["content"] = text
        return self._render(delta, token_ids, logprobs, end, None)

    def _chunk(
        self,
        text: str,
        token_ids: Sequence[int] | None,
        logprobs: Json | None,
        end: Json | None,
        prompt_token_ids: Sequence[int] | None,
    ) -> bytes:
        content: str | Json = {"content": text} if self._is_chat else text
        return self._render(content, token_ids, logprobs, end, prompt_token_ids)

    def _render(
        self,
        content: str | Json,
        token_ids: Sequence[int] | None,
        logprobs: Json | None,
        end: Json | None,
        prompt_token_ids: Sequence[int] | None,
    ) -> bytes:
        choice: Json = {
            "index": self._index,
            "delta" if self._is_chat else "text": content,
            "logprobs": logprobs,
            **(end or {"finish_reason": None}),
        }
        chunk = self._head.object(stream=True)
        chunk["choices"] = [choice]
        if self._include_usage:
            chunk["usage"] = None if self.usage is None else self.usage.object()
        if token_ids is not None:
            choice["token_ids"] = ids_of(token_ids)
        if prompt_token_ids is not None:
            (chunk if self._is_chat else choice)["prompt_token_ids"] = ids_of(prompt_token_ids)

        return _event(whole(chunk))


def _delta(event: AnswerEvent, message: AssembledMessage) -> Json | None:
    """The change that an event makes to a chat's message; None if it makes none."""
    match event:
        case AnswerText(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallBegins(index, name):
            call = message.begun[index]
            if call.input is not None:
                custom: Json = {"id": call.id, "type": "custom", "custom": {"name": name, "input": ""}}
                return {"tool_calls": [{"index": index, **custom}]}
            opened: Json = {"id": call.id, "type": "function"}
            return {"tool_calls": [{"index": index, **opened, "function": {"name": name, "arguments": ""}}]}
        case InputPart(index, text):
            return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
        case ArgumentsPart(index, text) if message.begun[index].input is None:
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
