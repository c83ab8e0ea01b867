"""The lead of an answer, found in the bytes of tokens of any cut, and the tokens that may stand in it."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.answers.lead import Before, Behind, Inside, Lead
from raydix.engine.core.ingress.parsers.reasoning import ReasoningParser
from raydix.engine.model.lead_masks import LeadMasks
from raydix.engine.model.masks import Mask

CLOSED = Lead(b"<think>", b"</think>")
OPEN = Lead(b"<think>", b"</think>", is_open=True)


def place_of(tokens: Iterable[bytes], lead: Lead = CLOSED) -> Before | Inside | Behind | None:
    """The place behind some tokens, or the first that is behind the lead or without one."""
    place: Before | Inside | Behind | None = lead.start
    for token in tokens:
        assert isinstance(place, Before | Inside)
        place = lead.after(place, token)
        if not isinstance(place, Before | Inside):
            break
    return place


@pytest.mark.parametrize(
    ("text", "lead", "expected"),
    [
        (b"", CLOSED, Before()),
        (b" \n<thi", CLOSED, Before(b"<thi")),
        (b"<thing", CLOSED, None),
        (b"yes", CLOSED, None),
        (b"<think>", CLOSED, Inside()),
        (b"\n<think>a </thin", CLOSED, Inside(b"</thin")),
        (b"<think>a <</think>", CLOSED, Behind()),
        (b"", OPEN, Inside()),
        (b"<think>a</", OPEN, Inside(b"</")),
        (b"a</think>", OPEN, Behind()),
    ],
)
def test_places_whatever_the_tokens(text: bytes, lead: Lead, expected: object) -> None:
    single = [text[at : at + 1] for at in range(len(text))]
    assert place_of(single, lead) == expected
    for cut in range(len(text) + 1):
        assert place_of([text[:cut], b"", text[cut:]], lead) == expected or expected is None


def test_the_rest_of_a_closing_token() -> None:
    assert place_of([b"<think>a</think", b">\n\n"]) == Behind(b"\n\n") and Behind(b"\n\n").is_clean
    assert place_of([b"<think></think>\n{"]) == Behind(b"\n{") and not Behind(b"\n{").is_clean


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n"]), max_size=9), st.booleans()
)
def test_a_lead_ends_where_the_reasoning_of_the_text_does(fragments: list[str], is_inside: bool) -> None:
    lead, text = OPEN if is_inside else CLOSED, "".join(fragments)
    for end in range(len(text) + 1):
        thinking = ReasoningParser(is_inside=is_inside)
        thinking.push(text[:end])
        place = place_of([each.encode() for each in text[:end]], lead)
        assert isinstance(place, Inside) == thinking.is_inside


# Masks

TABLE = [
    b"<",
    b"<think>",
    b"<thi",
    b"nk>",
    b"nk>{",
    b"</think>",
    b"</",
    b"think>",
    b">\n",
    b">{",
    b"{",
    b" ",
    b"",
    b"end",
]
NAMES = {token: number for number, token in enumerate(TABLE)}
END_IDS = {NAMES[b"end"]}


def allowed(mask: Mask) -> set[bytes]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(TABLE)]
    return {token for token, bit in zip(TABLE, bits, strict=True) if bit}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Before(), {b"<", b"<think>", b"<thi"}),
        (Before(b"<"), {b"think>"}),
        (Before(b"<thi"), {b"nk>", b"nk>{"}),
        (Before(b"<think"), {b">\n", b">{"}),
        (Inside(), {*TABLE} - {b"end"}),
        (Inside(b"</"), {*TABLE} - {b"end"}),
        (Inside(b"</think"), {*TABLE} - {b"end", b">{"}),
        (Inside(b"</thi"), {*TABLE} - {b"end", b"nk>{"}),
    ],
)
def test_tokens_of_a_lead(place: Before | Inside, expected: set[bytes]) -> None:
    masks = LeadMasks(TABLE, END_IDS, 1)
    assert allowed(masks.at(CLOSED, place)) == expected
    assert masks.at(CLOSED, place) is masks.at(CLOSED, place), "made once"


def test_a_token_with_both_tags_and_a_part_of_the_answer_is_no_beginning() -> None:
    masks = LeadMasks([b"<think></think>", b"<think></think>{"], (), 1)
    assert masks.at(CLOSED, Before()).tolist() == [1]
