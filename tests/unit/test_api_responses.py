"""Response objects, read back with the types of OpenAI's client."""

import json
import math
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from raydix.engine.api.logprobs import CompletionLogprobsWriter, chat_logprobs, prompt_logprobs
from raydix.engine.api.responses import (
    Choice,
    ResponseHead,
    TokenUsage,
    error_body,
    model_body,
    model_object,
    models_body,
    response_body,
    response_id,
    total_usage,
    version_body,
)
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.stream import DONE, ChunkWriter, error_event, usage_event
from raydix.engine.core.errors import ContextLengthError, OverloadedError, RequestError
from raydix.engine.core.types import FinishReason, TokenLogprobs

CHAT = ResponseHead("chat", response_id(GenerationSpec(kind="chat"), "abc"), 1_700_000_000, "m")
COMPLETION = ResponseHead("completion", response_id(GenerationSpec(kind="completion"), "abc"), 1_700_000_000, "m")
USAGE = TokenUsage(prompt_tokens=10, completion_tokens=4, cached_tokens=8)
USAGE_OBJECT = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 0},
}

VOCABULARY = [b"the", b" cat", "日".encode()[:2], "日".encode()[2:], b"!"]
IDS = (0, 2, 3, 4)
LOGPROBS = [TokenLogprobs(-0.5 * i, (token, 1), (-0.5 * i, -3.0)) for i, token in enumerate(IDS)]


def events(data: bytes) -> list[dict[str, Any]]:
    """The objects of a run of complete events."""
    assert data.endswith(b"\n\n")
    parts = data[:-2].split(b"\n\n")
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def test_chat() -> None:
    logprobs = chat_logprobs(IDS, LOGPROBS, VOCABULARY.__getitem__)
    choices = [
        Choice(0, "the日!", FinishReason.STOP, logprobs, token_ids=IDS, prompt_token_ids=(7, 8)),
        Choice(1, "", FinishReason.LENGTH),
    ]
    body = json.loads(response_body(CHAT, choices, USAGE))
    parsed = ChatCompletion.model_validate(body)
    assert (parsed.id, parsed.object, parsed.created, parsed.model) == (
        "chatcmpl-abc",
        "chat.completion",
        1_700_000_000,
        "m",
    )
    assert [choice.message.content for choice in parsed.choices] == ["the日!", ""]
    assert [choice.finish_reason for choice in parsed.choices] == ["stop", "length"]
    assert [choice.index for choice in parsed.choices] == [0, 1]
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 8
    assert parsed.choices[0].logprobs is not None
    assert body["prompt_token_ids"] == [7, 8]
    assert body["choices"][0]["token_ids"] == list(IDS)
    assert body["choices"][1]["token_ids"] is None
    assert body["usage"] == USAGE_OBJECT


def test_completion() -> None:
    logprobs = CompletionLogprobsWriter(VOCABULARY.__getitem__).add(IDS, LOGPROBS)
    choices = [
        Choice(0, "the日!", FinishReason.LENGTH, logprobs, token_ids=IDS, prompt_token_ids=(7, 8)),
        Choice(1, "x", FinishReason.STOP),
    ]
    body = json.loads(response_body(COMPLETION, choices, USAGE))
    parsed = Completion.model_validate(body)
    assert (parsed.id, parsed.object) == ("cmpl-abc", "text_completion")
    assert [choice.text for choice in parsed.choices] == ["the日!", "x"]
    assert parsed.choices[0].finish_reason == "length"
    assert parsed.choices[0].logprobs is not None
    assert body["choices"][0]["prompt_token_ids"] == [7, 8]
    assert body["choices"][0]["token_ids"] == list(IDS)
    assert "prompt_token_ids" not in body
    assert body["choices"][1]["prompt_token_ids"] is None


def test_an_error_is_no_way_to_finish() -> None:
    with pytest.raises(ValueError, match="cannot finish"):
        response_body(CHAT, [Choice(0, "", FinishReason.ERROR)], USAGE)
    with pytest.raises(ValueError, match="cannot finish"):
        ChunkWriter(CHAT).finish(FinishReason.ERROR)


def test_total_usage() -> None:
    assert total_usage([USAGE, TokenUsage(1, 2)]) == TokenUsage(11, 6, 8)


def test_usage_tells_of_drafts_where_there_were_any() -> None:
    usage = total_usage([USAGE, TokenUsage(1, 2, accepted_tokens=1), TokenUsage(1, 2, rejected_tokens=7)])
    details = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 7}
    assert usage.object()["completion_tokens_details"] == {"reasoning_tokens": 0} | details
    assert replace(usage, reasoning_tokens=3).object()["completion_tokens_details"] == {"reasoning_tokens": 3} | details


