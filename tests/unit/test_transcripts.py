"""Answers' own ids take their places in prompts; the store tells nobody else of them and keeps within its bytes."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raydix.engine.core.answers.transcripts import (
    EncodedText,
    first_difference,
    num_shown,
    transcript_name,
    with_answers,
)
from raydix.engine.core.hashing import root_hash
from raydix.engine.core.memory.transcript_store import ENTRY_BYTES, TranscriptStore
from raydix.engine.core.tenants import salt_of

ROOT = root_hash("model")
TEXTS = ("a", "bc", "", "é", "d")
"""What each id of a toy tokenizer shows; the third shows nothing."""


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids)


def test_answers_take_the_places_of_the_special_tokens_that_stand_for_them() -> None:
    chat = EncodedText("<a><b><c>", [1, 7, 2, 8, 3, 9], [(0, 0), (3, 2), (6, 4)])
    assert with_answers(chat, {}) == chat
    replaced = with_answers(replace(chat, places={3: 5, 6: 1}), {5: [50, 51, 52], 1: []})
    assert replaced.token_ids == [1, 7, 50, 51, 52, 8, 9]
    assert replaced.borders == [(0, 0)] and not replaced.places
    assert with_answers(replace(chat, places={0: 0}), {0: [5]}).borders == [(3, 2), (6, 4)]


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(0, 12))
def test_shown_ids_are_the_most_that_the_text_wholly_has(token_ids: list[int], length: int) -> None:
    text = text_of(token_ids)[:length]
    count = num_shown(token_ids, text, text_of)
    assert count is not None
    assert text.startswith(text_of(token_ids[:count]))
    assert not count or token_ids[count - 1] != 2, "what shows nothing at the end does not count"
    longer = next((n for n in range(count + 1, len(token_ids) + 1) if token_ids[n - 1] != 2), None)
    assert longer is None or len(text_of(token_ids[:longer])) > len(text)


def bytes_of(token_ids: Sequence[int]) -> str:
    """The text of bytes; 256 shows nothing, wherever it stands."""
    return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", "replace")


def one_by_one(token_ids: list[int], text: str) -> int:
    """What `num_shown` is, by looking at every beginning."""
    low = max(n for n in range(len(token_ids) + 1) if len(bytes_of(token_ids[:n])) <= len(text))
    while low and not text.startswith(bytes_of(token_ids[:low])):
        low -= 1
    while (
        low and not bytes_of(token_ids[low - 1 : low]) and bytes_of(token_ids[: low - 1]) == bytes_of(token_ids[:low])
    ):
        low -= 1
    return low


@given(st.lists(st.sampled_from([97, *"é🌊".encode(), 256]), max_size=12), st.integers(0, 12))
def test_half_characters_and_what_shows_nothing_may_alternate(token_ids: list[int], length: int) -> None:
    text = bytes_of(token_ids)[:length]
    assert num_shown(token_ids, text, bytes_of) == one_by_one(token_ids, text)


@pytest.mark.parametrize("start", [[97], [97, 0xF0, 0x9F]])
def test_many_tokens_that_show_nothing_are_not_gone_through_once_for_each(start: list[int]) -> None:
    num_looked_at = 0

    def counted(token_ids: Sequence[int]) -> str:
        nonlocal num_looked_at
        num_looked_at += len(token_ids)
        return "".join(["a" * token_ids.count(97), "🌊b" if 1 in token_ids else "?" if 0xF0 in token_ids else ""])

    token_ids = [*start, *[256] * 2000, 1]
    assert num_shown(token_ids, "a🌊" if len(start) > 1 else "a", counted) == 1
    assert num_looked_at < 60 * len(token_ids)


def test_another_text_than_that_of_the_ids_has_none() -> None:
    assert num_shown([0, 1], "ab", text_of) == 1
    assert num_shown([0, 1], "abcd", text_of) is None
    assert num_shown([0, 1], "x", text_of) is None
    assert num_shown([], "", text_of) == 0


def test_half_characters_are_shown_as_such() -> None:
    def replaced(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    wave = [97, *"🌊".encode(), 98]
    assert num_shown(wave, "a🌊b", replaced) == 6
    assert num_shown(wave, "a🌊", replaced) == 5
    assert num_shown(wave, "a", replaced) == 1
    assert num_shown(wave[:3], "a\N{REPLACEMENT CHARACTER}", replaced) == 3


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4, 5]) == 2
    assert first_difference([1, 2], [1, 2, 3]) is None
    assert first_difference([], [1]) is None


def test_others_come_to_another_name() -> None:
    names = [
        transcript_name("r", ROOT, salt_of("alice", None).private),
        transcript_name("r", ROOT, salt_of("bob", None).private),
        transcript_name("r", ROOT, salt_of("alice", "salt").private),
        transcript_name("r", root_hash("other"), salt_of("alice", None).private),
        transcript_name("s", ROOT, salt_of("alice", None).private),
        transcript_name("", ROOT, salt_of("alice", None).private + b"r"),
    ]
    assert len(set(names)) == len(names)
    assert transcript_name("r", ROOT, salt_of("alice", None).private) == names[0]


@pytest.mark.parametrize("budget", [0, ENTRY_BYTES, ENTRY_BYTES + 7])
def test_what_exceeds_the_budget_alone_is_not_kept_and_costs_nobody_a_place(budget: int) -> None:
    store = TranscriptStore(budget)
    fits = budget >= ENTRY_BYTES
    assert store.keep(b"empty", array("I")) == fits
    assert not store.keep(b"name", array("I", [1, 2]))
    assert store.find(b"name") is None and (store.find(b"empty") is not None) == fits
    store.check_integrity()


class StoreMachine(RuleBasedStateMachine):
    """A store for a few entries, beside a dictionary in order of use."""

    BUDGET = 4 * ENTRY_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.store = TranscriptStore(self.BUDGET)
        self.model: OrderedDict[bytes, list[int]] = OrderedDict()
        self.num_kept = 0

    @rule(num_tokens=st.integers(0, 450))
    def keep(self, num_tokens: int) -> None:
        token_ids = list(range(num_tokens))
        name = bytes([self.num_kept % 256])
        self.num_kept += 1
        if name in self.model:
            return
        is_kept = self.store.keep(name, array("I", token_ids))
        assert is_kept == (ENTRY_BYTES + 4 * num_tokens <= self.BUDGET)
        if is_kept:
            self.model[name] = token_ids
        while self.cost() > self.BUDGET:
            self.model.popitem(last=False)

    @rule(number=st.integers(0, 60))
    def find(self, number: int) -> None:
        name = bytes([number])
        found = self.store.find(name)
        if name not in self.model:
            assert found is None
        else:
            assert found == array("I", self.model[name])
            self.model.move_to_end(name)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @invariant()
    def agrees(self) -> None:
        self.store.check_integrity()
        assert (len(self.store), self.store.num_bytes) == (len(self.model), self.cost())

    def cost(self) -> int:
        return sum(ENTRY_BYTES + 4 * len(token_ids) for token_ids in self.model.values())


TestStore = pytest.mark.no_cover(StoreMachine.TestCase)
