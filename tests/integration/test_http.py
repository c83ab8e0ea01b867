"""OpenAI's API as its official client sees it: every parameter does what it says, streamed and whole."""

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, TypedDict

import openai
import pytest
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletionChunk,
    ChatCompletionContentPartTextParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)

from tests.integration.answers import (
    ChatFields,
    CompletionFields,
    Limit,
    content_of,
    entries_of,
    num_cached,
    prompt_token_ids,
    scores_of,
    streamed_token_ids,
    token_ids,
    usage_of,
)
from tests.integration.conftest import LOCAL_MODEL_LEN, MODEL, WAIT_S, Server, random_prompt

STORY = "Once upon a time there was a small river that"
EMOJI = "🎉🚀🐙🌍🦑🧊🎈🪐🐳🍄🌵🎻🦜🌋🧿🪁 日本語 Ελληνικά 🎉🚀🐙🌍🦑🧊🎈🪐🐳🍄🌵🎻🦜🌋🧿🪁"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three rivers of Europe."}]


@pytest.fixture
def client(one_process: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{one_process.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


class Penalty(TypedDict, total=False):
    """One of the penalties."""

    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


def greedy(
    client: openai.OpenAI, prompt: str | list[int] = STORY, *, max_tokens: int = 24, **extra: object
) -> CompletionChoice:
    """The only choice of a greedy completion of fixed length; fields that OpenAI does not know go in `extra`."""
    body = {"ignore_eos": True, "return_token_ids": True, **extra}
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=body
    ).choices[0]


def streamed(
    client: openai.OpenAI, fields: CompletionFields, *, stop: str | list[str] | openai.Omit = openai.omit
) -> list[str]:
    """The pieces of text of a streamed completion with one choice."""
    with client.completions.create(**fields, stop=stop, stream=True) as chunks:
        return [choice.text for chunk in chunks for choice in chunk.choices]


# Around the answers


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    [listed] = client.models.list().data
    assert listed.id == MODEL
    assert listed.owned_by == "raydix"
    assert client.models.retrieve(MODEL) == listed
    assert listed.model_dump()["max_model_len"] == LOCAL_MODEL_LEN


def test_health_and_version(one_process: Server) -> None:
    assert one_process.request("GET", "/health")[0] == 200
    status, _, data = one_process.request("GET", "/version")
    assert (status, json.loads(data)) == (200, {"version": version("raydix")})


# Prompts and choices


def test_a_prompt_as_text_and_as_token_ids_answer_the_same(client: openai.OpenAI) -> None:
    from_text = greedy(client)
    from_ids = greedy(client, prompt_token_ids(from_text))
    assert prompt_token_ids(from_ids) == prompt_token_ids(from_text)
    assert token_ids(from_ids) == token_ids(from_text)
    assert from_ids.text == from_text.text
    assert len(token_ids(from_text)) == 24
    assert from_text.finish_reason == "length"


@pytest.mark.parametrize("kind", ["texts", "token id lists"])
def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, kind: str) -> None:
    texts = [STORY, "The capital of France is", "1, 2, 3, 4,"]
    alone = [greedy(client, text, max_tokens=8) for text in texts]
    of_alone = [prompt_token_ids(choice) for choice in alone]
    prompts: list[str] | list[list[int]] = texts if kind == "texts" else of_alone
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in alone]
    assert usage_of(answer).prompt_tokens == sum(map(len, of_alone))
    assert usage_of(answer).completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_differ_and_the_first_is_that_of_n_1(client: openai.OpenAI, stream: bool) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "seed": 3}
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
        assert usage_of(answer).prompt_tokens == usage_of(alone).prompt_tokens, "one prompt, whatever n"
        assert usage_of(answer).completion_tokens == 36
    assert sorted(texts) == [0, 1, 2]
    assert texts[0] == alone.choices[0].text
    assert len(set(texts.values())) == 3


# Chats


