"""Reasoning before answers: found in pieces of any cut, shown apart, counted."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.api.generate import GenerateRequest
from raydix.engine.api.reasoning import effort_arguments, with_effort, with_lead
from raydix.engine.api.requests import parse_chat
from raydix.engine.api.spec import GenerationSpec, ReasoningUse
from raydix.engine.core.answers.lead import Lead
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.cluster_view import ModelFacts
from raydix.engine.core.ingress.parsers.reasoning import ReasoningParser, begins_inside, ends_reasoning
from raydix.engine.core.tenants import EVERYONE
from raydix.engine.core.types import AdmitRequest, FinishReason, Grammar, GrammarKind
from raydix.engine.serving.reader_work import ReadingFacts
from raydix.engine.serving.reading import Reader
from raydix.engine.serving.served_model import ServedModel
from tests.unit.ingress import (
    CONTEXT,
    END,
    MODEL,
    VOCAB,
    LetterTokenizer,
    Replica,
    Served,
    body_of,
    call,
    objects_of,
)
from tests.unit.served_app import app

THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is noon."
TOOLS = [{"type": "function", "function": {"name": "clock"}}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def parts_of(pieces: Iterable[str], is_inside: bool = False) -> tuple[str, str]:
    thinking = ReasoningParser(is_inside=is_inside)
    parts = [thinking.push(piece) for piece in pieces]
    parts.append(thinking.finish())
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


CASES = [
    (THOUGHT, False, ("Let me see.", "It is noon.")),
    ("\n <think>a b</think>c", False, ("a b", "c")),
    ("<think>\n\n</think>\n\nSo.\n", False, ("", "So.\n")),
    ("So. <think>no</think>", False, ("", "So. <think>no</think>")),
    (" <thin", False, ("", " <thin")),
    (" \n", False, ("", " \n")),
    (" <thing>", False, ("", " <thing>")),
    ("<think>a </th b", False, ("a </th b", "")),
    ("<think>a </think", False, ("a </think", "")),
    ("Hm.\n</think>\nYes", True, ("Hm.", "Yes")),
    ("Hm. \n", True, ("Hm.", "")),
    ("", True, ("", "")),
    ("</think> <think>", True, ("", "<think>")),
]


@pytest.mark.parametrize(("text", "is_inside", "expected"), CASES)
def test_reasoning_whole_and_with_every_cut(text: str, is_inside: bool, expected: tuple[str, str]) -> None:
    assert parts_of([text], is_inside) == expected
    assert parts_of(text, is_inside) == expected, "one character at a time"
    for cut in range(len(text)):
        assert parts_of([text[:cut], "", text[cut:]], is_inside) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n"]), max_size=9), st.booleans()
)
def test_the_parts_do_not_depend_on_the_pieces(fragments: list[str], is_inside: bool) -> None:
    text = "".join(fragments)
    assert parts_of(fragments, is_inside) == parts_of([text], is_inside) == parts_of(text, is_inside)


def test_prompts_that_open_the_reasoning() -> None:
    assert begins_inside("<|assistant|>\n<think>\n") and not begins_inside("<|assistant|><think>\n\n</think>\n")
    assert ends_reasoning("<|assistant|><think>\n\n</think>\n\n") and not ends_reasoning("<|assistant|>\n<think>\n")


def replica(answer: str, finish: FinishReason = FinishReason.STOP) -> Replica:
    made = Replica(max_model_len=512, has_reasoning=True)
    made.dispatcher.answer, made.dispatcher.finish = answer, finish
    return made


def whole(answer: str, **fields: Any) -> Any:
    return asyncio.run(replica(answer).whole("chat", **{"max_tokens": 300, **fields}))


def streamed(answer: str, **fields: Any) -> list[Any]:
    return asyncio.run(replica(answer).streamed("chat", **{"max_tokens": 300, **fields}))


def test_reasoning_stands_beside_the_text() -> None:
    answer = whole(THOUGHT)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
        "It is noon.",
        "Let me see.",
        "Let me see.",
    )
    num_reasoning = len(THOUGHT) - len("\n\nIt is noon.") - len("<think")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    assert answer["usage"]["completion_tokens"] == len(THOUGHT) + 1


def test_the_manager_is_told_which_turn_may_reason() -> None:
    user, earlier = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}

    def turn(made: Replica, route: str = "chat", **fields: Any) -> int | None:
        job = asyncio.run(made.closed_job(route, **fields))
        facts = ModelFacts("model", block_size=4, await_timeout_s=1.0)
        asked: AdmitRequest = job.answers[0].generation.admit_request(b"root", facts, "i", ())
        return asked.reasoning_turn

    assert turn(replica(THOUGHT)) == 0
    assert turn(replica(THOUGHT), messages=[user, earlier, user, earlier, user]) == 2
    assert turn(replica(THOUGHT), "completion") is None
    assert turn(Replica(), messages=[user, earlier, user]) is None, "the model writes no reasoning"


def test_a_stream_says_the_same() -> None:
    *chunks, done = streamed(THOUGHT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see."
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is noon." and done == "[DONE]"


def test_an_answer_that_is_cut_off_in_its_reasoning() -> None:
    answer = whole(THOUGHT, max_tokens=12)
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "Let")
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


def test_reasoning_may_be_left_out_or_left_in_the_text() -> None:
    answer = whole(THOUGHT, include_reasoning=False)
    message = answer["choices"][0]["message"]
    assert message["content"] == "It is noon." and "reasoning" not in message
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    answer = whole(THOUGHT, separate_reasoning=False)
    assert answer["choices"][0]["message"]["content"] == THOUGHT
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    completion = asyncio.run(replica(THOUGHT).whole(max_tokens=300))
    assert completion["choices"][0]["text"] == THOUGHT, "a completion is text alone"


def test_a_prompt_that_opens_the_reasoning() -> None:
    messages = [{"role": "user", "content": "?<think>"}]  # as a template would end
    message = whole("Hm.</think>Yes.", messages=messages)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "Hm.")


def test_calls_come_after_the_reasoning() -> None:
    answer = whole(f"<think>Call <tool_call> now.</think>\n{CALL}", tools=TOOLS, n=2)
    for choice in answer["choices"]:
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"] == "Call <tool_call> now."
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] % 2 == 0


def test_the_next_turn_has_the_reasoning_apart() -> None:
    async def run() -> None:
        made = replica(THOUGHT)
        await made.whole("chat", max_tokens=300)
        await asyncio.sleep(0)
        [turn] = made.reader.next_turns
        assert turn.answer == {"role": "assistant", "content": "It is noon.", "reasoning_content": "Let me see."}

    asyncio.run(run())


def test_the_handle_gives_reasoning() -> None:
    request = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 300}

    async def run() -> tuple[Any, list[Any]]:
        response = await replica(THOUGHT).frontend.generate(request)
        return response, [chunk async for chunk in replica(THOUGHT).frontend.stream(request)]

    response, chunks = asyncio.run(run())
    assert (response.text, response.reasoning, response.tool_calls) == ("It is noon.", "Let me see.", None)
    assert response.token_ids == (*THOUGHT.encode(), END)
    assert "".join(chunk.reasoning or "" for chunk in chunks) == "Let me see."


def test_an_effort_is_a_variable_of_the_template() -> None:
    assert effort_arguments("low", "{{ reasoning_effort }}") == {"reasoning_effort": "low"}
    assert effort_arguments("low", "{{ enable_thinking }}") == {"enable_thinking": True}
    assert effort_arguments("none", "{{ enable_thinking }}") == {"enable_thinking": False}
    for effort in ("xhigh", "max"):
        assert effort_arguments(effort, "{{ reasoning_effort }}") == {"reasoning_effort": effort}
        assert effort_arguments(effort, "{{ enable_thinking }}") == {"enable_thinking": True}
    assert effort_arguments("none", "") == {}


LIMITS = {"none": 0, "low": 9}
ON, LEVELS, NEITHER = "{{ enable_thinking }}", "{{ reasoning_effort }}", ""


def settled(template: str, *, has_reasoning: bool = True, **asked: Any) -> GenerationSpec:
    """A chat's request once its effort acts, by the limits of `LIMITS`."""
    spec = GenerationSpec(kind="chat", reasoning=ReasoningUse(**asked))
    found = with_effort(spec, template, LIMITS, has_reasoning=has_reasoning)
    assert with_effort(found, template, LIMITS, has_reasoning=has_reasoning) == found, "it may be read once more"
    return found