def test_chat_logprobs() -> None:
    content = chat_logprobs(IDS, LOGPROBS, VOCABULARY.__getitem__)["content"]
    assert isinstance(content, list)
    assert content[0] == {
        "token": "the",
        "logprob": 0.0,
        "bytes": [116, 104, 101],
        "top_logprobs": [
            {"token": "the", "logprob": 0.0, "bytes": [116, 104, 101]},
            {"token": " cat", "logprob": -3.0, "bytes": [32, 99, 97, 116]},
        ],
    }
    assert (content[1]["token"], content[1]["bytes"]) == ("�", [0xE6, 0x97])


def test_completion_logprobs_in_one_piece_and_in_many() -> None:
    whole = CompletionLogprobsWriter(VOCABULARY.__getitem__).add(IDS, LOGPROBS)
    assert whole["tokens"] == ["the", "bytes:\\xe6\\x97", "bytes:\\xa5", "!"]
    assert whole["token_logprobs"] == [0.0, -0.5, -1.0, -1.5]
    assert whole["text_offset"] == [0, 3, 3, 4]
    tops = whole["top_logprobs"]
    assert isinstance(tops, list)
    assert tops[1] == {"bytes:\\xe6\\x97": -0.5, " cat": -3.0}
    writer = CompletionLogprobsWriter(VOCABULARY.__getitem__)
    pieces = [writer.add([token], [at]) for token, at in zip(IDS, LOGPROBS, strict=True)]
    for name, value in whole.items():
        joined: list[object] = []
        for piece in pieces:
            part = piece[name]
            assert isinstance(part, list)
            joined += part
        assert joined == value


def test_logprobs_of_zero_probability_are_numbers() -> None:
    at = TokenLogprobs(-math.inf, (0,), (-math.inf,))
    assert b"null" not in orjson.dumps(chat_logprobs([0], [at], VOCABULARY.__getitem__)["content"])
    assert CompletionLogprobsWriter(VOCABULARY.__getitem__).add([0], [at])["token_logprobs"] == [-9999.0]


def test_names_shared_by_two_tokens_report_the_likelier() -> None:
    at = TokenLogprobs(-1.0, (0, 1), (-1.0, -2.0))
    assert CompletionLogprobsWriter(lambda _: b"x").add([0], [at])["top_logprobs"] == [{"x": -1.0}]


def test_chat_stream() -> None:
    writer = ChunkWriter(CHAT, 1, include_usage=True)
    logprobs = chat_logprobs((0,), LOGPROBS[:1], VOCABULARY.__getitem__)
    data = [
        writer.first([7, 8]),
        writer.text("the"),
        writer.event("日", token_ids=(2, 3)),
        writer.event("", token_ids=(5,), logprobs=logprobs),
        writer.finish(FinishReason.STOP, "!", token_ids=(4,)),
        usage_event(CHAT, USAGE),
    ]
    chunks = [chunk for part in data for chunk in events(part)]
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    assert {chunk.object for chunk in parsed} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "the"},
        {"content": "日"},
        {"content": ""},
        {"content": "!"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [*[None] * 4, "stop"]
    assert {chunk["choices"][0]["index"] for chunk in chunks[:-1]} == {1}
    assert [chunk["usage"] for chunk in chunks] == [*[None] * 5, USAGE_OBJECT]
    assert chunks[-1]["choices"] == []
    assert chunks[0]["prompt_token_ids"] == [7, 8]
    ids = [chunk["choices"][0].get("token_ids") for chunk in chunks[:-1]]
    assert ids == [None, None, [2, 3], [5], [4]]
    assert parsed[3].choices[0].logprobs is not None


def test_the_id_of_a_chat_s_message() -> None:
    choices = [Choice(0, "a", FinishReason.STOP, message_id="raydix-1"), Choice(1, "b", FinishReason.STOP)]
    messages = [choice["message"] for choice in json.loads(response_body(CHAT, choices, USAGE))["choices"]]
    assert messages[0]["id"] == "raydix-1"
    assert "id" not in messages[1]
    [last] = events(ChunkWriter(CHAT).finish(FinishReason.STOP, "!", message_id="raydix-1"))
    assert last["choices"][0]["delta"] == {"id": "raydix-1", "content": "!"}
    assert ChatCompletionChunk.model_validate(last).choices[0].delta.model_extra == {"id": "raydix-1"}


def test_completion_stream() -> None:
    writer = ChunkWriter(COMPLETION)
    assert writer.first() == b""
    (opening,) = events(writer.first([7]))
    assert (opening["choices"][0]["text"], opening["choices"][0]["prompt_token_ids"]) == ("", [7])
    (text,) = events(writer.text("a\n"))
    assert text["choices"] == [{"index": 0, "text": "a\n", "logprobs": None, "finish_reason": None}]
    assert "usage" not in text
    assert text["object"] == "text_completion"
    (last,) = events(writer.finish(FinishReason.LENGTH, "b", token_ids=(1,)))
    Completion.model_validate(last)
    assert last["choices"][0] == {
        "index": 0,
        "text": "b",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "matched_stop": None,
        "token_ids": [1],
    }
    assert DONE == b"data: [DONE]\n\n"


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([CHAT, COMPLETION]), st.booleans())
def test_prepared_chunks_equal_general_ones(text: str, head: ResponseHead, include_usage: bool) -> None:
    writer = ChunkWriter(head, 3, include_usage=include_usage)
    (fast,) = events(writer.text(text))
    (general,) = events(writer.event(text, token_ids=()))
    assert general["choices"][0].pop("token_ids") == []
    assert fast == general


