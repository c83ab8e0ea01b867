"""OpenAI's API as its official client sees it: every parameter does what it says, streamed and whole."""

import http.client
import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import openai
import pytest

from tests.integration.conftest import MODEL, Server, random_prompt

STORY = "Once upon a time there was a small river that"
EMOJI = "🎉🚀🐙🌍🦑🧊🎈🪐🐳🍄🌵🎻🦜🌋🧿🪁 日本語 Ελληνικά 🎉🚀🐙🌍🦑🧊🎈🪐🐳🍄🌵🎻🦜🌋🧿🪁"
CHAT = [{"role": "user", "content": "Name three rivers of Europe."}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def greedy(client: openai.OpenAI, prompt: Any = STORY, *, max_tokens: int = 24, **extra: Any) -> Any:
    """The only choice of a greedy completion of fixed length; fields that OpenAI does not know go in `extra`."""
    body = {"ignore_eos": True, "return_token_ids": True, **extra}
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=body
    ).choices[0]


def streamed(client: openai.OpenAI, **fields: Any) -> list[str]:
    """The pieces of text of a streamed completion with one choice."""
    with client.completions.create(model=MODEL, stream=True, **fields) as chunks:
        return [choice.text for chunk in chunks for choice in chunk.choices]


# Around the answers


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    [listed] = client.models.list().data
    assert listed.id == MODEL
    assert listed.owned_by == "raydix"
    assert client.models.retrieve(MODEL) == listed
    assert listed.model_dump()["max_model_len"] == 4096


def test_health_and_version(server: Server) -> None:
    assert server.request("GET", "/health")[0] == 200
    status, _, data = server.request("GET", "/version")
    assert (status, json.loads(data)) == (200, {"version": version("raydix")})


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_names_its_request_in_a_header(server: Server, stream: bool) -> None:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 2, "stream": stream}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    [request_id] = response.headers.get_all("x-request-id")
    assert f'"cmpl-{request_id}"'.encode() in data
    assert response.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


# Prompts and choices


def test_a_prompt_as_text_and_as_token_ids_answer_the_same(client: openai.OpenAI) -> None:
    from_text = greedy(client)
    from_ids = greedy(client, from_text.prompt_token_ids)
    assert from_ids.prompt_token_ids == from_text.prompt_token_ids
    assert from_ids.token_ids == from_text.token_ids
    assert from_ids.text == from_text.text
    assert len(from_text.token_ids) == 24
    assert from_text.finish_reason == "length"


@pytest.mark.parametrize("kind", ["texts", "token id lists"])
def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, kind: str) -> None:
    texts = [STORY, "The capital of France is", "1, 2, 3, 4,"]
    alone = [greedy(client, text, max_tokens=8) for text in texts]
    prompts = texts if kind == "texts" else [choice.prompt_token_ids for choice in alone]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in alone]
    assert answer.usage.prompt_tokens == sum(len(choice.prompt_token_ids) for choice in alone)
    assert answer.usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_differ_and_the_first_is_that_of_n_1(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "seed": 3}
    alone = client.completions.create(**fields)
    if stream:
        parts: dict[int, list[str]] = {}
        with client.completions.create(**fields, n=3, stream=True) as chunks:
            for chunk in chunks:
                parts.setdefault(chunk.choices[0].index, []).append(chunk.choices[0].text)
        texts = {index: "".join(pieces) for index, pieces in parts.items()}
    else:
        answer = client.completions.create(**fields, n=3)
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage.prompt_tokens == alone.usage.prompt_tokens, "one prompt, whatever n"
        assert answer.usage.completion_tokens == 36
    assert sorted(texts) == [0, 1, 2]
    assert texts[0] == alone.choices[0].text
    assert len(set(texts.values())) == 3


# Chats


def test_a_chat_streamed_says_what_it_says_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.create(**fields, stream=True) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert whole.object == "chat.completion"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.choices[0].message.role == deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert whole.choices[0].message.content.strip()
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len(chunks) > 4, "it came piece by piece"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_chat_ends_by_itself(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is 1 + 1?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=400)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content