@pytest.mark.parametrize(
    ("template", "asked", "limit", "ignored", "applied"),
    [
        (LEVELS, {"effort": "low"}, None, (), ()),
        (ON, {"effort": "low"}, 9, (), ("reasoning_effort:thinking_token_budget:9",)),
        (NEITHER, {"effort": "low"}, 9, (), ("reasoning_effort:thinking_token_budget:9",)),
        (NEITHER, {"effort": "low", "param": "x", "is_hint": True}, 9, (), ("x:thinking_token_budget:9",)),
        (NEITHER, {"effort": "none"}, 0, (), ("reasoning_effort:thinking_token_budget:0",)),
        (ON, {"effort": "none"}, None, (), ()),
        (LEVELS, {"effort": "none"}, None, (), ()),
        (NEITHER, {"effort": None}, None, (), ()),
        (ON, {"effort": "high"}, None, (), ()),
        (NEITHER, {"effort": "high"}, None, ("reasoning_effort",), ()),
        (NEITHER, {"effort": "medium", "is_hint": True}, None, ("reasoning_effort",), ()),
        (NEITHER, {"effort": "low", "max_tokens": 5}, 5, ("reasoning_effort",), ()),
        (ON, {"effort": "low", "max_tokens": 5}, 5, (), ()),
    ],
)
def test_an_effort_limits_reasoning_where_the_template_does_not_tell_efforts_apart(
    template: str, asked: dict[str, Any], limit: int | None, ignored: tuple[str, ...], applied: tuple[str, ...]
) -> None:
    found = settled(template, **asked)
    assert (found.reasoning.max_tokens, found.ignored, found.applied) == (limit, ignored, applied)
    if applied:
        assert found.reasoning.limit_param == asked.get("param", "reasoning_effort"), "errors name the client's field"


