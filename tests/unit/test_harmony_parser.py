"""Answers in harmony: messages in channels, whole and in pieces of any cut, well formed and not."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.ingress.parsers.answer import AnswerParser, AssembledMessage
from raydix.engine.core.ingress.parsers.events import (
    AnswerEvent,
    AnswerText,
    ArgumentsPart,
    CallBegins,
    CallEnds,
    ReasoningPart,
)
from raydix.engine.core.ingress.parsers.harmony import MARK, MAX_HEAD, TOKENS, HarmonyMessages, opening, shown

ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is noon."
ZONE = '{"zone": "UTC"}'
HEADER = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>"
CALL = f"<|start|>assistant{HEADER}{ZONE}"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"


def marked(text: str) -> str:
    """The text of an answer with its special tokens as such."""
    return re.sub("|".join(map(re.escape, TOKENS)), lambda found: shown(found[0]), text)


def pieces_of(text: str) -> list[str]:
    """The tokens of an answer: special ones, and characters."""
    return [shown(each) if each in TOKENS else each for each in re.findall(r"<\|\w+\|>|.", text, re.DOTALL)]


def events_of(pieces: Iterable[str], **fields: Any) -> list[AnswerEvent]:
    messages = HarmonyMessages(["clock"], **{"may_call": True, **fields})
    found: list[AnswerEvent] = []
    for piece in pieces:
        found += messages.push(piece)
    return [*found, *messages.finish()]


def summary(events: Sequence[AnswerEvent]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Reasoning, text, and each call's name, arguments and wholeness."""
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningPart))
    text = "".join(event.text for event in events if isinstance(event, AnswerText))
    calls = [
        (
            event.name,
            "".join(each.text for each in events if isinstance(each, ArgumentsPart) and each.index == event.index),
            next(each.broken is None for each in events if isinstance(each, CallEnds) and each.index == event.index),
        )
        for event in events
        if isinstance(event, CallBegins)
    ]
    return reasoning, text, calls


