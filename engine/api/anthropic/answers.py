"""Answers of `/v1/messages`: the message as a whole, and as server-sent events.

A stream is `message_start` and a `ping`; a summary that was made for the request, as a block whose text comes at once;
for each other block `content_block_start`, any number of `content_block_delta` and `content_block_stop`;
`message_delta` with the reason of the end, and `message_stop`.
"""

from collections.abc import Iterator, Sequence

import orjson

from raydix.engine.api.answers import AnswerContext, named_event
from raydix.engine.api.anthropic.blocks import TTLS
from raydix.engine.api.anthropic.context_management import edits_json, original_json
from raydix.engine.api.anthropic.errors import ANTHROPIC, PING
from raydix.engine.api.assembler import Piece
from raydix.engine.api.context_edits import ContextEdits
from raydix.engine.api.responses import Choice, Json, TokenUsage
from raydix.engine.api.spec import PromptMark
from raydix.engine.core.ingress.parsers.answer import AssembledMessage, Call, Reasoning
from raydix.engine.core.ingress.parsers.events import (
    AnswerEvent,
    AnswerText,
    ArgumentsPart,
    CallBegins,
    CallEnds,
    ReasoningPart,
)
from raydix.engine.core.types import FinishReason

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}

_MARK = "\x00raydix-text\x00"


def _delta(index: int, delta: Json) -> bytes:
    """The event of more of a block."""
    data = {"type": "content_block_delta", "index": index, "delta": delta}
    return named_event("content_block_delta", orjson.dumps(data))


# The event of a text in the first block, of which all but the text is always the same.
_BEFORE_TEXT, _, _AFTER_TEXT = _delta(0, {"type": "text_delta", "text": _MARK}).partition(orjson.dumps(_MARK))


class MessageWriter:
    """Writes one message."""

    wire = ANTHROPIC

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._index = 0  # number of the block that is open in the stream, or else of the next one
        self._open: str | None = None  # type of the open block

    def body(self, choice: Choice, usage: TokenUsage) -> Iterator[bytes]:
        parts: Sequence[str | Reasoning | Call] = [choice.text] if choice.message is None else choice.message.parts
        # Neither an empty text nor a cut call is a block that the client could send back.
        content = [block for part in parts if (block := _block(part)) is not None]
        if (summary := self._context.summary) is not None:
            content = [_compaction(summary.text), *(() if summary.ends_answer else content)]
        yield orjson.dumps(self._message(content, self._stop(choice, usage), usage) | self._managed())

    def first(self, usage: TokenUsage) -> bytes:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage.of_prompt)
        # As at the API, where a ping follows the start.
        return _event({"type": "message_start", "message": message}) + PING + self._summary()

    def piece(self, piece: Piece) -> bytes:
        if self._context.message is not None:
            return b"".join(self._part(event, self._context.message) for event in piece.events)
        return self._text(piece.text) if piece.text else b""

    def end(self, choice: Choice, usage: TokenUsage) -> Iterator[bytes]:
        yield self._closed()
        stop, used = self._stop(choice, usage), self._usage(usage)
        delta = _event({"type": "message_delta", "delta": stop, "usage": used, **self._managed()})
        yield delta + _event({"type": "message_stop"})

    def _summary(self) -> bytes:
        """Events of the summary that was made for this request, if there is one: of one delta, as at the API."""
        summary = self._context.summary
        if summary is None:
            return b""
        opening = self._opened(_compaction(None))
        delta = _delta(self._index, {"type": "compaction_delta", "content": summary.text})
        return opening + delta + self._closed()

    def _managed(self) -> Json:
        """What edits of the chat left out, if the request asks for edits."""
        edits = self._context.edits
        return {} if edits is None else {"context_management": edits_json(edits)}

    def _part(self, event: AnswerEvent, message: AssembledMessage) -> bytes:
        """Events of a part of a parsed answer; `message` has all parts."""
        match event:
            case AnswerText(text):
                return self._text(text)
            case ReasoningPart(text):
                opening = b"" if self._open == "thinking" else self._closed() + self._opened(_thinking(""))
                return opening + _delta(self._index, {"type": "thinking_delta", "thinking": text})
            case CallBegins(index, name):
                block: Json = {"type": "tool_use", "id": message.begun[index].id, "name": name, "input": {}}
                return self._closed() + self._opened(block)
            case ArgumentsPart(_, text):
                return _delta(self._index, {"type": "input_json_delta", "partial_json": text})
            case CallEnds():
                return self._closed()
            case _:
                return b""

    def _text(self, text: str) -> bytes:
        """Events of more text."""
        opening = b"" if self._open == "text" else self._closed() + self._opened({"type": "text", "text": ""})
        # Text of the first block, nearly every event of most streams, needs no JSON but its text's.
        if self._index:
            return opening + _delta(self._index, {"type": "text_delta", "text": text})
        return opening + _BEFORE_TEXT + orjson.dumps(text) + _AFTER_TEXT

    def _opened(self, block: Json) -> bytes:
        self._open = str(block["type"])
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _closed(self) -> bytes:
        """The event that closes the open block, if there is one."""
        if self._open is None:
            return b""
        self._open = None
        # The number goes on before the event is made, which names the closed block: the one before.
        self._index += 1
        return _event({"type": "content_block_stop", "index": self._index - 1})

    def _stop(self, choice: Choice, usage: TokenUsage) -> Json:
        """The reason of the message's end. A stop token that was asked for by its id ends the turn."""
        if self._context.summary is not None and self._context.summary.ends_answer:
            return {"stop_reason": "compaction", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        # The API tells an answer that reached `max_tokens` from one that filled the context.
        asked = self._context.spec.max_tokens
        is_full = choice.finish_reason is FinishReason.LENGTH and asked is not None and usage.completion_tokens < asked
        reason = "model_context_window_exceeded" if is_full else _STOP_REASONS[choice.finish_reason]
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[Json], stop: Json, usage: TokenUsage) -> Json:
        head = self._context.head
        return {
            "id": head.id,
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            **stop,
            "usage": self._usage(usage),
            **self._diagnosed(usage),
        }

    def _diagnosed(self, usage: TokenUsage) -> Json:
        """Why the prompt was not hit up to the end of an earlier one, if the request asks."""
        diagnose = self._context.diagnosis
        if diagnose is None:
            return {}
        reason = diagnose(usage.cached_tokens)
        return {"diagnostics": None if reason is None else {"cache_miss_reason": reason}}

    def _usage(self, usage: TokenUsage) -> Json:
        """Anthropic's usage object. A summary is an iteration before the message's own, and counts nowhere else."""
        marks = [*zip(self._context.spec.retention.marks, self._context.marked_tokens, strict=True)]
        summary = self._context.summary
        if summary is None:
            return _tokens(usage, marks)
        about = {"type": "compaction", **_tokens(summary.usage, summary.marks)}
        if summary.ends_answer:
            return {**_tokens(TokenUsage(0, 0), ()), "iterations": [about]}
        own = _tokens(usage, marks)
        return {**own, "iterations": [about, {"type": "message", **own}]}


