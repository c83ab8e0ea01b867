"""Prompts and answers in harmony beside the format's own library, `openai-harmony`, which `make test-harmony` fetches.

The library renders a call's recipient in the role's place of the header, where raydix has it in the channel's place, as
the model writes it; all other text is equal.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydix.engine.core.ingress.parsers.answer import AnswerParser, AssembledMessage, Reasoning
from raydix.engine.core.ingress.parsers.harmony import TOKENS, HarmonyMessages, shown
from raydix.engine.model.harmony import render
from tests.skips import NO_HARMONY

FETCHED = os.environ.get("RAYDIX_HARMONY", "")
RANKS, LIBRARY = Path(FETCHED, "package/encoders/o200k_base.json"), Path(FETCHED, "library")
DATE = "2025-06-28"

pytestmark = pytest.mark.skipif(not FETCHED, reason=NO_HARMONY)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The library, with the ranks of its vocabulary as it reads them: a line each of a token and its rank."""
    folder = tmp_path_factory.mktemp("encodings")
    with (folder / "o200k_base.tiktoken").open("w") as file:
        for line in json.loads(RANKS.read_text())["bpe_ranks"].splitlines():
            _, first, *tokens = line.split(" ")
            file.writelines(f"{token} {rank}\n" for rank, token in enumerate(tokens, start=int(first)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        patch.setattr(sys, "path", [*sys.path, str(LIBRARY)])
        import openai_harmony

        yield openai_harmony


@pytest.fixture(scope="module")
def encoding(library: Any) -> Any:
    return library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<\ufdd0"), min_size=1, max_size=12)
WORDS = st.text(st.sampled_from("abcxyz_"), min_size=1, max_size=6)
COMMENTS = st.text(st.sampled_from("ab .é"), min_size=1, max_size=8)
PLAIN = st.sampled_from(
    [
        {},
        {"type": "integer"},
        {"type": "number", "default": 1.5},
        {"type": "boolean", "default": True},
        {"type": "string", "default": "d"},
        {"type": "string", "enum": ["a", "b"], "default": "a"},
        {"type": "string", "nullable": True},
        {"type": "null"},
        {"type": ["integer", "null"]},
        {"type": "array"},
        {"type": "object"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": [1, 2]},
        {"$ref": "#/$defs/a"},
    ]
)


def described(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with comments, or without."""
    comments = st.fixed_dictionaries(
        {}, optional={"description": COMMENTS, "title": COMMENTS, "examples": st.lists(COMMENTS, max_size=2)}
    )
    return st.builds(lambda schema, about: {**schema, **about}, schemas, comments)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, required: {"type": "object", "properties": properties, "required": required},
        st.dictionaries(WORDS, values, min_size=1, max_size=3),
        st.lists(WORDS, max_size=2),
    )


def larger(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of which these are parts."""
    lists = st.builds(lambda items: {"type": "array", "items": items}, values)
    variants = st.builds(lambda either: {"oneOf": either}, st.lists(values, min_size=1, max_size=3))
    return described(st.one_of(objects(values), lists, variants))


SCHEMAS = objects(st.recursive(described(PLAIN), larger, max_leaves=6))
FUNCTIONS = st.lists(st.tuples(WORDS, COMMENTS | st.just("One.\nTwo."), SCHEMAS | st.none()), max_size=3)
CALLS = st.lists(st.tuples(WORDS, st.just('{"a":1}')), min_size=1, max_size=2)
ANSWERS = st.lists(st.tuples(TEXTS, CALLS | st.none()), max_size=4)


@settings(deadline=None)
@given(
    instructions=TEXTS | st.just(""),
    functions=FUNCTIONS,
    answers=ANSWERS,
    effort=st.sampled_from(["low", "medium", "high"]),
)
def test_prompts(library: Any, encoding: Any, instructions: str, functions: Any, answers: Any, effort: str) -> None:
    messages: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
    said: list[Any] = []
    of_role, author = library.Message.from_role_and_content, library.Author
    for number, (text, calls) in enumerate(answers):
        messages.append({"role": "user", "content": text})
        said.append(of_role(library.Role.USER, text))
        if calls is None:
            messages.append({"role": "assistant", "content": text})
            said.append(of_role(library.Role.ASSISTANT, text).with_channel("final"))
            continue
        ids = [f"{number}-{index}" for index in range(len(calls))]
        made = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
            for each, (name, arguments) in zip(ids, calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": text, "tool_calls": made})
        said.append(of_role(library.Role.ASSISTANT, text).with_channel("commentary"))
        for name, arguments in calls:
            call = of_role(library.Role.ASSISTANT, arguments).with_channel("commentary")
            said.append(call.with_recipient(f"functions.{name}").with_content_type("<|constrain|>json"))
        for each, (name, _) in zip(ids, calls, strict=True):
            messages.append({"role": "tool", "tool_call_id": each, "content": text})
            result = library.Message.from_author_and_content(author.new(library.Role.TOOL, f"functions.{name}"), text)
            said.append(result.with_recipient("assistant").with_channel("commentary"))
    messages.append({"role": "user", "content": "Hi"})
    said.append(of_role(library.Role.USER, "Hi"))

    system = library.SystemContent.new().with_conversation_start_date(DATE)
    system = system.with_reasoning_effort(getattr(library.ReasoningEffort, effort.upper()))
    before = [of_role(library.Role.SYSTEM, system)]
    developer = library.DeveloperContent.new()
    if instructions:
        developer = developer.with_instructions(instructions)
    if functions:
        developer = developer.with_function_tools([library.ToolDescription.new(*each) for each in functions])
    if instructions or functions:
        before.append(of_role(library.Role.DEVELOPER, developer))

    conversation = library.Conversation.from_messages([*before, *said])
    expected = encoding.decode(encoding.render_conversation_for_completion(conversation, library.Role.ASSISTANT))
    expected = re.sub(
        r"assistant to=(\S+?)<\|channel\|>commentary (?=<\|constrain\|>)",
        r"assistant<|channel|>commentary to=\1 ",
        expected,
    )
    tools = [
        {"function": {"name": name, "description": text, "parameters": schema}} for name, text, schema in functions
    ]
    assert render(messages, tools, {"reasoning_effort": effort}, today=DATE, begins_answer=True) == expected


HEADERS = (
    "analysis",
    "commentary",
    "final",
    "commentary to=functions.clock <|constrain|>json",
    "commentary to=clock json",
)
CONTENTS = st.text(st.characters(codec="utf-8", exclude_characters="<\ufdd0"), min_size=1, max_size=8)


def parts_of(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """What the library's messages are to raydix: kinds, and texts."""
    found = []
    for message in messages:
        text = "".join(part.text for part in message.content)
        kind = "reasoning" if message.channel == "analysis" else "text"
        found.append((message.recipient.removeprefix("functions.") if message.recipient else kind, text))
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HEADERS), CONTENTS), min_size=1, max_size=4), st.booleans())
def test_answers(library: Any, encoding: Any, written: list[tuple[str, str]], in_role: bool) -> None:
    """The library reads the same kinds, contents and names, whichever place of the header has the recipient."""
    answer = ""
    for header, content in written:
        channel, _, rest = header.partition(" ")
        recipient, _, kind = rest.partition(" ")
        begin = f"<|channel|>{header}"
        if in_role and recipient:
            begin = f" {recipient}<|channel|>{channel} {kind}"
        body = json.dumps({"a": content}) if recipient else content
        answer += (
            f"{'<|start|>assistant' if answer else ''}{begin}<|message|>{body}{'<|call|>' if recipient else '<|end|>'}"
        )

    token_ids = encoding.encode(answer, allowed_special="all")
    expected = parts_of(encoding.parse_messages_from_completion_tokens(token_ids, library.Role.ASSISTANT))

    reader, message = HarmonyMessages(["clock"]), AssembledMessage(lambda: "id")
    parser = AnswerParser(reader, messages=reader)
    for name in TOKENS:
        answer = answer.replace(name, shown(name))
    message.take(parser.push(answer))
    message.take(parser.finish())
    found = []
    for part in message.parts:
        if isinstance(part, str):
            found.append(("text", part))
        elif isinstance(part, Reasoning):
            found.append(("reasoning", part.text))
        else:
            found.append((part.name, "".join(part.arguments)))
    assert [kind for kind, _ in found] == _merged([kind for kind, _ in expected])
    for kind in ("text", "reasoning"):
        # Space between texts and calls, and between paragraphs, is raydix' own.
        texts = ["".join(text.split()) for each, text in found if each == kind]
        assert "".join(texts) == "".join("".join(text.split()) for each, text in expected if each == kind)
    assert [part for part in found if part[0] == "clock"] == [part for part in expected if part[0] == "clock"]


def _merged(kinds: Sequence[str]) -> list[str]:
    """Kinds of parts, where texts or reasoning in a row are one part."""
    return [kind for index, kind in enumerate(kinds) if kind == "clock" or index == 0 or kinds[index - 1] != kind]
