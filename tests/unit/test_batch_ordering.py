"""The order of a batch's lines: common beginnings side by side, else the file's order."""

from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.batches.lines import MAX_PIECES, PIECE, PrefixOrder


def order_of(prompts: list[str]) -> list[int]:
    order = PrefixOrder()
    for number, prompt in enumerate(prompts):
        order.add(number, prompt)
    return order.numbers()


def test_lines_that_share_a_beginning_run_one_after_the_other() -> None:
    first, second = "a" * 3 * PIECE, "b" * 3 * PIECE
    assert order_of([first + "1", second + "1", "short", first + "2", second + "2"]) == [0, 3, 1, 4, 2]


def test_those_that_share_more_stand_closer() -> None:
    shared, deeper = "a" * PIECE, "a" * 2 * PIECE
    assert order_of([deeper + "1", shared + "b", deeper + "2", shared + "c"]) == [0, 2, 1, 3]


def test_lines_that_share_nothing_keep_their_order() -> None:
    assert order_of([f"{number} alone" for number in range(20)]) == [*range(20)]
    assert order_of(["", "", ""]) == [0, 1, 2]


def test_characters_that_are_no_unicode_are_taken() -> None:
    assert order_of(["\ud800", "x", "\ud800"]) == [0, 2, 1]


def test_only_the_beginning_of_a_long_prompt_counts() -> None:
    long = "x" * PIECE * MAX_PIECES
    assert order_of([long + "b", "y", long + "a"]) == [0, 2, 1]


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=12))
def test_each_shared_beginning_is_one_stretch_of_the_order(pieces: list[list[str]]) -> None:
    """A walk through the prefix tree: whatever beginning one looks at, its lines follow each other."""
    prompts = ["".join(letter * PIECE for letter in each) for each in pieces]
    order = order_of(prompts)
    assert sorted(order) == [*range(len(prompts))]
    for beginning in {prompt[:end] for prompt in prompts for end in range(PIECE, len(prompt) + 1, PIECE)}:
        places = [place for place, number in enumerate(order) if prompts[number].startswith(beginning)]
        assert places == [*range(places[0], places[0] + len(places))]