def test_names_cannot_disturb_a_prepared_chunk() -> None:
    head = ResponseHead("chat", "\x00raydix-text\x00", 1, '"\x00raydix-text\x00"')
    (chunk,) = events(ChunkWriter(head).text("x"))
    assert (chunk["id"], chunk["model"]) == (head.id, head.model)
    assert chunk["choices"][0]["delta"] == {"content": "x"}


def test_the_reason_of_a_stop() -> None:
    choices = [Choice(0, "a", FinishReason.STOP, stop_reason="END"), Choice(1, "b", FinishReason.STOP, stop_reason=7)]
    for head in (CHAT, COMPLETION):
        body = json.loads(response_body(head, [*choices, Choice(2, "c", FinishReason.STOP)], USAGE))
        for name in ("stop_reason", "matched_stop"):
            assert [choice[name] for choice in body["choices"]] == ["END", 7, None]
        *_, last = events(ChunkWriter(head).finish(FinishReason.STOP, "!", stop_reason="END"))
        assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", "END")


def test_whole_answers_have_null_in_place_of_what_was_not_asked_for() -> None:
    chat, completion = (
        json.loads(response_body(head, [Choice(0, "", FinishReason.STOP)], USAGE)) for head in (CHAT, COMPLETION)
    )
    assert chat["prompt_token_ids"] is chat["prompt_logprobs"] is chat["choices"][0]["token_ids"] is None
    [choice] = completion["choices"]
    assert choice["prompt_token_ids"] is choice["prompt_logprobs"] is choice["token_ids"] is None


