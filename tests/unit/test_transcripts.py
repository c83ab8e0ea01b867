"""Chats are found again by their text, with the ids that they had; the store keeps within its bytes."""

from array import array
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.core.hashing import root_hash
from engine.core.transcripts import (
    ENTRY_BYTES,
    MAX_BORDERS,
    EncodedText,
    TranscriptStore,
    extended_name,
    name_beginnings,
    resume,
)

ROOT = root_hash("model")
END, TURN = "<", ">"
"""The special tokens of a toy tokenizer that takes pairs of other characters as one token where it can."""


def encode(text: str) -> EncodedText:
    token_ids: list[int] = []
    borders = []
    index = 0
    while index < len(text):
        if text[index] in END + TURN:
            borders.append((index, len(token_ids)))
        pair = text[index : index + 2]
        width = 2 if len(pair) == 2 and not set(pair) & set(END + TURN) else 1
        token_ids.append(token_id(text[index : index + width]))
        index += width
    return EncodedText(text, token_ids, borders)


def token_id(text: str) -> int:
    return int.from_bytes(text.encode("utf-32-be"), "big") % 2**31


def render(turns: list[tuple[str, str]], question: str) -> str:
    return "".join(f"{asked}{TURN}{answer}{END}" for asked, answer in turns) + question + TURN


def names(text: str, root: bytes = ROOT) -> list[bytes]:
    return name_beginnings(encode(text), root)[0]


WORDS = st.text("ab<>é", max_size=6)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=5), WORDS, st.data())
def test_every_turn_begins_with_the_ids_of_the_turn_before(
    turns: list[tuple[str, str]], last: str, data: st.DataObject
) -> None:
    """The model generates its answers character by character, which no text tokenizes to, and may spell what looks like
    a special token."""
    store = TranscriptStore(1 << 20)
    sequence: tuple[int, ...] = ()
    said: list[tuple[str, str]] = []
    for question, answer in [*turns, (last, "")]:
        chat = encode(render(said, question))
        lookups, digest = name_beginnings(chat, ROOT)
        token_ids = resume(chat, store.first(lookups), 1000)
        assert token_ids[: len(sequence)] == sequence
        fresh = f"{END}{question}{TURN}" if said else f"{question}{TURN}"
        assert token_ids[len(sequence) :] == tuple(encode(fresh).token_ids)
        sequence = (*token_ids, *map(token_id, answer))
        store.record(extended_name(digest, answer), array("I", sequence))
        said.append((question, answer))
    store.check_integrity()


@given(st.text(), st.text())
def test_a_name_is_of_the_text_and_not_of_how_it_came_together(prompt: str, answer: str) -> None:
    _, digest = name_beginnings(encode(prompt), ROOT)
    whole = EncodedText(prompt + answer + END, [0], [(len(prompt + answer), 0)])
    assert name_beginnings(whole, ROOT)[0] == [extended_name(digest, answer)]
    assert name_beginnings(whole, ROOT)[0] == [extended_name(digest, answer)], "naming leaves the digest as it was"


def test_roots_do_not_share_names() -> None:
    assert set(names("a>b<", root_hash("model") + b"tenant")).isdisjoint(names("a>b<"))


def test_names_are_longest_first_and_bounded() -> None:
    assert names("a>b<")[::-1] == names("a>")[::-1] + names("a>b<")[:1]
    assert len(names("<" * 1000)) == MAX_BORDERS
    assert names("<" * 1000)[0] == names("<" * 1000 + "ab>")[1]


def test_ids_that_would_not_fit_are_tokenized_anew() -> None:
    chat = encode("ab>abab<a>")
    found = 1, array("I", [*encode("ab>").token_ids, *map(token_id, "abab")])
    assert len(resume(chat, found, 9)) == 9
    assert resume(chat, found, 8) == tuple(chat.token_ids)
    assert resume(chat, None, 9) == tuple(chat.token_ids)


@pytest.mark.parametrize("budget", [0, ENTRY_BYTES, ENTRY_BYTES + 7])
def test_what_exceeds_the_budget_alone_is_not_kept(budget: int) -> None:
    store = TranscriptStore(budget)
    store.record(b"name", array("I", [1, 2]))
    assert store.first([b"name"]) is None
    store.check_integrity()


class StoreMachine(RuleBasedStateMachine):
    """A store for a few entries, beside a dictionary in order of use."""

    BUDGET = 4 * ENTRY_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.store = TranscriptStore(self.BUDGET)
        self.model: OrderedDict[bytes, list[int]] = OrderedDict()

    @rule(name=st.binary(min_size=1, max_size=1), num_tokens=st.integers(0, 450))
    def record(self, name: bytes, num_tokens: int) -> None:
        token_ids = list(range(num_tokens))
        self.store.record(name, array("I", token_ids))
        self.model.pop(name, None)
        self.model[name] = token_ids
        while self.cost() > self.BUDGET:
            self.model.popitem(last=False)

    @rule(names=st.lists(st.binary(min_size=1, max_size=1), max_size=4))
    def first(self, names: list[bytes]) -> None:
        expected = next(((index, name) for index, name in enumerate(names) if name in self.model), None)
        found = self.store.first(names)
        if expected is None:
            assert found is None
        else:
            assert found == (expected[0], array("I", self.model[expected[1]]))
            self.model.move_to_end(expected[1])

    @invariant()
    def agrees(self) -> None:
        self.store.check_integrity()
        assert (len(self.store), self.store.num_bytes) == (len(self.model), self.cost())

    def cost(self) -> int:
        return sum(ENTRY_BYTES + 4 * len(token_ids) for token_ids in self.model.values())


TestStore = StoreMachine.TestCase