def test_a_chat_streamed_says_what_it_says_whole(client: openai.OpenAI) -> None:
    fields: ChatFields = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    one_by_one = {"speculation": False}  # The tokens of a draft may come in one piece.
    with client.chat.completions.create(**fields, stream=True, extra_body=one_by_one) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert whole.object == "chat.completion"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.choices[0].message.role == deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == content_of(whole)
    assert content_of(whole).strip()
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len(chunks) > 4, "it came piece by piece"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_chat_ends_by_itself(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is 1 + 1?"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=400)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in content_of(answer)


def test_content_parts_are_one_text(client: openai.OpenAI) -> None:
    def text(content: str | list[ChatCompletionContentPartTextParam]) -> tuple[str, int]:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        return content_of(answer), usage_of(answer).prompt_tokens

    parts: list[ChatCompletionContentPartTextParam] = [
        {"type": "text", "text": "Name a river."},
        {"type": "text", "text": "Only one."},
    ]
    assert text(parts) == text("Name a river.\nOnly one.")


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_completion_tokens": 3}], ids=str)
def test_both_names_limit_the_tokens_of_a_chat(client: openai.OpenAI, limit: Limit) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, **limit)
    assert usage_of(answer).completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


# Usage and token ids


def without_drafts(usage: CompletionUsage) -> dict[str, Any]:
    """The usage without its numbers of drafted tokens, which depend on what was answered before."""
    return usage.model_dump(exclude={"completion_tokens_details"})


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_tells_tokens_and_hits_in_a_stream_as_in_a_whole_answer(client: openai.OpenAI, kind: str) -> None:
    words = "rivers run to the sea " * 30
    completion: CompletionFields = {"model": MODEL, "max_tokens": 4, "prompt": words}
    chat: ChatFields = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": words}]}
    extra = {"cache_salt": f"usage {kind}"}

    def whole() -> CompletionUsage:
        if kind == "chat":
            return usage_of(client.chat.completions.create(**chat, extra_body=extra))
        return usage_of(client.completions.create(**completion, extra_body=extra))

    def pieces() -> Sequence[Completion | ChatCompletionChunk]:
        options: ChatCompletionStreamOptionsParam = {"include_usage": True}
        if kind == "chat":
            with client.chat.completions.create(
                **chat, extra_body=extra, stream=True, stream_options=options
            ) as deltas:
                return list(deltas)
        with client.completions.create(**completion, extra_body=extra, stream=True, stream_options=options) as texts:
            return list(texts)

    cold = whole()
    assert cold.total_tokens == cold.prompt_tokens + 4
    assert cold.completion_tokens == 4
    assert num_cached(cold) == 0
    warm = whole()
    assert num_cached(warm) == (cold.prompt_tokens - 1) // 16 * 16, "every full block"
    *chunks, last = pieces()
    assert last.choices == []
    assert last.usage is not None and without_drafts(last.usage) == without_drafts(warm)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_token_ids_of_a_completion(client: openai.OpenAI) -> None:
    prompt = random_prompt(40, 20)
    whole = greedy(client, prompt, max_tokens=6)
    assert prompt_token_ids(whole) == prompt
    extra = {"ignore_eos": True, "return_token_ids": True}
    with client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, stream=True, extra_body=extra
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert prompt_token_ids(choices[0]) == prompt
    assert streamed_token_ids(choices) == token_ids(whole)


def test_token_ids_of_a_chat(client: openai.OpenAI) -> None:
    fields: ChatFields = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "temperature": 0}
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(**fields, extra_body=extra)
    assert len(prompt_token_ids(whole)) == usage_of(whole).prompt_tokens
    assert len(token_ids(whole.choices[0])) == usage_of(whole).completion_tokens == 6
    with client.chat.completions.create(**fields, extra_body=extra, stream=True) as stream:
        chunks = list(stream)
    assert prompt_token_ids(chunks[0]) == prompt_token_ids(whole)
    assert streamed_token_ids(chunk.choices[0] for chunk in chunks) == token_ids(whole.choices[0])


# Where an answer ends


