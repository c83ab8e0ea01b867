"""What is remembered of blocks and forgotten again; `test_directory` has the index at work."""

from engine.core.manager.block_index import Continuations

A, B, C, D, E = (bytes([letter]) for letter in b"abcde")


def test_continuations_are_each_tenants_own_and_the_last_one_counts() -> None:
    continuations = Continuations()
    continuations.note("t", {A: B, B: C})
    continuations.note("t", {A: D})
    continuations.note("u", {B: E})
    assert continuations.after("t", [A, B, C]) == [D, C, None]
    assert continuations.after("u", [A, B, C]) == [None, E, None]


def test_continuations_of_the_last_prompts_are_remembered() -> None:
    continuations = Continuations(capacity=2)
    continuations.note("t", {A: B})
    continuations.note("u", {B: C})
    assert continuations.after("t", [A]) + continuations.after("u", [B]) == [B, C], "the last two of all tenants"
    continuations.note("t", {C: D})
    assert continuations.after("t", [A, C]) == [B, D], "and older ones"
    continuations.note("t", {C: E})
    assert continuations.after("t", [A, C]) + continuations.after("u", [B]) == [None, E, None], "which go at once"
