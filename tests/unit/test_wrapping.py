"""Words on a terminal's lines, whatever the pieces they come in. A small terminal stands in for the real one."""

import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from raydix.cli.chat import Wrapper

TEXT = "The quick brown fox jumps over the lazy dog, and nobody has ever asked the dog."


def screen(pieces: list[str], width: int) -> list[str]:
    """The lines that a terminal shows; a character beyond its edge fails."""
    lines = [""]
    wrapper = Wrapper()
    for written in (wrapper.push(piece, width) for piece in pieces):
        for part in re.findall(r"\x1b\[\d+D\x1b\[K|.", written, re.DOTALL):
            if part.startswith("\x1b"):
                kept = cell_len(lines[-1]) - int(part[2 : part.index("D")])
                while cell_len(lines[-1]) > kept:
                    lines[-1] = lines[-1][:-1]
            elif part == "\n":
                lines.append("")
            else:
                lines[-1] += part
                assert cell_len(lines[-1]) < width
    return lines


@pytest.mark.parametrize("width", [12, 20, 33, 80])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_breaks_between_words(width: int, size: int) -> None:
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    assert [line.rstrip() for line in screen(pieces, width)] == textwrap.wrap(TEXT, width - 1)


def test_a_word_longer_than_a_line_is_broken() -> None:
    assert screen(["an extraordinary", " day"], 9) == ["an ", "extraord", "inary ", "day"]


def test_own_line_breaks_stay() -> None:
    assert screen(["one\n\n  two"], 20) == ["one", "", "  two"]


def test_wide_characters_take_two_columns() -> None:
    assert screen(["漢字 ", "漢字漢字"], 10) == ["漢字 ", "漢字漢字"]
    assert screen([" aaa漢"], 5) == [" aaa", "漢"], "a word that would leave no room for its next character stays"


@given(st.lists(st.text(alphabet="ab漢 \t\n", max_size=12), max_size=12), st.integers(4, 30))
def test_no_character_is_lost_and_none_beyond_the_edge(pieces: list[str], width: int) -> None:
    def words(text: str) -> str:
        return "".join(text.split())

    assert words("".join(screen(pieces, width))) == words("".join(pieces))