@pytest.mark.parametrize("head", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_usage_in_every_chunk(head: ResponseHead) -> None:
    writer = ChunkWriter(head, include_usage=True)
    writer.usage = USAGE
    data = writer.first() + writer.event("a") + writer.finish(FinishReason.STOP, "b")
    assert all(chunk["usage"] == USAGE_OBJECT for chunk in events(data))


def test_a_sampled_token_that_is_none_of_the_likeliest_is_reported_with_them() -> None:
    def tops(at: TokenLogprobs, num_top: int | None) -> list[str]:
        rendered = chat_logprobs([4], [at], VOCABULARY.__getitem__, num_top=num_top)
        [entry] = json.loads(orjson.dumps(rendered))["content"]
        return [top["token"] for top in entry["top_logprobs"]]

    at = TokenLogprobs(-5.0, (0, 1), (-0.5, -1.5))
    assert tops(at, 2) == ["the", "!"], "as many as were asked for"
    assert tops(TokenLogprobs(-5.0, (0,), (-0.5,)), 1) == ["!"]
    assert tops(TokenLogprobs(-5.0, (4, 0), (-0.5, -0.6)), 2) == ["!", "the"]
    assert tops(TokenLogprobs(-5.0, (), ()), 0) == []
    assert tops(at, None) == ["the", " cat", "!"], "all that are known, and the token itself"
    for num_top, expected in ((1, {"!": -5.0, "the": -0.5}), (0, {"!": -5.0})):
        found = CompletionLogprobsWriter(VOCABULARY.__getitem__, num_top).add([4], [at])["top_logprobs"]
        assert json.dumps(found) == json.dumps([expected]), "the sampled token first, and then the likeliest"
    second = TokenLogprobs(-1.5, (0, 4), (-0.5, -1.5))
    found = CompletionLogprobsWriter(VOCABULARY.__getitem__, 2).add([4], [second])["top_logprobs"]
    assert json.dumps(found) == json.dumps([{"!": -1.5, "the": -0.5}])


def test_tokens_are_named_by_their_ids_where_asked_for() -> None:
    chat = json.loads(orjson.dumps(chat_logprobs(IDS, LOGPROBS, VOCABULARY.__getitem__, names_ids=True)))["content"]
    assert [entry["token"] for entry in chat] == [f"token_id:{token}" for token in IDS]
    assert [top["token"] for top in chat[0]["top_logprobs"]] == ["token_id:0", "token_id:1"]
    assert chat[0]["bytes"] == [116, 104, 101]
    named = CompletionLogprobsWriter(VOCABULARY.__getitem__, names_ids=True).add(IDS, LOGPROBS)
    assert named["tokens"] == [f"token_id:{token}" for token in IDS]
    assert named["text_offset"] == [0, 3, 3, 4], "of the text, not of the names"
    tops = named["top_logprobs"]
    assert isinstance(tops, list) and tops[1] == {"token_id:2": -0.5, "token_id:1": -3.0}


def test_models_and_version() -> None:
    model = model_object("m", created=1, max_model_len=8192)
    parsed = Model.model_validate_json(model_body(model))
    assert (parsed.id, parsed.object, parsed.owned_by) == ("m", "model", "raydix")
    listed = json.loads(models_body([model]))
    assert listed == {"object": "list", "data": [model], "first_id": "m", "last_id": "m", "has_more": False}
    assert json.loads(version_body("1.2.3")) == {"version": "1.2.3"}


def test_an_error_may_quote_what_utf_8_cannot_encode() -> None:
    error = RequestError("'a.\ud800' is not supported yet.", param="a.\ud800")
    assert json.loads(error_body(error))["error"]["param"] == "a.\\ud800"
    assert "\\ud800" in json.loads(error_body(error))["error"]["message"]


def test_errors() -> None:
    error = ContextLengthError('too "long"', param="prompt")
    expected = {
        "error": {
            "message": 'too "long"',
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }
    assert json.loads(error_body(error)) == expected
    assert events(error_event(error)) == [expected]
    busy = json.loads(error_body(OverloadedError("busy")))["error"]
    assert (busy["type"], busy["code"], busy["param"]) == ("rate_limit_error", "overloaded", None)


def test_prompt_logprobs() -> None:
    scores = [None, TokenLogprobs(-2.5, (3, 0), (-0.1, -2.5), 2), TokenLogprobs(-math.inf, (1, 0), (-0.2, -1.0), 5)]
    objects = prompt_logprobs((1, 0, 4), scores, 1, VOCABULARY.__getitem__)
    assert objects == [
        None,
        {
            "0": {"logprob": -2.5, "rank": 2, "decoded_token": "the"},
            "3": {"logprob": -0.1, "rank": 1, "decoded_token": "\ufffd"},
        },
        {
            "4": {"logprob": -9999.0, "rank": 5, "decoded_token": "!"},
            "1": {"logprob": -0.2, "rank": 1, "decoded_token": " cat"},
        },
    ]
    both = prompt_logprobs((1, 0), scores[:2], 2, VOCABULARY.__getitem__)
    assert isinstance(both, list) and list(both[1]) == ["0", "3"], "the token itself is named once"
    choices = [Choice(0, "", FinishReason.LENGTH, prompt_logprobs=objects), Choice(1, "", FinishReason.LENGTH)]
    completion = json.loads(response_body(COMPLETION, choices, USAGE))
    assert completion["choices"][0]["prompt_logprobs"] == objects
    assert completion["choices"][1]["prompt_logprobs"] is None and "prompt_logprobs" not in completion
    chat = json.loads(response_body(CHAT, choices, USAGE))
    assert chat["prompt_logprobs"] == objects
    assert "prompt_logprobs" not in chat["choices"][0]


def test_an_echoed_prompt_begins_with_a_token_without_logprob() -> None:
    echoed = CompletionLogprobsWriter(VOCABULARY.__getitem__, num_top=1)
    scores = [None, TokenLogprobs(-0.5, (1, 0), (-0.5, -1.5), 1)]
    assert echoed.add((0, 1), scores) == {
        "tokens": ["the", " cat"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {" cat": -0.5}],
        "text_offset": [0, 3],
    }
    assert echoed.add((4,), [TokenLogprobs(-0.25, (4,), (-0.25,))])["text_offset"] == [7]
