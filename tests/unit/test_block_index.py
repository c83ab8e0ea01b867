"""What is remembered of blocks and forgotten again; `test_directory` has the index at work."""

from raydix.engine.core.manager.block_index import BlockNotes, Displacements

A, B, C, D, E = (bytes([letter]) for letter in b"abcde")


def test_notes_are_each_tenants_own_and_the_last_one_counts() -> None:
    notes = BlockNotes[bytes]()
    notes.note("t", {A: B, B: C})
    notes.note("t", {A: D})
    notes.note("u", {B: E})
    assert notes.of("t", [A, B, C]) == [D, C, None]
    assert notes.of("u", [A, B, C]) == [None, E, None]


def test_notes_of_the_last_prompts_are_remembered() -> None:
    notes = BlockNotes[bytes](capacity=2)
    notes.note("t", {A: B})
    notes.note("u", {B: C})
    assert notes.of("t", [A]) + notes.of("u", [B]) == [B, C], "the last two of all tenants"
    notes.note("t", {C: D})
    assert notes.of("t", [A, C]) == [B, D], "and older ones"
    notes.note("t", {C: E})
    assert notes.of("t", [A, C]) + notes.of("u", [B]) == [None, E, None], "which go at once"


def test_displaced_blocks_have_the_time_of_the_look_before() -> None:
    displacements = Displacements(capacity=2)
    times = []
    for now in (10.0, 20.0, 30.0, 40.0):
        displacements.look(now)
        times += [displacements.time_of(displacements.add()) for _ in range(2)]
    displacements.look(50.0)
    displacements.look(60.0)
    assert times == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0, 40.0, 40.0]
    assert [displacements.time_of(number) for number in (5, 6, 7, 8)] == [30.0, 30.0, 40.0, 40.0]
    assert displacements.time_of(1) == 30.0, "no earlier time is remembered"