def test_an_effort_of_a_model_without_reasoning_has_no_effect() -> None:
    for effort in ("low", "medium", "high"):
        found = settled(NEITHER, has_reasoning=False, effort=effort)
        assert (found.reasoning.max_tokens, found.ignored) == (None, ("reasoning_effort",))
    found = settled(NEITHER, has_reasoning=False, effort="none")
    assert (found.reasoning.max_tokens, found.ignored) == (None, ()), "it is as the client asks"
    told = settled(LEVELS, has_reasoning=False, effort="high")
    assert told.template.arguments == {"reasoning_effort": "high"}, "a template that asks is told in any case"


def test_a_lower_effort_that_nothing_can_act_on_is_refused() -> None:
    with pytest.raises(RequestError, match="of 'medium' is not supported") as caught:
        settled(NEITHER, effort="medium", param="reasoning.effort")
    assert caught.value.param == "reasoning.effort"


# The form of what follows

CHAT = {"messages": [{"role": "user", "content": "?"}], "structured_outputs": {"regex": "[a-z]+"}}
MAY = Lead(b"<think>", b"</think>")
MUST = Lead(b"<think>", b"</think>", is_open=True)


def lead_of(prompt: str, **fields: Any) -> Lead | None:
    spec = with_lead(parse_chat(json.dumps(CHAT | fields).encode()), prompt)
    assert spec.sampling.grammar is not None
    return spec.sampling.grammar.lead


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("assistant\n", {}, MAY),
        ("assistant\n<think>\n", {}, MUST),
        ("assistant\n<think>\n\n</think>\n\n", {}, None),
        ("assistant\n", {"chat_template_kwargs": {"enable_thinking": False}}, None),
        ("assistant\n", {"chat_template_kwargs": {"enable_thinking": True}}, MAY),
        ("assistant\n", {"reasoning_effort": "none"}, None),
        ("assistant\n", {"reasoning_effort": "low", "include_reasoning": False}, MAY),
        ("assistant\n<think>", {"reasoning_effort": "none"}, MUST),
        ("assistant\n", {"separate_reasoning": False}, None),
        ("assistant\nSo", {"continue_final_message": True, "add_generation_prompt": False}, None),
        ("assistant\n<think>", {"continue_final_message": True, "add_generation_prompt": False}, MUST),
        ("user\n?", {"add_generation_prompt": False}, None),
    ],
)
def test_a_form_begins_behind_the_reasoning_that_the_prompt_allows(
    prompt: str, fields: dict[str, Any], expected: Lead | None
) -> None:
    assert lead_of(prompt, **fields) == expected


