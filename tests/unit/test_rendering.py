"""From text to responses: streams and whole answers say the same."""

import asyncio
from contextlib import closing
from typing import Any

import pytest

from raydix.engine.core.errors import ServiceError
from raydix.engine.core.types import FinishReason, TokenLogprobs
from tests.unit.ingress import ANSWER, END, MODEL, Replica, objects_of


def test_a_whole_completion() -> None:
    replica = Replica()
    answer = asyncio.run(replica.whole())
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    [choice] = answer["choices"]
    unasked = dict.fromkeys(
        ("logprobs", "stop_reason", "matched_stop", "token_ids", "prompt_token_ids", "prompt_logprobs")
    )
    assert choice == {"index": 0, "text": ANSWER, "finish_reason": "stop"} | unasked
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": len(ANSWER) + 1,
        "total_tokens": len(ANSWER) + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_whole_chat() -> None:
    [choice] = asyncio.run(Replica().whole("chat"))["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_streamed_completion() -> None:
    *chunks, done = asyncio.run(Replica().streamed(stream_options={"include_usage": True}))
    assert done == "[DONE]"
    *texts, usage = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == ANSWER
    assert len(texts) == len(ANSWER) + 1, "an event for each token"
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [None] * len(ANSWER) + ["stop"]
    assert {chunk["usage"] for chunk in texts} == {None}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(ANSWER) + 1


def test_a_streamed_chat_opens_with_the_role() -> None:
    first, *chunks, done = asyncio.run(Replica().streamed("chat"))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert done == "[DONE]" and "usage" not in chunks[-1]


@pytest.mark.parametrize("has_table", [True, False])
@pytest.mark.parametrize("stop", ["two", [" t", "two"]])
def test_a_stop_string_ends_the_generation(stop: Any, has_table: bool) -> None:
    async def run() -> None:
        replica = Replica(has_table=has_table)
        job = await replica.job(stop=stop)
        with closing(job):
            await replica.frontend.output.collect(job)
            [answer] = job.answers
            assert answer.text == "one " if stop == "two" else "one"
            assert answer.finish is FinishReason.STOP and answer.generation.is_stopped
            assert answer.stop_reason == ("two" if stop == "two" else " t")
            assert replica.dispatcher.ended == [answer.generation.request_id]

    asyncio.run(run())


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_shown_only_where_asked_for(include: bool) -> None:
    replica = Replica(has_table=False)
    job = asyncio.run(replica.whole(include_stop_str_in_output=include, return_token_ids=True))
    assert job["choices"][0]["text"] == ANSWER
    assert job["choices"][0]["token_ids"] == [*ANSWER.encode(), 0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_token_ids": [ord("w")]}, ord("w")),
        ({"stop_token_ids": [END]}, None),
        ({"stop_token_ids": [END], "ignore_eos": True}, END),
        ({"stop": "two"}, "two"),
        ({"max_tokens": 2, "stop": "two"}, None),
    ],
    ids=str,
)
def test_the_reason_of_a_stop(fields: dict[str, Any], expected: str | int | None) -> None:
    def replica() -> Replica:
        replica = Replica()
        if fields.get("stop_token_ids") == [ord("w")]:
            replica.dispatcher.ends_at = ord("w")
        return replica

    [choice] = asyncio.run(replica().whole(**fields))["choices"]
    assert choice["stop_reason"] == expected
    *_, last, _ = asyncio.run(replica().streamed("chat", **fields))
    assert last["choices"][0]["stop_reason"] == last["choices"][0]["matched_stop"] == expected


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, total, _ = asyncio.run(Replica().streamed("chat", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, *range(1, len(ANSWER) + 2)]
    assert chunks[0]["usage"]["prompt_tokens"] == total["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"] == total["usage"] and total["choices"] == []
    *chunks, total, _ = asyncio.run(Replica().streamed(stream_options=options, echo=True, max_tokens=2))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2], "an echo is none of the answer"
    *chunks, total, _ = asyncio.run(Replica().streamed(stream_options=options, max_tokens=2))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2], "no opening, no usage of it"
    *chunks, _ = asyncio.run(Replica().streamed(stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in chunk for chunk in chunks), "as at vLLM include_usage is needed, too"


def test_token_ids_and_log_probabilities_of_a_stream_are_those_of_the_whole_answer() -> None:
    fields: dict[str, Any] = {"logprobs": 1, "return_token_ids": True, "max_tokens": 3}
    [whole] = asyncio.run(Replica().whole(**fields))["choices"]
    *chunks, _ = asyncio.run(Replica().streamed(**fields))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert whole["text"] == ANSWER[:3] and whole["finish_reason"] == "length"
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [104, 105]
    assert [token for part in parts for token in part.get("token_ids") or ()] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in parts if part["logprobs"] for each in part["logprobs"][name]] == (
            whole["logprobs"][name]
        )