@pytest.mark.parametrize("first", range(3, 15, 3))
def test_a_stop_string_across_tokens_ends_the_text_before_it(client: openai.OpenAI, first: int) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": STORY, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=0)
    text, offsets = whole.choices[0].text, scores_of(whole.choices[0]).text_offset
    stop = text[offsets[first] + 1 : offsets[first + 2] + 1]
    shown = text[: text.index(stop)]

    stopped = client.completions.create(**fields, stop=stop)
    assert stopped.choices[0].text == shown
    assert stopped.choices[0].finish_reason == "stop"
    assert usage_of(stopped).completion_tokens < 24
    assert "".join(streamed(client, fields, stop=["never said", stop])) == shown
    kept = client.completions.create(**fields, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == shown + stop


def test_what_only_begins_a_stop_string_is_shown_in_the_end(client: openai.OpenAI) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": STORY, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**fields).choices[0].text
    assert "".join(streamed(client, fields, stop=[text[-5:] + "\0", text[5:9] + "\0"])) == text


def test_a_stop_token_ends_the_answer(client: openai.OpenAI) -> None:
    free = greedy(client)
    stop = token_ids(free)[5]
    end = token_ids(free).index(stop)
    stopped = greedy(client, stop_token_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert token_ids(stopped) == token_ids(free)[: end + 1], "counted"
    assert stopped.text == greedy(client, max_tokens=end).text if end else not stopped.text, "and not shown"


def test_min_tokens_puts_a_stop_off(client: openai.OpenAI) -> None:
    free = greedy(client)
    stop = token_ids(free)[2]
    later = greedy(client, stop_token_ids=[stop], min_tokens=10)
    assert stop not in token_ids(later)[:10]
    assert len(token_ids(later)) > 10
    character = free.text.strip()[0]
    assert len(token_ids(greedy(client, stop=[character]))) < 10
    assert len(token_ids(greedy(client, stop=[character], min_tokens=10))) >= 10


def test_ignore_eos_goes_on_after_the_end_of_the_turn(client: openai.OpenAI) -> None:
    end_of_turn = 2
    fields: CompletionFields = {"model": MODEL, "prompt": STORY, "max_tokens": 5, "temperature": 0}
    bias, extra = {str(end_of_turn): 100}, {"return_token_ids": True}
    ended = client.completions.create(**fields, logit_bias=bias, extra_body=extra)
    assert token_ids(ended.choices[0]) == [end_of_turn]
    assert ended.choices[0].text == ""
    assert ended.choices[0].finish_reason == "stop"
    forced = client.completions.create(**fields, logit_bias=bias, extra_body={**extra, "ignore_eos": True})
    assert token_ids(forced.choices[0]) == [end_of_turn] * 5


# How tokens are chosen


def test_temperature_0_is_deterministic(client: openai.OpenAI) -> None:
    answers = [greedy(client), greedy(client, seed=5), greedy(client, cache_salt="x")]
    first, *others = map(token_ids, answers)
    assert others == [first, first]


def test_a_seed_fixes_the_answer(client: openai.OpenAI) -> None:
    def text(seed: int | None, **extra: str) -> str:
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
    assert usage_of(answer).completion_tokens <= 6


def test_a_logit_bias_forces_a_token_and_bans_one(client: openai.OpenAI) -> None:
    assert token_ids(greedy(client, max_tokens=5, logit_bias={"1234": 100})) == [1234] * 5
    likeliest = token_ids(greedy(client, max_tokens=1))[0]
    assert likeliest not in token_ids(greedy(client, logit_bias={str(likeliest): -100}))


def test_tokens_and_words_can_be_excluded(client: openai.OpenAI) -> None:
    plain = greedy(client, max_tokens=8)
    allowed = sorted(set(token_ids(plain)[:2]))
    assert set(token_ids(greedy(client, max_tokens=6, allowed_token_ids=allowed))) <= set(allowed)
    word = plain.text.split()[1]
    assert f" {word}" not in greedy(client, max_tokens=8, bad_words=[word]).text


def test_chosen_and_all_log_probabilities(client: openai.OpenAI) -> None:
    chosen = greedy(client, max_tokens=2, logprobs=1, logprob_token_ids=[40, 41], return_tokens_as_token_ids=True)
    for token_id, top in zip(token_ids(chosen), scores_of(chosen).top_logprobs, strict=True):
        assert top is not None and top.keys() == {"token_id:40", "token_id:41", f"token_id:{token_id}"}
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, logprobs=True, top_logprobs=-1, max_tokens=1
    )
    [entry] = entries_of(answer.choices[0].logprobs)
    assert len(entry.top_logprobs) > 49_000 and entry.top_logprobs[0].token == entry.token


def test_the_best_of_some_answers(client: openai.OpenAI) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": STORY, "max_tokens": 8, "seed": 7}
    alone = client.completions.create(**fields, logprobs=0, n=4)
    logprobs = [scores_of(choice).token_logprobs for choice in alone.choices]
    means = [sum(each or 0 for each in of_choice) / len(of_choice) for of_choice in logprobs]
    best = client.completions.create(**fields, logprobs=0, best_of=4)
    assert best.choices[0].text == alone.choices[means.index(max(means))].text
    assert usage_of(best).completion_tokens == usage_of(alone).completion_tokens


def test_prompts_are_cut_and_priorities_change_no_text(client: openai.OpenAI) -> None:
    prompt = random_prompt(77, 60)
    cut = greedy(client, prompt, truncate_prompt_tokens=20, priority=5)
    assert token_ids(cut) == token_ids(greedy(client, prompt[-20:], priority=-5))
    assert prompt_token_ids(cut) == prompt[-20:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_would_be_late_is_refused_where_it_asks_for_that(client: openai.OpenAI, stream: bool) -> None:
    def ask(**objective: object) -> object:
        return client.completions.create(
            model=MODEL, prompt=[5] * 300, max_tokens=2, stream=stream, extra_body={**objective, "cache_salt": "late"}
        )

    with pytest.raises(openai.RateLimitError, match="later than the objective") as caught:
        ask(slo_ttft_ms=0.1, slo_when_late="refuse")
    assert caught.value.code == "objective_unmet" and int(caught.value.response.headers["retry-after"]) >= 1
    ask(slo_ttft_ms=0.1)
    ask(slo_ttft_ms=600_000, slo_when_late="refuse")


def test_a_chat_echoes_what_it_goes_on_with(client: openai.OpenAI) -> None:
    begun: list[ChatCompletionMessageParam] = [*CHAT, {"role": "assistant", "content": "The rivers are"}]
    extra: dict[str, object] = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    extra["chat_template_kwargs"] = {"x": 1}
    answer = client.chat.completions.create(model=MODEL, messages=begun, max_tokens=4, extra_body=extra)
    assert content_of(answer).startswith("The rivers are")


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5}], ids=str
)
def test_penalties_make_repetition_rarer(client: openai.OpenAI, penalty: Penalty) -> None:
    prompt = "la la la la la la la la"
    plain, penalised = greedy(client, prompt), greedy(client, prompt, **penalty)
    assert len(set(token_ids(penalised))) > len(set(token_ids(plain)))


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": STORY, "max_tokens": 8, "temperature": 0}
    choice = client.completions.create(**fields, logprobs=3).choices[0]
    found = scores_of(choice)
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(8)]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob is not None and logprob <= 0
        assert top is not None and len(top) == 3
        assert max(top, key=top.__getitem__) == token, "greedy takes the likeliest"
        assert top[token] == logprob
    with client.completions.create(**fields, logprobs=3, stream=True) as stream:
        pieces = [chunk.choices[0] for chunk in stream]
    parts = [scores_of(piece) for piece in pieces if piece.logprobs]
    assert [token for part in parts for token in part.tokens] == found.tokens
    assert [value for part in parts for value in part.token_logprobs] == found.token_logprobs
    assert [offset for part in parts for offset in part.text_offset] == found.text_offset


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    fields: ChatFields = {"model": MODEL, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    entries = entries_of(answer.choices[0].logprobs)
    texts = [bytes(entry.bytes) for entry in entries if entry.bytes is not None]
    assert len(texts) == len(entries)
    assert b"".join(texts).decode() == content_of(answer)
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    with client.chat.completions.create(**fields, logprobs=True, top_logprobs=2, stream=True) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for part in parts if part for entry in entries_of(part)] == entries
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2)
    assert plain.choices[0].logprobs is None