def test_a_form_of_a_text_that_has_the_reasoning_is_refused() -> None:
    with pytest.raises(RequestError, match="separate_reasoning") as caught:
        lead_of("<think>\n", separate_reasoning=False)
    assert caught.value.param == "structured_outputs.regex"
    free = GenerateRequest.model_validate({"messages": CHAT["messages"], "separate_reasoning": False}).spec()
    assert with_lead(free, "<think>\n") is free


def test_the_reader_knows_the_reasoning_of_its_model_alone() -> None:
    facts = ReadingFacts(ServedModel(MODEL, CONTEXT, VOCAB), Path(), special_tokens_in_messages=False)
    plain = Grammar(GrammarKind.REGEX, "[a-z]+")
    for has_reasoning, tokenizer, lead in (
        (False, LetterTokenizer(opening="assistant: <think>\n"), None),
        (True, LetterTokenizer(opening="assistant: <think>\n"), MUST),
        (True, LetterTokenizer(), MAY),
    ):
        reader = Reader(replace(facts, has_reasoning=has_reasoning), tokenizer)
        read = reader.read(GenerateRequest.model_validate(CHAT).spec())
        assert read.spec.sampling.grammar == replace(plain, lead=lead)
        assert reader.read(read.spec).spec == read.spec, "a chat is read again once its ids are known"


class TaggedTokenizer(LetterTokenizer):
    """Has tokens of their own for the tags, and a chat template that knows no effort."""

    chat_template = "{{ messages }}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return {"<think>": [2], "</think>": [3]}.get(text) or super().encode(text)


@pytest.mark.parametrize("stream", [False, True])
def test_an_effort_that_became_a_limit_is_named(served: Served, stream: bool) -> None:
    """In the response's header, in the log and in `explain`; the answer's reasoning ends there."""
    made = replica("<think>abcdefgh")
    facts = ReadingFacts(ServedModel(MODEL, CONTEXT, VOCAB), Path(), special_tokens_in_messages=False)
    reader = Reader(replace(facts, has_reasoning=True, effort_tokens={"low": 5}), TaggedTokenizer())
    read = made.reader.read

    async def limited(request: Any, size: int, tenant: str = "") -> Any:
        reading = await read(request, size, tenant)
        return replace(reading, spec=reader.read(reading.spec).spec)

    made.reader.read = limited  # type: ignore[method-assign]
    named = "reasoning_effort:thinking_token_budget:5"

    async def run() -> None:
        body = body_of("chat", reasoning_effort="low", stream=stream)
        reply = await call(app, "POST", "/v1/chat/completions", body)
        assert reply.status == 200 and reply.headers["x-raydix-applied"] == named
        [generation] = made.dispatcher.begun
        limit = generation.sampling.reasoning_limit
        assert limit is not None and (limit.num_tokens, limit.closing_id) == (5, 3)
        answer_id = objects_of(reply.body)[0]["id"] if stream else reply.json["id"]
        explained = await made.records.explained(answer_id, EVERYONE, [])
        assert (explained["applied"], explained["ignored"]) == ((named,), ())
        reply = await call(app, "POST", "/v1/chat/completions", body_of("chat", stream=stream))
        assert reply.status == 200 and "x-raydix-applied" not in reply.headers

    served(made, run)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prescribed_answer_stands_behind_its_reasoning(stream: bool) -> None:
    made = replica('<think>{"is it": no}</think>\n{"noon": true}')
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 300}
    if not stream:
        answer = asyncio.run(made.whole("chat", **fields))
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ('{"noon": true}', '{"is it": no}')
        assert (
            answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len('<think>{"is it": no}</think>') - 6
        )
        return
    deltas = [chunk["choices"][0]["delta"] for chunk in asyncio.run(made.streamed("chat", **fields))[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == '{"noon": true}'
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == '{"is it": no}'