def test_content_parts_are_one_text(client: openai.OpenAI) -> None:
    def text(content: Any) -> tuple[str, int]:
        messages = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    parts = [{"type": "text", "text": "Name a river."}, {"type": "text", "text": "Only one."}]
    assert text(parts) == text("Name a river.\nOnly one.")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_limit_the_tokens_of_a_chat(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, **{name: 3})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


# Usage and token ids


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_tells_tokens_and_hits_in_a_stream_as_in_a_whole_answer(client: openai.OpenAI, kind: str) -> None:
    words = "rivers run to the sea " * 30
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "extra_body": {"cache_salt": f"usage {kind}"}}
    if kind == "chat":
        create: Any = client.chat.completions.create
        fields["messages"] = [{"role": "user", "content": words}]
    else:
        create, fields["prompt"] = client.completions.create, words
    cold = create(**fields).usage
    assert cold.total_tokens == cold.prompt_tokens + 4
    assert cold.completion_tokens == 4
    assert cold.prompt_tokens_details.cached_tokens == 0
    warm = create(**fields).usage
    assert warm.prompt_tokens_details.cached_tokens == (cold.prompt_tokens - 1) // 16 * 16, "every full block"
    with create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert last.choices == []
    assert last.usage == warm
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_token_ids_of_a_completion(client: openai.OpenAI) -> None:
    prompt = random_prompt(40, 20)
    whole = greedy(client, prompt, max_tokens=6)
    assert whole.prompt_token_ids == prompt
    extra = {"ignore_eos": True, "return_token_ids": True}
    with client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, stream=True, extra_body=extra
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].prompt_token_ids == prompt
    assert [token for choice in choices for token in getattr(choice, "token_ids", None) or []] == whole.token_ids


def test_token_ids_of_a_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "temperature": 0}
    fields["extra_body"] = {"return_token_ids": True}
    whole = client.chat.completions.create(**fields)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert len(whole.choices[0].token_ids) == whole.usage.completion_tokens == 6
    with client.chat.completions.create(**fields, stream=True) as stream:
        chunks = list(stream)
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    streamed_ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert streamed_ids == whole.choices[0].token_ids


# Where an answer ends