# Text


@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_text_never_hold_half_a_character(client: openai.OpenAI, seed: int) -> None:
    fields: CompletionFields = {"model": MODEL, "prompt": EMOJI, "max_tokens": 40, "temperature": 1, "seed": seed}
    text = client.completions.create(**fields).choices[0].text
    pieces = streamed(client, fields)
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


def test_the_asynchronous_client_streams_many_at_once(client: openai.OpenAI, one_process: Server) -> None:
    import asyncio

    prompts = [f"{number} rivers flow" for number in range(2, 10)]
    together = asyncio.run(_answers(f"{one_process.url}/v1", prompts))
    assert together == [greedy(client, prompt, max_tokens=12).text for prompt in prompts]


def test_a_chat_with_given_ids_answers_as_the_chat_that_they_came_from(one_process: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    asked = {**body, "temperature": 0, "return_token_ids": True}
    status, _, data = one_process.request("POST", "/v1/chat/completions", asked)
    assert status == 200
    first = json.loads(data)
    other = [{"role": "user", "content": "Something else."}]
    again = {**asked, "messages": other, "input_ids": first["prompt_token_ids"]}
    status, _, data = one_process.request("POST", "/v1/chat/completions", again)
    assert status == 200
    assert json.loads(data)["prompt_token_ids"] == first["prompt_token_ids"]
    assert json.loads(data)["choices"][0]["message"] == first["choices"][0]["message"]
