"""Prompts of chats with the default model's tokenizer, under its own template and under others."""

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydix.engine.core.answers.transcripts import EncodedText, with_answers
from raydix.engine.core.errors import RequestError, StartupError
from raydix.engine.model.chats import encode_chat, next_turn, render_chat, tokens_before
from raydix.engine.model.sources import DEFAULT_MODEL, has_chat_template, resolve_model
from raydix.engine.model.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
TEXT = st.text(st.sampled_from("ab \n1é🌊"), max_size=12) | st.sampled_from(["Hello there", "m0x", " two  words "])
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n{{ m.content }}"
    "{% for call in m.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}


@cache
def tokenizer() -> Tokenizer:
    try:
        return Tokenizer(resolve_model(DEFAULT_MODEL))
    except StartupError as error:
        pytest.skip(str(error))


@contextmanager
def template(source: str) -> Iterator[None]:
    backend = tokenizer()._tokenizer
    own, backend.chat_template = backend.chat_template, source
    try:
        yield
    finally:
        backend.chat_template = own


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def encoded(messages: Sequence[dict[str, Any]], continued: Collection[int] = ()) -> EncodedText:
    return encode_chat(tokenizer(), render_chat(tokenizer(), messages, continued))


def turn(question: str) -> list[int]:
    return tokenizer().encode(f"{END}\n{START}user\n{question}{END}\n{START}assistant\n")


@settings(deadline=None)
@given(turns=st.lists(st.tuples(TEXT, st.lists(st.integers(3, 49_151), max_size=6)), max_size=4), last=TEXT)
def test_each_turn_begins_with_the_ids_of_the_turn_before(turns: list[tuple[str, list[int]]], last: str) -> None:
    """Whatever ids the answers have, and whatever they have as text."""
    messages: list[dict[str, Any]] = []
    answers: dict[int, list[int]] = {}
    sequence: list[int] = []
    for question, token_ids in [*turns, (last, [])]:
        messages.append(user(question))
        prompt = with_answers(encoded(messages, answers), answers)
        expected = [*sequence, *turn(question)] if answers else list(encoded(messages).token_ids)
        assert list(prompt.token_ids) == expected
        sequence = [*expected, *token_ids]
        answers[len(messages)] = token_ids
        messages.append(assistant(tokenizer().decode(token_ids)))


@settings(deadline=None)
@given(question=TEXT, answer=TEXT, more=TEXT, source=st.sampled_from([None, TRIMMING, REASONING]))
def test_the_next_turn_begins_with_what_was_foreseen(question: str, answer: str, more: str, source: str | None) -> None:
    with template(source or tokenizer()._tokenizer.chat_template):
        messages = [user(question), assistant(f"<think>{more}</think>{question}"), user(question)]
        prompt = encoded(messages)
        foreseen = next_turn(tokenizer(), prompt, messages, assistant(answer))
        now = encoded([*messages, assistant(answer), user(more)]).token_ids
        assert now[: len(foreseen)] == foreseen
        assert len(now) - len(foreseen) < len(turn(more)) + 4, "it stops where the question may begin"


def test_a_template_that_drops_or_repeats_an_answer_cannot_go_on_from_its_ids() -> None:
    messages = [user("a"), assistant("b"), user("c")]
    twice = "{% for m in messages %}<|im_start|>{{ m.content }}{{ m.content }}{% endfor %}"
    never = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"
    for source in (twice, never):
        with template(source), pytest.raises(RequestError, match=r"messages\[1\]") as caught:
            encoded(messages, {1})
        assert caught.value.param == "messages[1]"


def test_names_are_rendered_or_named_and_tool_calls_are_text_where_not_rendered() -> None:
    named = [user("a") | {"name": "Ann"}]
    called = [user("a"), assistant("") | {"tool_calls": [CALL, CALL]}, user("b")]
    with template(TOOLS):
        assert f"{START}user Ann" in encoded(named).text
        assert encoded(called).text.count('{"name": "clock", "arguments": {"zone": "UTC"}}') == 2
    assert encoded(called).text.count('{"name": "clock", "arguments": {"zone": "UTC"}}') == 2
    plain = render_chat(tokenizer(), named)
    assert "Ann" not in plain.text and list(plain.ignored) == ["messages.name"]


@pytest.mark.parametrize("source", [None, TRIMMING], ids=["own template", "trimming"])
def test_tokens_before_a_place(source: str | None) -> None:
    system, question = "You are brief.\nName <|im_end|> never.", "Why is the sky blue? "
    messages = [{"role": "system", "content": system}, user(question)]
    with template(source or tokenizer()._tokenizer.chat_template):
        rendered = render_chat(tokenizer(), messages)
        chat = encode_chat(tokenizer(), rendered)
        places = [(0, 14), (0, len(system)), (1, len(question.rstrip()))]
        counts = tokens_before(tokenizer(), messages, chat, places)

    texts = [tokenizer().decode(chat.token_ids[:count], skip_special_tokens=False) for count in counts]
    assert [text[-6:] for text in texts] == ["brief.", "never.", " blue?"]
    assert tokens_before(tokenizer(), messages, chat, []) == []


def test_no_tokens_come_before_text_that_is_not_rendered() -> None:
    with template("{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"):
        messages = [{"role": "system", "content": "x"}, user("why")]
        chat = encode_chat(tokenizer(), render_chat(tokenizer(), messages))
        assert tokens_before(tokenizer(), messages, chat, [(0, 1), (1, 3)]) == [0, 2]


def test_a_model_without_a_chat_template_answers_no_chats(tmp_path: Path) -> None:
    """The folder alone tells, as the start of a server asks it, and the tokenizer refuses with a word on what to do."""
    tokenizer()  # skips where there is no model
    whole = resolve_model(DEFAULT_MODEL)
    assert has_chat_template(whole)
    settings_of_tokenizer = json.loads((whole / "tokenizer_config.json").read_text())
    settings_of_tokenizer.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_of_tokenizer))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(whole / name, tmp_path)

    assert not has_chat_template(tmp_path)
    with pytest.raises(RequestError, match="no chat template: use /v1/completions") as refused:
        Tokenizer(tmp_path).render_chat([user("Hi")])
    assert (refused.value.status, refused.value.param) == (400, "messages")
