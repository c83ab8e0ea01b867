"""Scanners of clients' and models' texts take time in proportion to the text, whatever the text is.

Each is timed on hostile texts of n and of 4n characters: processor time may grow by far more than four times on a busy
machine, and grows sixteenfold where a scanner goes over the text again for each of its characters.
"""

import contextlib
import re
import time
from collections.abc import Callable

import pytest

from raydix.engine.api.batches import window_s
from raydix.engine.api.fields import REQUEST_ID_PATTERN
from raydix.engine.api.grammars import is_ebnf
from raydix.engine.api.resuming import EventId
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.json_value import JsonValue, Step
from raydix.engine.core.ingress.parsers.mistral import CALLS, MistralCalls
from raydix.engine.core.ingress.parsers.python_literal import json_of
from raydix.engine.core.ingress.stop_strings import StopStrings
from raydix.engine.model.chats import _Mark
from raydix.engine.model.tokenizer import mark_names, names_pattern

NUM = 3_000
FACTOR = 4
MOST = 10.0
"""Growth of the processor time; a linear scanner's is about `FACTOR`, a quadratic one's `FACTOR` squared."""
LEAST_S = 2e-3
"""Times below are noise."""


def mistral(text: str) -> None:
    calls = MistralCalls(())
    for character in CALLS + text:
        calls.push(character)
    calls.finish()


def json_value(text: str) -> None:
    value = JsonValue()
    for character in text:
        if value.feed(character) is not Step.MORE:
            value = JsonValue()


def stop_strings(text: str) -> None:
    stops = StopStrings(("a" * 64 + "b", "aab"))
    for begin in range(0, len(text), 8):
        stops.push(text[begin : begin + 8])
    stops.flush()


def refused(scan: Callable[[str], object]) -> Callable[[str], object]:
    """A scanner that may refuse its text."""

    def scanned(text: str) -> None:
        with contextlib.suppress(RequestError):
            scan(text)

    return scanned


def marks(text: str) -> None:
    mark = _Mark()
    mark.replace(text.replace("m", mark._word), "y")


NAMES = names_pattern(["<|im_start|>", "<|im_end|>", "<|im_st", "<|" + "a" * 40])
SCANNERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "is_ebnf": (is_ebnf, ("\n", " ", "\t\n ", "a", "-", "a\n", "a ", ":", "::=", "a ::= ", "start", "start\n", "\n:")),
    "names of special tokens": (
        lambda text: mark_names([{"role": "user", "content": text}], NAMES),
        ("<", "<|", "<|im_", "<|im_start|>", "<|im_st<|im_start|>art|>", "a"),
    ),
    "marks of messages": (marks, ("m", "m1", "1", "m1x", "x")),
    "ids of events": (refused(EventId.read), ("0.0.00000000:", "0", ":", "0.0.00000000:1/", "fp_")),
    "ids of requests": (lambda text: re.fullmatch(REQUEST_ID_PATTERN, text), ("a", ":", "\n")),
    "windows of batches": (refused(window_s), ("1", "1h", "0")),
    "literals of Python": (json_of, ("'", "'a", "\\", "'\\", "[", "1", "1.", "1e", " ", "''", "- ", "[1,", "\"'")),
    "values of JSON": (json_value, ("[", '"', "1", "[1,", "\\", '"\\u', "-", " ")),
    "calls of Mistral": (mistral, (" ", "a", "a ", "[CALL_ID]", "[ARGS]", "a [CALL_ID]", "\n", "{")),
    "stop strings": (stop_strings, ("a", "ab", "aa", "b")),
}


def seconds(scan: Callable[[str], object], text: str) -> float:
    """The least processor time of three scans."""
    times = []
    for _ in range(3):
        begun = time.thread_time()
        scan(text)
        times.append(time.thread_time() - begun)
    return min(times)


@pytest.mark.parametrize("name", SCANNERS)
@pytest.mark.parametrize("end", ["", "!", 'root ::= "a"', "'", "x"])
def test_the_time_is_in_proportion_to_the_text(name: str, end: str) -> None:
    scan, pieces = SCANNERS[name]
    for piece in pieces:
        short, long = ((piece * length)[:length] + end for length in (NUM, FACTOR * NUM))
        assert seconds(scan, long) <= MOST * max(seconds(scan, short), LEAST_S), repr(piece)


def test_a_quadratic_search_is_noticed() -> None:
    """The rule of llguidance's own test for Lark's notation, which was searched for in clients' grammars."""
    quadratic = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)").search
    short, long = ("\n" * length + 'root ::= "a"' for length in (NUM, FACTOR * NUM))
    assert seconds(quadratic, long) > MOST * max(seconds(quadratic, short), LEAST_S)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('root ::= "a"', True),
        ("\n\n  root\n::= x", True),
        ('a-b_c ::= "x"', True),
        ("# text\nroot ::= x", True),
        ('start: "::="', False),
        ('start\n : "a"', False),
        ('%llguidance {}\nx ::= "a"', False),
        ("x y ::= z", False),
        ("::= x", False),
        ('start ::= root\nroot ::= "a"', True),
        ('other: "a"', False),
        ('root ::= "start: now"', True),
        ("", False),
    ],
)
def test_the_notation_of_a_grammar(text: str, expected: bool) -> None:
    assert is_ebnf(text) == expected
