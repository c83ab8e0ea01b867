"""Tools, calls and results in prompts: as the template renders them, or as plain text."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers import TOOL_FORMATS
from raydix.engine.core.ingress.parsers.answer import AnswerParser, AssembledMessage
from raydix.engine.model.chats import encode_chat, next_turn, render_chat, renders_tools, tool_format
from tests.model.test_chats import TOOLS, template, tokenizer
from tests.model.tool_templates import LLAMA3, MISTRAL, NO_SYSTEM, PYTHONIC, QWEN

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string", "description": "Its name."}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": SCHEMA}}
DEFAULT = None
"""The default model's own template, which renders no tools."""

NATIVE = [(QWEN, "hermes"), (LLAMA3, "llama3"), (MISTRAL, "mistral"), (PYTHONIC, "pythonic")]


def own(source: str | None) -> str:
    return tokenizer().chat_template if source is None else source


def call(name: str = "clock", arguments: str = '{"zone": "UTC"}', call_id: str = "aaaaaaaa1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict[str, Any], content: str = "") -> list[dict[str, Any]]:
    """A question, an answer with calls, and a result for each."""
    question = {"role": "user", "content": "What time is it?"}
    results = [
        {"role": "tool", "content": f"{index}:00", "tool_call_id": each["id"]} for index, each in enumerate(calls)
    ]
    return [question, {"role": "assistant", "content": content, "tool_calls": [*calls]}, *results]


def text_of(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (CLOCK,), **fields: Any) -> str:
    return render_chat(tokenizer(), messages, tools=tools, **fields).text


@pytest.mark.parametrize(("source", "name"), [*NATIVE, (DEFAULT, "hermes"), (NO_SYSTEM, "hermes"), (TOOLS, "hermes")])
def test_the_format_is_the_templates(source: str | None, name: str) -> None:
    with template(own(source)):
        assert tool_format(tokenizer()) == name
        assert renders_tools(tokenizer()) == (source in [each for each, _ in NATIVE])


@pytest.mark.parametrize(("source", "name"), NATIVE)
def test_a_template_renders_tools_calls_and_results(source: str, name: str) -> None:
    with template(source):
        text = text_of(turn(call()))
        for part in ("clock", "The time.", "Its name.", "UTC", "0:00"):
            assert part in text
        assert "You can call functions" not in text


@pytest.mark.parametrize("source", [DEFAULT, *[source for source, _ in NATIVE], NO_SYSTEM])
def test_a_rendered_call_is_parsed_again_and_the_next_turn_is_foreseen(source: str | None) -> None:
    """What the model wrote, the parser reads, the client sends back, and the template writes, is one text."""
    messages = turn(call())[:1]
    with template(own(source)):
        kind = TOOL_FORMATS[tool_format(tokenizer())]
        before = text_of(messages)
        whole = text_of(turn(call())[:2], end=ChatEnd.CLOSED)
        assert whole.startswith(before)
        written = whole[len(before) :].rstrip().removesuffix("<|im_end|>")

        parser, message = AnswerParser(kind.parser(["clock"])), AssembledMessage(lambda: "aaaaaaaa1")
        for character in written:
            message.take(parser.push(character))
        message.take(parser.finish())
        [found] = message.calls
        assert (message.content, found.name) == ("", "clock")
        assert json.loads("".join(found.arguments)) == {"zone": "UTC"}

        answer = {"role": "assistant", "content": "", "tool_calls": [call(arguments="".join(found.arguments))]}
        prompt = encode_chat(tokenizer(), render_chat(tokenizer(), messages, tools=[CLOCK]))
        foreseen = next_turn(tokenizer(), prompt, messages, answer, tools=[CLOCK])
        result = {"role": "tool", "content": "12:00", "tool_call_id": "aaaaaaaa1"}
        now = encode_chat(tokenizer(), render_chat(tokenizer(), [*messages, answer, result], tools=[CLOCK])).token_ids
        assert now[: len(foreseen)] == foreseen
        assert len(foreseen) > len(prompt.token_ids)


def test_the_plain_text_of_tools_calls_and_results() -> None:
    calls = call(call_id="1"), call("weather", '{"place": "Ruīz"}', "2")
    question, answer, first, second = turn(*calls, content="Let me see.")
    text = text_of([question, answer, second, first])
    signature = json.dumps(CLOCK)
    assert "<|im_start|>system\nYou can call functions." in text and f"<tools>\n{signature}\n</tools>" in text
    assert (
        "<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Ruīz"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n0:00\n</tool_response>\n<tool_response>\n1:00\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    ) in text, "results stand in the order of their calls"


def test_the_functions_stand_behind_a_system_message() -> None:
    text = text_of([{"role": "system", "content": "Be brief."}, *turn(call())])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")


def test_without_a_system_message_the_functions_stand_in_the_first_one() -> None:
    with template(NO_SYSTEM):
        assert text_of(turn(call())).lstrip().startswith("<|im_start|>user\nYou can call functions.")


def test_history_without_tools_is_text_too() -> None:
    text = text_of(turn(call()), tools=())
    assert "<tool_call>" in text and "<tool_response>" in text and "You can call functions" not in text


def test_an_open_end_and_continued_answers_among_calls() -> None:
    messages = [*turn(call()), {"role": "assistant", "content": "It is "}]
    assert text_of(messages, end=ChatEnd.OPEN).endswith("<|im_start|>assistant\nIt is ")
    chat = render_chat(tokenizer(), [*messages, {"role": "user", "content": "So?"}], {3}, tools=[CLOCK])
    [(_, index)] = chat.places
    assert index == 3, "the message's own index, though messages were joined"


def test_arguments_that_are_no_object_stay_text() -> None:
    with template(QWEN):
        assert '"arguments": "{oops"' in text_of(turn(call(arguments="{oops")))
        assert '"arguments": "[1]"' in text_of(turn(call(arguments="[1]")))
    assert '"arguments": {oops}' in text_of(turn(call(arguments="{oops")))


def test_a_results_name_may_be_left_out_where_it_is_its_calls() -> None:
    messages = turn(call())
    messages[2]["name"] = "clock"
    assert "0:00" in text_of(messages)
    messages[2]["name"] = "Ann"
    assert list(render_chat(tokenizer(), messages).ignored) == ["messages.name"]
    del messages[2]["name"]
    assert not render_chat(tokenizer(), messages).ignored


def test_calls_that_a_template_refuses() -> None:
    with template(LLAMA3), pytest.raises(RequestError, match="one call at a time"):
        text_of(turn(call(call_id="1"), call(call_id="2")))
    with template(MISTRAL), pytest.raises(RequestError, match="9 letters and digits"):
        text_of(turn(call(call_id="call_1")))


def test_a_function_that_is_left_out_is_refused_by_name() -> None:
    first_only = QWEN.replace("for tool in tools", "for tool in tools[:1]")
    with template(first_only), pytest.raises(RequestError) as caught:
        text_of(turn(call()), [CLOCK, {**CLOCK, "function": {"name": "other"}}])
    assert caught.value.param == "tools[1].function.name"


@pytest.mark.parametrize("source", [DEFAULT, QWEN])
def test_no_function_writes_special_tokens(source: str | None) -> None:
    """Neither in texts nor in keys, of functions and of arguments."""
    name = "<|im_end|>"
    schema = {"type": "object", "properties": {name: {"type": "string", "description": name}}}
    tool = {"type": "function", "function": {"name": "f", "description": name, "parameters": schema}}
    with template(own(source)):
        plain = encode_chat(tokenizer(), render_chat(tokenizer(), turn(call()), tools=[CLOCK]))
        chat = render_chat(tokenizer(), turn(call(arguments=json.dumps({name: name}))), tools=[tool])
        ids = encode_chat(tokenizer(), chat).token_ids
        [end] = tokenizer().encode(name)
        assert list(ids).count(end) == list(plain.token_ids).count(end)
        assert tokenizer().decode(ids, skip_special_tokens=False).count(name) == list(ids).count(end) + 5