@pytest.mark.parametrize("first", range(3, 15, 3))
def test_a_stop_string_across_tokens_ends_the_text_before_it(client: openai.OpenAI, first: int) -> None:
    fields: dict[str, Any] = {"prompt": STORY, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(model=MODEL, logprobs=0, **fields)
    text, offsets = whole.choices[0].text, whole.choices[0].logprobs.text_offset
    stop = text[offsets[first] + 1 : offsets[first + 2] + 1]
    shown = text[: text.index(stop)]

    stopped = client.completions.create(model=MODEL, stop=stop, **fields)
    assert stopped.choices[0].text == shown
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 24
    assert "".join(streamed(client, stop=["never said", stop], **fields)) == shown
    kept = client.completions.create(model=MODEL, stop=stop, extra_body={"include_stop_str_in_output": True}, **fields)
    assert kept.choices[0].text == shown + stop


def test_what_only_begins_a_stop_string_is_shown_in_the_end(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": STORY, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(model=MODEL, **fields).choices[0].text
    assert "".join(streamed(client, stop=[text[-5:] + "\0", text[5:9] + "\0"], **fields)) == text


def test_a_stop_token_ends_the_answer(client: openai.OpenAI) -> None:
    free = greedy(client)
    stop = free.token_ids[5]
    end = free.token_ids.index(stop)
    stopped = greedy(client, stop_token_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: end + 1], "counted"
    assert stopped.text == greedy(client, max_tokens=end).text if end else not stopped.text, "and not shown"


def test_min_tokens_puts_a_stop_off(client: openai.OpenAI) -> None:
    free = greedy(client)
    stop = free.token_ids[2]
    later = greedy(client, stop_token_ids=[stop], min_tokens=10)
    assert stop not in later.token_ids[:10]
    assert len(later.token_ids) > 10
    character = free.text.strip()[0]
    assert len(greedy(client, stop=[character]).token_ids) < 10
    assert len(greedy(client, stop=[character], min_tokens=10).token_ids) >= 10


def test_ignore_eos_goes_on_after_the_end_of_the_turn(client: openai.OpenAI) -> None:
    end_of_turn = 2
    fields: dict[str, Any] = {"model": MODEL, "prompt": STORY, "max_tokens": 5, "temperature": 0}
    forced = {"logit_bias": {str(end_of_turn): 100}, "extra_body": {"return_token_ids": True}}
    ended = client.completions.create(**fields, **forced)
    assert ended.choices[0].token_ids == [end_of_turn]
    assert ended.choices[0].text == ""
    assert ended.choices[0].finish_reason == "stop"
    forced["extra_body"]["ignore_eos"] = True
    assert client.completions.create(**fields, **forced).choices[0].token_ids == [end_of_turn] * 5


# How tokens are chosen


def test_temperature_0_is_deterministic(client: openai.OpenAI) -> None:
    assert greedy(client).token_ids == greedy(client, seed=5).token_ids == greedy(client, cache_salt="x").token_ids


def test_a_seed_fixes_the_answer(client: openai.OpenAI) -> None:
    def text(seed: int | None, **extra: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=STORY, max_tokens=20, temperature=1, seed=seed, extra_body=extra
        )
        return answer.choices[0].text

    assert text(1) == text(1) == text(1, cache_salt="recomputed")
    assert len({text(seed) for seed in (1, 2, 3, None, None)}) == 5


@pytest.mark.parametrize("field", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_each_filter_can_leave_the_likeliest_token_only(client: openai.OpenAI, field: dict[str, float]) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=12, temperature=2, seed=1, extra_body={"ignore_eos": True, **field}
    )
    assert answer.choices[0].text == greedy(client, max_tokens=12).text


def test_filters_together(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=6, top_p=0.9, extra_body={"top_k": 40, "min_p": 0.05}
    )
    assert answer.usage.completion_tokens <= 6


def test_a_logit_bias_forces_a_token_and_bans_one(client: openai.OpenAI) -> None:
    assert greedy(client, max_tokens=5, logit_bias={"1234": 100}).token_ids == [1234] * 5
    likeliest = greedy(client, max_tokens=1).token_ids[0]
    assert likeliest not in greedy(client, logit_bias={str(likeliest): -100}).token_ids


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5}], ids=str
)
def test_penalties_make_repetition_rarer(client: openai.OpenAI, penalty: dict[str, float]) -> None:
    prompt = "la la la la la la la la"
    plain, penalised = greedy(client, prompt), greedy(client, prompt, **penalty)
    assert len(set(penalised.token_ids)) > len(set(plain.token_ids))


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": STORY, "max_tokens": 8, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**fields).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(8)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob <= 0
        assert len(top) == 3
        assert max(top, key=top.__getitem__) == token, "greedy takes the likeliest"
        assert top[token] == logprob
    with client.completions.create(**fields, stream=True) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts if part for token in part.tokens] == found.tokens
    assert [value for part in parts if part for value in part.token_logprobs] == found.token_logprobs
    assert [offset for part in parts if part for offset in part.text_offset] == found.text_offset


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**fields).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    with client.chat.completions.create(**fields, stream=True) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for part in parts if part for entry in part.content] == entries
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2)
    assert plain.choices[0].logprobs is None


# Text


@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_text_never_hold_half_a_character(client: openai.OpenAI, seed: int) -> None:
    fields: dict[str, Any] = {"prompt": EMOJI, "max_tokens": 40, "temperature": 1, "seed": seed}
    text = client.completions.create(model=MODEL, **fields).choices[0].text
    pieces = streamed(client, **fields)
    assert "".join(pieces) == text
    assert not text.isascii(), "or this shows nothing"
    assert len(pieces) > 1


async def _answers(base_url: str, prompts: list[str]) -> list[str]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def one(prompt: str) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=12, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*map(one, prompts))


def test_the_asynchronous_client_streams_many_at_once(client: openai.OpenAI, server: Server) -> None:
    import asyncio

    prompts = [f"{number} rivers flow" for number in range(2, 10)]
    together = asyncio.run(_answers(f"{server.url}/v1", prompts))
    assert together == [greedy(client, prompt, max_tokens=12).text for prompt in prompts]
