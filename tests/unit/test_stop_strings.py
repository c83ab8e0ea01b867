"""Stop strings against the naive definition, for any pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raydix.engine.core.ingress.stop_strings import StopStrings


def naive(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The first end of any stop string ends the text; the longest that ends there counts."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def must_hold(text: str, stops: tuple[str, ...]) -> int:
    return max((k for k in range(len(text) + 1) for stop in stops if stop.startswith(text[len(text) - k :])), default=0)


letters = st.sampled_from("abc")
texts = st.lists(st.text(letters, max_size=6), max_size=12)
stop_sets = st.lists(st.text(letters, min_size=1, max_size=5), max_size=5).map(tuple)


@given(texts, stop_sets, st.booleans())
@example(["ab", "abx"], ("abc", "b"), False)
@example(["aab"], ("ab", "aab"), False)
def test_equals_the_definition_for_any_pieces(pieces: list[str], stops: tuple[str, ...], include_stop: bool) -> None:
    watcher = StopStrings(stops, include_stop)
    shown, matched = "", None
    for number, piece in enumerate(pieces):
        text, matched = watcher.push(piece)
        shown += text
        so_far = "".join(pieces[: number + 1])
        if matched is None:
            assert shown == so_far[: len(so_far) - must_hold(so_far, stops)]
    shown += watcher.flush()
    assert (shown, matched) == naive("".join(pieces), stops, include_stop)
    assert watcher.matched == matched


def test_text_after_the_match_is_dropped() -> None:
    watcher = StopStrings(("\n\n",))
    assert watcher.push("one\n") == ("one", None)
    assert watcher.push("\ntwo") == ("", "\n\n")
    assert watcher.push("three") == ("", "\n\n")
    assert watcher.flush() == ""


def test_held_text_comes_out_when_it_is_no_stop() -> None:
    watcher = StopStrings(("</end>",))
    assert watcher.push("a</en") == ("a", None)
    assert watcher.push("ough") == ("</enough", None)
    assert watcher.push("</end") == ("", None)
    assert watcher.flush() == "</end"


def test_include_stop() -> None:
    watcher = StopStrings(("END",), include_stop=True)
    assert watcher.push("the E") == ("the ", None)
    assert watcher.push("ND.") == ("END", "END")


def test_without_stops_everything_passes() -> None:
    watcher = StopStrings(())
    assert watcher.push("anything [] \\") == ("anything [] \\", None)
    assert watcher.flush() == ""


@pytest.mark.parametrize("stop", ["[", "]", "^", "-", "\\", ".*", "日本", "🙂", "&&", "||"])
def test_any_character_is_literal(stop: str) -> None:
    assert StopStrings((stop,)).push(f"a-z{stop}b") == naive(f"a-z{stop}b", (stop,), False)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(("a", ""))
