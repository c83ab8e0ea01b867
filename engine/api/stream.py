"""A response as server-sent events.

A stream is, for each choice, `ChunkWriter.first` (a chat's role), any number of `text` or `event`, and one `finish`;
then `usage_event` if asked for, and `DONE`. An error ends it with `error_event` instead.

Nearly every event is text alone, at tens of thousands a second. The JSON around that text never changes, so a writer
renders it once and `text` only escapes the text.
"""

from collections.abc import Sequence

import orjson

from engine.api.responses import Json, ResponseHead, Usage, error_body, wire_finish_reason
from engine.core.errors import RaydixError
from engine.core.types import FinishReason

DONE = b"data: [DONE]\n\n"

_MARK = "\x00raydix-text\x00"


def error_event(error: RaydixError) -> bytes:
    """The last event of a stream that cannot go on. OpenAI's client raises it as an APIError."""
    return _event(error_body(error))


def usage_event(head: ResponseHead, usage: Usage) -> bytes:
    """The last event before `DONE` where `include_usage` was asked for."""
    return _event(orjson.dumps({**head.object(stream=True), "choices": [], "usage": usage.object()}))


class ChunkWriter:
    """Writes the events of one choice. Every method returns complete events (`data: {...}` and an empty line), or
    nothing.

    `include_usage`: the stream will end with a usage, so each chunk carries `"usage": null`.
    """

    __slots__ = ("_after", "_before", "_head", "_include_usage", "_index", "_is_chat")

    def __init__(self, head: ResponseHead, index: int = 0, *, include_usage: bool = False) -> None:
        self._head = head
        self._index = index
        self._include_usage = include_usage
        self._is_chat = head.kind == "chat"
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
        """An event with text alone."""
        return self._before + orjson.dumps(text) + self._after

    def event(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        logprobs: Json | None = None,
    ) -> bytes:
        """An event with text (it may be empty) and what belongs to its tokens."""
        if token_ids is None and logprobs is None:
            return self.text(text)
        return self._chunk(text, token_ids, logprobs, None, None)

    def finish(
        self,
        reason: FinishReason,
        text: str = "",
        *,
        token_ids: Sequence[int] | None = None,
        logprobs: Json | None = None,
    ) -> bytes:
        """The choice's last text, if any, and the event that ends it. Raises ValueError for an abort or error."""
        word = wire_finish_reason(reason)
        if not self._is_chat:
            return self._chunk(text, token_ids, logprobs, word, None)
        last = b""
        if text:
            last = self.event(text, token_ids=token_ids, logprobs=logprobs)
            token_ids, logprobs = None if token_ids is None else (), None
        return last + self._render({}, token_ids, logprobs, word, None)

    def _chunk(
        self,
        text: str,
        token_ids: Sequence[int] | None,
        logprobs: Json | None,
        finish_reason: str | None,
        prompt_token_ids: Sequence[int] | None,
    ) -> bytes:
        content: str | Json = {"content": text} if self._is_chat else text
        return self._render(content, token_ids, logprobs, finish_reason, prompt_token_ids)

    def _render(
        self,
        content: str | Json,
        token_ids: Sequence[int] | None,
        logprobs: Json | None,
        finish_reason: str | None,
        prompt_token_ids: Sequence[int] | None,
    ) -> bytes:
        choice: Json = {
            "index": self._index,
            "delta" if self._is_chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = self._head.object(stream=True)
        chunk["choices"] = [choice]
        if self._include_usage:
            chunk["usage"] = None
        if token_ids is not None:
            choice["token_ids"] = list(token_ids)
        if prompt_token_ids is not None:
            (chunk if self._is_chat else choice)["prompt_token_ids"] = list(prompt_token_ids)
        return _event(orjson.dumps(chunk))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