@pytest.mark.parametrize("route", ["chat", "completion"])
def test_tokens_named_by_their_ids(route: str) -> None:
    logprobs = True if route == "chat" else 1
    [choice] = asyncio.run(Replica().whole(route, logprobs=logprobs, return_tokens_as_token_ids=True))["choices"]
    found = choice["logprobs"]
    names = found["tokens"] if route == "completion" else [entry["token"] for entry in found["content"]]
    assert names == [f"token_id:{token}" for token in [*ANSWER.encode(), END]]


def test_log_probabilities_of_a_chat() -> None:
    [choice] = asyncio.run(Replica().whole("chat", logprobs=True, top_logprobs=2, max_tokens=1))["choices"]
    [token] = choice["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("o", -0.5, [ord("o")])
    assert [top["token"] for top in token["top_logprobs"]] == ["o", "n"]


@pytest.mark.parametrize("has_table", [True, False])
def test_an_echoed_prompt_comes_first_with_its_log_probabilities(has_table: bool) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 2}
    [whole] = asyncio.run(Replica(has_table=has_table).whole(**fields))["choices"]
    assert whole["text"] == "hi" + ANSWER[:2]
    assert whole["logprobs"]["tokens"] == ["h", "i", *ANSWER[:2]]
    assert whole["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    first, *_ = asyncio.run(Replica(has_table=has_table).streamed(**fields))
    assert first["choices"][0]["text"] == "hi"
    assert first["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]


@pytest.mark.parametrize(
    ("last", "fields", "expected"),
    [
        ("user", {}, ANSWER),
        ("assistant", {}, "bye" + ANSWER),
        ("assistant", {"continue_final_message": True, "add_generation_prompt": False}, "bye" + ANSWER),
        ("user", {"add_generation_prompt": False}, "bye" + ANSWER),
    ],
)
def test_a_chat_echoes_a_last_message_of_the_answer_s_role(last: str, fields: dict[str, Any], expected: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": last, "content": "bye"}]
    asked: dict[str, Any] = {"messages": messages, "echo": True, "logprobs": True, **fields}
    [choice] = asyncio.run(Replica().whole("chat", **asked))["choices"]
    assert choice["message"]["content"] == expected
    assert len(choice["logprobs"]["content"]) == len(ANSWER) + 1, "of the generated tokens alone"
    *chunks, _ = asyncio.run(Replica().streamed("chat", **asked))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected


def test_special_tokens_are_shown_where_asked_for() -> None:
    for has_table in (True, False):
        fields: dict[str, Any] = {"include_stop_str_in_output": True}
        [hidden] = asyncio.run(Replica(has_table=has_table).whole(**fields))["choices"]
        [shown] = asyncio.run(Replica(has_table=has_table).whole(**fields, skip_special_tokens=False))["choices"]
        assert (hidden["text"], shown["text"]) == (ANSWER, ANSWER + "</s>")


def test_the_best_samples_are_returned_and_all_are_counted() -> None:
    body = asyncio.run(Replica().whole(n=2, best_of=3, prompt=["a", "b"], max_tokens=4))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 2 * 3 * 4 and body["usage"]["prompt_tokens"] == 2

    job = asyncio.run(Replica().closed_job(n=2, best_of=3, prompt=["a", "b"]))
    means = [(-3.0,), (-1.0, -2.0), (-0.5, -9.0), (-1.0,), (), (-0.25, -0.75)]
    for answer, logprobs in zip(job.answers, means, strict=True):
        answer.logprobs = [TokenLogprobs(logprob, (), ()) for logprob in logprobs]
    assert [answer.index for answer in job.chosen()] == [1, 0, 4, 5]


def test_a_prompt_that_is_only_scored() -> None:
    answer = asyncio.run(Replica().whole(prompt_logprobs=1, max_tokens=0))
    [choice] = answer["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "length"
    nothing, of_i = choice["prompt_logprobs"]
    assert nothing is None
    assert of_i["105"] == {"logprob": -0.5, "rank": 1, "decoded_token": "i"}
    assert answer["usage"]["completion_tokens"] == 0


def test_several_choices_of_a_stream_are_told_apart() -> None:
    replica = Replica()
    *chunks, done = asyncio.run(replica.streamed(prompt=["a", "b"], n=2, stream_options={"include_usage": True}))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {ANSWER} and done == "[DONE]"
    assert chunks[-1]["usage"]["prompt_tokens"] == 2, "each prompt counts once"
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * (len(ANSWER) + 1)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_fails_raises_after_what_was_sent_and_ends_every_choice(n: int) -> None:
    async def run() -> None:
        replica = Replica()
        replica.dispatcher.fails_after = 3
        job = await replica.job(stream=True, n=n)
        with closing(job):
            sent = b""
            with pytest.raises(ServiceError, match="every worker died"):
                async for data in replica.rendering.events(job):
                    sent += data
            text = "".join(
                chunk["choices"][0]["text"] for chunk in objects_of(sent) if chunk["choices"][0]["index"] == 0
            )
            assert text == ANSWER[:3]
            assert sorted(replica.dispatcher.ended) == sorted(each.request_id for each in replica.dispatcher.begun)

    asyncio.run(run())


def test_a_stream_that_is_left_ends_every_choice() -> None:
    async def run() -> None:
        replica = Replica()
        replica.dispatcher.hangs_after = 2
        job = await replica.job(stream=True, n=3)
        with closing(job):
            events = replica.rendering.events(job)
            await anext(events)
            await events.aclose()
            assert len(replica.dispatcher.begun) == len(replica.dispatcher.ended) == 3

    asyncio.run(run())


def test_a_stored_chat_has_an_id_in_its_last_event_and_in_the_whole_answer() -> None:
    async def run() -> None:
        replica = Replica()
        whole = await replica.whole("chat", store=True)
        assert whole["choices"][0]["message"]["id"].startswith("raydix-")
        *_, last, _ = await replica.streamed("chat", store=True)
        assert last["choices"][0]["delta"]["id"].startswith("raydix-")
        assert len(replica.manager.kept) == 2
        replica.manager.is_away = True
        assert "id" not in (await replica.whole("chat", store=True))["choices"][0]["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "prefix_caching", "is_prepared"),
    [
        ({}, True, True),
        ({"n": 2}, True, False),
        ({"continue_final_message": True}, True, False),
        ({"add_generation_prompt": False}, True, False),
        ({}, False, False),
    ],
)
def test_the_next_turn_of_a_chat_is_prepared(fields: dict[str, Any], prefix_caching: bool, is_prepared: bool) -> None:
    async def run() -> None:
        replica = Replica(prefix_caching=prefix_caching)
        await replica.whole("chat", **fields)
        while replica.chats._background._tasks:
            await asyncio.sleep(0)
        answer = {"role": "assistant", "content": ANSWER}
        assert [turn.answer for turn in replica.reader.next_turns] == [answer] * is_prepared

    asyncio.run(run())


def test_the_first_choice_to_fail_ends_the_others() -> None:
    async def run() -> None:
        replica = Replica()
        replica.dispatcher.fails_after = 1
        job = await replica.job(n=4)
        with closing(job):
            with pytest.raises(ServiceError, match="every worker died"):
                await replica.frontend.output.collect(job)
            assert len(replica.dispatcher.ended) == len(replica.dispatcher.begun)

    asyncio.run(run())