CLOCK = ("clock", ZONE, True)
CASES: list[tuple[str, tuple[str, str, list[tuple[str, str, bool]]]]] = [
    (ANALYSIS + FINAL, ("Let me see.", "It is noon.", [])),
    (ANALYSIS + FINAL + "<|return|>", ("Let me see.", "It is noon.", [])),
    ("<|channel|>final<|message|> a\n", ("", " a\n", [])),
    (ANALYSIS + CALL, ("Let me see.", "", [CLOCK])),
    (ANALYSIS + PREAMBLE + CALL + "<|call|>", ("Let me see.", "I look.", [CLOCK])),
    (HEADER + ZONE + "<|call|>" + CALL, ("", "", [CLOCK, CLOCK])),
    # The recipient in the role's place, another type of content, none, and none of its own tokens.
    (f" to=functions.clock<|channel|>commentary json<|message|>{ZONE}", ("", "", [CLOCK])),
    (f"<|channel|>commentary to=functions.clock<|message|>{ZONE}", ("", "", [CLOCK])),
    (f"<|channel|>analysis to=functions.clock code<|message|>{ZONE}<|call|>", ("", "", [CLOCK])),
    (f"<|channel|>commentary<|constrain|>json to=functions.clock<|message|>\n{ZONE}\n", ("", "", [CLOCK])),
    (f"<|channel|>commentary to=clock <|constrain|>json<|message|>{ZONE}", ("", "", [CLOCK])),
    # No function that was offered is called by its name all the same: the client says that there is none.
    (f"<|channel|>commentary to=functions.other<|message|>{ZONE}", ("", "", [("other", ZONE, True)])),
    (f"<|channel|>commentary to=browser.open<|message|>{ZONE}", ("", "", [("browser.open", ZONE, True)])),
    (f"<|channel|>commentary to=assistant<|message|>{ZONE}", ("", ZONE, [])),
    (f"<|channel|>commentary to={'a' * 300}<|message|>{ZONE}", ("", ZONE, [])),
    # What is no object is what its channel says.
    ("<|channel|>commentary to=functions.clock<|message|>now", ("", "now", [])),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ("print(1)", "", [])),
    (HEADER + "<|call|>", ("", "", [("clock", "{}", True)])),
    (HEADER + '{"zone": oh', ("", "oh", [("clock", '{"zone": ', False)])),
    (HEADER + ZONE + " and more<|call|>", ("", "and more", [CLOCK])),
    # Two messages of one kind are two paragraphs.
    (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL, ("Let me see.\n\nLet me see.", "It is noon.", [])),
    (PREAMBLE + FINAL, ("", "I look.\n\nIt is noon.", [])),
    # Headers that are cut off, never closed, of unknown channels, or of nobody.
    ("<|channel|>anal", ("", "", [])),
    ("<|channel|>", ("", "", [])),
    (ANALYSIS + "<|start|>assistant<|channel|>commentary to=functions.cl", ("Let me see.", "", [])),
    ("<|channel|>" + "x" * MAX_HEAD, ("", "<|channel|>" + "x" * MAX_HEAD, [])),
    ("<|channel|>other<|message|>Hm.", ("", "Hm.", [])),
    ("<|message|>Hm.", ("", "Hm.", [])),
    ("<|channel|>analysis<|channel|>final<|message|>Hm.", ("", "Hm.", [])),
    ("<|start|>user<|message|>Why?<|end|>", ("", "Why?", [])),
    ("<|channel|>analysis<|end|>" + FINAL, ("", "It is noon.", [])),
    # Without special tokens, or with too few.
    ("It is noon.", ("", "It is noon.", [])),
    ("to be", ("", "to be", [])),
    ("assistant: hi", ("", "assistant: hi", [])),
    ("assistant: hi<|end|>", ("", "assistant: hi", [])),
    ("to<|end|>" + FINAL, ("", "to\n\nIt is noon.", [])),
    ("assistant: hi" + FINAL, ("", "assistant: hi\n\nIt is noon.", [])),
    (" \n<|end|>" + FINAL, ("", "It is noon.", [])),
    ("", ("", "", [])),
    (ANALYSIS + "It is noon.", ("Let me see.", "It is noon.", [])),
    (ANALYSIS + "assistant<|channel|>final<|message|>It is noon.", ("Let me see.", "It is noon.", [])),
    ("<|channel|>analysis<|message|>Hm. <|channel|>final<|message|>Yes.", ("Hm. ", "Yes.", [])),
    ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", ("", "abc", [])),
    ("<|constrain|>json<|message|>{}", ("", "{}", [])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_answers_whole_and_with_every_cut(text: str, expected: tuple[str, str, list[tuple[str, str, bool]]]) -> None:
    whole = marked(text)
    assert summary(events_of([whole])) == expected
    assert summary(events_of(pieces_of(text))) == expected, "one token at a time"
    for cut in range(len(whole)):
        assert summary(events_of([whole[:cut], "", whole[cut:]])) == expected


def test_names_of_special_tokens_are_text_where_the_model_spells_them() -> None:
    spelled = "A message ends with <|end|>, a call with <|call|>."
    text = marked("<|channel|>final<|message|>") + spelled + shown("<|return|>")
    assert summary(events_of([text])) == ("", spelled, [])
    assert summary(events_of(text)) == ("", spelled, [])
    # The mark alone, and before another text, is text: no model is kept from writing it.
    for rest in ("", "<|channel", "x", MARK + "y"):
        odd = marked("<|channel|>final<|message|>") + MARK + rest
        assert summary(events_of([odd])) == summary(events_of(odd)) == ("", MARK + rest, [])


WORDS = ["analysis", "final", "commentary", "assistant", "json", "to", " to=x", " to=functions.clock", "<|end|>", ZONE]
fragments = st.lists(st.sampled_from([*map(shown, TOKENS), MARK, *WORDS, *'{}"a \n']), max_size=14)
switches = st.fixed_dictionaries({"may_call": st.booleans(), "is_separate": st.booleans()})


@given(fragments, switches, st.data())
def test_the_events_do_not_depend_on_the_pieces(parts: list[str], fields: dict[str, bool], data: Any) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert (
        summary(events_of(pieces, **fields))
        == summary(events_of([text], **fields))
        == summary(events_of(text, **fields))
    )


@given(fragments)
def test_calls_are_numbered_and_each_has_an_end(parts: list[str]) -> None:
    events = events_of(parts)
    begun = [event.index for event in events if isinstance(event, CallBegins)]
    ended = [event.index for event in events if isinstance(event, CallEnds)]
    assert begun == ended == list(range(len(begun)))
    assert not any(MARK + name in str(events) for name in TOKENS)


@given(fragments)
def test_all_of_the_text_is_shown_where_reasoning_is_not_separate(parts: list[str]) -> None:
    """Without separation and calls the text has all that the model wrote, but headers that no message follows."""
    written = "<|channel|>analysis<|message|>" + "".join(part for part in parts if MARK not in part) + "<|end|>"
    begun = marked("<|channel|>analysis<|message|>") + "".join(part for part in parts if MARK not in part)
    events = events_of([begun, shown("<|end|>")], may_call=False, is_separate=False)
    assert summary(events) == ("", written, [])


def message_of(text: str, *, is_cut: bool, **fields: Any) -> AssembledMessage:
    messages = HarmonyMessages(["clock"])
    parser, message = AnswerParser(messages, messages=messages, **fields), AssembledMessage(lambda: "id")
    message.is_cut = is_cut
    for piece in pieces_of(text):
        message.take(parser.push(piece))
    message.take(parser.finish(is_cut=is_cut))
    return message


def test_an_answer_that_is_cut_off_at_each_token() -> None:
    """Reasoning and text are beginnings of the whole ones, and a call has the beginning of its arguments or is none."""
    text = ANALYSIS + PREAMBLE + CALL
    whole = pieces_of(text)
    for length in range(len(whole) + 1):
        cut = text[: sum(len(each.removeprefix(MARK)) for each in whole[:length])]
        message = message_of(cut, is_cut=True)
        assert "Let me see.".startswith(message.reasoning) and "I look.".startswith(message.content)
        arguments = ["".join(call.arguments) for call in message.calls]
        num_come = length - (len(whole) - len(ZONE))
        assert arguments == ([ZONE[:num_come]] if num_come > 0 else [])


def test_a_call_without_arguments_is_one_where_the_model_ended_it() -> None:
    [call] = message_of(HEADER, is_cut=False).calls
    assert "".join(call.arguments) == "{}"
    assert not message_of(HEADER, is_cut=True).calls


def test_a_single_call_ends_the_answer_and_hidden_reasoning_has_no_events() -> None:
    messages = HarmonyMessages(["clock"])
    parser = AnswerParser(messages, messages=messages, is_single=True, shows_reasoning=False)
    events = [event for piece in pieces_of(ANALYSIS + CALL + "<|call|>" + CALL) for event in parser.push(piece)]
    assert parser.is_done and summary([*events, *parser.finish()]) == ("", "", [CLOCK])


def test_the_reasoning_is_known_while_it_comes() -> None:
    messages = HarmonyMessages(())
    inside = []
    for piece in pieces_of("<|channel|>analysis<|message|>ab<|end|>" + FINAL):
        messages.push(piece)
        inside.append(messages.is_inside)
    begin = len("analysis") + 1
    assert [index for index, each in enumerate(inside) if each] == [begin, begin + 1, begin + 2]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", "<|start|>assistant"),
        ("<|start|>assistant<|channel|>final<|message|>It is ", "<|start|>assistant<|channel|>final<|message|>"),
        ("<|start|>assistant<|channel|>analysis", "<|start|>assistant<|channel|>analysis"),
        ("<|start|>user<|message|>Hi<|end|>", ""),
        ("Hi", ""),
    ],
)
def test_the_beginning_of_an_answer_that_stands_in_the_prompt(prompt: str, expected: str) -> None:
    assert opening(prompt) == expected


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "noon.<|return|>", ("", "noon.", [])),
        ("<|start|>assistant<|channel|>analysis<|message|>", "Hm.<|end|>" + FINAL, ("Hm.", "It is noon.", [])),
        ("<|start|>assistant<|channel|>analysis", "<|message|>Hm.", ("Hm.", "", [])),
        ("<|start|>assistant" + HEADER, ZONE, ("", "", [CLOCK])),
        ("<|start|>assistant", "<|channel|>final<|message|>noon.", ("", "noon.", [])),
        ("", FINAL, ("", "It is noon.", [])),
    ],
)
def test_an_answer_that_goes_on_with_the_prompts_beginning(begun: str, text: str, expected: Any) -> None:
    assert summary(events_of(pieces_of(text), begun=begun)) == expected
    if begun.endswith("<|message|>"):
        # The header in the prompt is no part of the answer's text.
        assert events_of("x", begun=begun, is_separate=False, may_call=False) == [AnswerText("x")]
