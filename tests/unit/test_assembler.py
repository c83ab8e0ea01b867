"""From tokens to the text of a choice."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.api.assembler import ChoiceAssembler, Piece
from raydix.engine.core.ingress.detokenizer import ByteDetokenizer
from raydix.engine.core.types import FinishReason, TokenEvent, TokenLogprobs

LETTERS = [bytes([byte]) for byte in range(256)]
"""A vocabulary of one token per byte."""
END = 0


def events_of(
    text: str | bytes, finish: FinishReason | None = None, first: int = 0, with_logprobs: bool = False
) -> list[TokenEvent]:
    """One event per byte, the last with `finish`."""
    data = text.encode() if isinstance(text, str) else text
    logprobs = TokenLogprobs(-1.0, (), ()) if with_logprobs else None
    return [
        TokenEvent("r", 0, first + index, byte, finish if index == len(data) - 1 else None, logprobs, 0)
        for index, byte in enumerate(data)
    ]


def assembler(*stops: str, include_stop: bool = False, min_tokens: int = 0) -> ChoiceAssembler:
    return ChoiceAssembler(ByteDetokenizer(LETTERS), stops, include_stop, min_tokens)


def push_all(choice: ChoiceAssembler, batches: list[list[TokenEvent]]) -> tuple[str, FinishReason | None, int]:
    """Text, finish and number of tokens over all batches, up to the one that ends the choice."""
    text, num_tokens = "", 0
    for batch in batches:
        piece = choice.push(batch)
        text += piece.text
        num_tokens += len(piece.token_ids)
        if piece.finish is not None:
            return text, piece.finish, num_tokens
    return text, None, num_tokens


def test_text_as_it_comes() -> None:
    choice = assembler()
    assert choice.push(events_of("He")) == Piece("He", (72, 101), (), None)
    assert choice.push(events_of("y", FinishReason.LENGTH, first=2)) == Piece("y", (121,), (), FinishReason.LENGTH)


def test_half_a_character_is_held_back_and_given_up_at_the_end() -> None:
    choice = assembler()
    data = "é".encode()
    assert choice.push(events_of(data[:1])).text == ""
    assert choice.push(events_of(data[1:])).text == "é"
    assert choice.push(events_of(data[:1], FinishReason.LENGTH)).text == "\N{REPLACEMENT CHARACTER}"


def test_the_token_that_ends_generation_is_counted_but_not_shown() -> None:
    for stops in ((), ("never",)):
        piece = assembler(*stops).push(events_of(b"ok\0", FinishReason.STOP))
        assert piece == Piece("ok", (111, 107, END), (), FinishReason.STOP)
        piece = assembler(*stops, include_stop=True).push(events_of(b"ok\0", FinishReason.STOP))
        assert piece.text == "ok\0"


def test_the_last_token_of_a_full_answer_is_shown() -> None:
    assert assembler("never").push(events_of("ok!", FinishReason.LENGTH)).text == "ok!"


def test_a_stop_string_across_events_is_cut() -> None:
    choice = assembler("END")
    assert choice.push(events_of("so E")).text == "so "
    assert choice.push(events_of("N", first=4)).text == ""
    piece = choice.push(events_of("D and more", first=5))
    assert piece == Piece("", (68,), (), FinishReason.STOP, "END"), "what follows is not counted either"


def test_a_stop_string_that_does_not_come_true_is_shown() -> None:
    choice = assembler("END")
    assert choice.push(events_of("EN")).text == ""
    assert choice.push(events_of("T", first=2)).text == "ENT"
    assert choice.push(events_of("EN", FinishReason.LENGTH, first=3)).text == "EN"


def test_the_stop_token_that_was_asked_for_is_named() -> None:
    for stops in ((), ("never",)):
        for asked, expected in (((END, 5), END), ((5,), None)):
            choice = ChoiceAssembler(ByteDetokenizer(LETTERS), stops, stop_token_ids=asked)
            assert choice.push(events_of(b"ok\0", FinishReason.STOP)).stop_reason == expected
        choice = ChoiceAssembler(ByteDetokenizer(LETTERS), stops, stop_token_ids=(END,))
        assert choice.push(events_of(b"ok\0", FinishReason.LENGTH)).stop_reason is None


def test_a_stop_string_is_shown_if_asked_for() -> None:
    assert assembler("END", include_stop=True).push(events_of("the END.")).text == "the END"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text, finish, num_tokens = push_all(assembler("x", min_tokens=3), [events_of("xxxx")])
    assert (text, finish, num_tokens) == ("xx", FinishReason.STOP, 3)


def test_a_stop_string_wins_over_the_end_that_comes_with_it() -> None:
    piece = assembler("!").push(events_of("ok!", FinishReason.LENGTH))
    assert (piece.text, piece.finish) == ("ok", FinishReason.STOP)


def test_a_hidden_stop_token_completes_no_stop_string() -> None:
    piece = assembler("ok\0").push(events_of(b"ok\0", FinishReason.STOP))
    assert (piece.text, piece.finish) == ("ok", FinishReason.STOP)


def test_logprobs_go_with_their_tokens() -> None:
    piece = assembler("END").push(events_of("aENDb", with_logprobs=True))
    assert len(piece.logprobs) == len(piece.token_ids) == 4
    assert assembler().push(events_of("ab")).logprobs == ()


@given(
    text=st.text("aEND é", max_size=20),
    cuts=st.sets(st.integers(1, 40)),
    stops=st.sampled_from([(), ("END",), ("a", "EN")]),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    include_stop=st.booleans(),
)
def test_text_does_not_depend_on_how_events_are_grouped(
    text: str, cuts: set[int], stops: tuple[str, ...], finish: FinishReason, include_stop: bool
) -> None:
    events = events_of(text.encode() + b"\0", finish)
    borders = [0, *sorted(cut for cut in cuts if cut < len(events)), len(events)]
    batches = [events[start:end] for start, end in itertools.pairwise(borders)]
    whole = push_all(assembler(*stops, include_stop=include_stop), [events])
    assert push_all(assembler(*stops, include_stop=include_stop), batches) == whole
    if not stops:
        assert whole[0] == text + ("\0" if include_stop or finish is FinishReason.LENGTH else "")