def _tokens(usage: TokenUsage, marks: Sequence[tuple[PromptMark, int]]) -> Json:
    """The tokens of one iteration. Those before the last mark are written to the cache unless they were found
    there, and what is neither is input: the three add up to the prompt."""
    found = usage.cached_tokens
    marked = max((count for _, count in marks), default=0)
    # All before the last mark of an hour is kept for an hour, whatever other marks stand among it.
    for_an_hour = max((count for mark, count in marks if mark.ttl_s == TTLS["1h"]), default=0)
    written, for_long = max(0, marked - found), max(0, for_an_hour - found)
    return {
        "input_tokens": usage.prompt_tokens - found - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": found,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written - for_long,
            "ephemeral_1h_input_tokens": for_long,
        },
        "output_tokens": usage.completion_tokens,
    }


def _compaction(text: str | None) -> Json:
    """The block of a summary; of none where the model has written none."""
    return {"type": "compaction", "content": text}


def _thinking(text: str) -> Json:
    """The block of reasoning. There is nothing to sign: the client may change what it sends back."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _block(part: str | Reasoning | Call) -> Json | None:
    """The block of a part of the answer; None for an empty text, and for a call that was cut before its arguments were
    whole."""
    if isinstance(part, Reasoning):
        return _thinking(part.text)
    if isinstance(part, str):
        return {"type": "text", "text": part} if part else None
    try:
        arguments = orjson.loads("".join(part.arguments))
    # The limit of tokens has cut the call: the block needs an object, and half of one is none.
    except orjson.JSONDecodeError:
        return None
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


def count_body(num_tokens: int, edits: ContextEdits | None = None) -> bytes:
    """Body of `/v1/messages/count_tokens`, with the length before the edits if the request asks for edits."""
    managed = {} if edits is None else {"context_management": original_json(edits, num_tokens)}
    return orjson.dumps({"input_tokens": num_tokens, **managed})


def _event(data: Json) -> bytes:
    return named_event(str(data["type"]), orjson.dumps(data))
