"""Answers by the place where they began: bounded, counted, never of another salt, and told once."""

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raydix.engine.core.answers.continuations import MAX_BYTES, BegunAnswer, packed, unpacked
from raydix.engine.core.hashing import BlockChain
from raydix.engine.core.memory.answer_store import MAX_VARIANTS, NAME_BYTES, VARIANT_BYTES, AnswerStore
from raydix.engine.core.types import Admission, AdmitRequest, Ended, Salt
from tests.unit.builders import ROOT

A, B, C = [1, 2, 3, 4], [1, 2, 9], [7]


def store_of(*answers: list[int], budget_bytes: int = 10_000) -> AnswerStore:
    store = AnswerStore(budget_bytes)
    for answer in answers:
        store.keep(b"q", packed(answer))
        store.check_integrity()
    return store


def found(store: AnswerStore, name: bytes = b"q") -> list[list[int]]:
    return [list(unpacked(each)) for each in store.continuations(name)]


def test_the_answers_of_a_place_are_found_the_likeliest_last() -> None:
    assert found(store_of(A)) == [A] and found(store_of(A), b"other") == []
    assert found(store_of(A, B)) == [A, B], "the last one"
    assert found(store_of(A, B, A)) == [B, A], "the more frequent one"
    assert found(store_of(A, B, A, B)) == [A, B]
    assert found(store_of()) == found(store_of([])) == [] and len(store_of([])) == 0


def test_the_beginning_of_a_known_answer_counts_as_that_answer() -> None:
    assert found(store_of(A, A[:2], B)) == [B, A]
    assert found(store_of(A[:3], B, A)) == [B, A], "the longer one is kept, and is the more frequent one"


def test_of_too_many_different_answers_the_least_likely_goes() -> None:
    answers = [[10 + number] for number in range(MAX_VARIANTS)]
    store = store_of(*answers, answers[0])
    assert found(store) == [*answers[1:], answers[0]]
    store.keep(b"q", packed(B))
    assert found(store) == [*answers[2:], B, answers[0]]
    store.check_integrity()


@pytest.mark.parametrize("num_others", range(MAX_VARIANTS))
def test_an_admission_has_room_for_so_much_and_the_likeliest_gets_most(num_others: int) -> None:
    long = [[number] * 1_000 for number in range(num_others + 1)]
    continuations = store_of(*long, long[-1], long[-1]).continuations(b"q")
    assert sum(map(len, continuations)) == MAX_BYTES == max(map(len, store_of(long[0]).continuations(b"q")))
    assert [set(unpacked(each)) for each in continuations] == [{number} for number in range(num_others + 1)]
    assert len(continuations[-1]) == max(map(len, continuations)) and all(len(each) % 4 == 0 for each in continuations)
    short = store_of(*long, C, C, C, budget_bytes=20_000).continuations(b"q")
    assert list(unpacked(short[-1])) == C


def test_what_was_used_least_recently_goes_first() -> None:
    cost = NAME_BYTES + VARIANT_BYTES + 4
    store = AnswerStore(3 * cost)
    for name in (b"1", b"2", b"3"):
        store.keep(name, packed(C))
    assert found(store, b"1") == [C]
    store.keep(b"4", packed(C))
    assert [bool(found(store, name)) for name in (b"1", b"2", b"3", b"4")] == [True, False, True, True]
    store.keep(b"3", packed(C))
    store.keep(b"5", packed(B))
    store.check_integrity()
    assert [len(found(store, name)) for name in (b"1", b"3", b"4", b"5")] == [0, 1, 0, 1]
    assert len(store) == 2 and store.num_bytes <= 3 * cost
    store.clear()
    store.check_integrity()
    assert len(store) == 0 == store.num_bytes and not found(store, b"3")


def test_no_answer_of_another_salt_has_the_same_name() -> None:
    """Nor one to another prompt, wherever the prompts end: at a block's edge, inside one, inside the public prefix."""
    for num_public in (0, 8):
        names, blocks = list[bytes](), set[bytes]()
        for private in (b"", b"mine", b"others"):
            chain = BlockChain(ROOT, Salt(private, num_public), 4)
            for end in range(1, 20):
                prompt = range(end)
                hashes = chain.hashes(prompt)
                names.append(chain.answer_name(hashes, prompt))
                blocks.update(hashes, [chain.partial(hashes, len(hashes), prompt[len(hashes) * 4 :])])
        assert len(set(names)) == len(names) and not blocks.intersection(names)


def test_messages_carry_answers_unchanged() -> None:
    token_ids = [0, 49_151, 2**32 - 1]
    continuations = (packed(token_ids), packed(C))
    admission = Admission("r", 0, "p", "d", 1, 1, (), (), continuations)
    request = AdmitRequest("r", 0, (), 9, answer_name=b"n")
    ended = Ended("r", answer=BegunAnswer(b"n", packed(token_ids)))
    for message in (admission, request, ended):
        assert pickle.loads(pickle.dumps(message)) == message
    assert [list(unpacked(each)) for each in continuations] == [token_ids, C]
    assert len(pickle.dumps(store_of([70_000] * 999).continuations(b"q"))) < 1_024


class AnswersMachine(RuleBasedStateMachine):
    """A store beside a dictionary of everything that it was told."""

    @initialize(budget_bytes=st.sampled_from([0, 600, 3_000, 1 << 20]))
    def build(self, budget_bytes: int) -> None:
        self.store = AnswerStore(budget_bytes)
        self.told: dict[bytes, list[bytes]] = {}
        self.is_roomy = budget_bytes == 1 << 20

    @rule(name=st.sampled_from([b"1", b"2", b"3", b"4"]), answer=st.lists(st.integers(0, 2), max_size=300))
    def keep(self, name: bytes, answer: list[int]) -> None:
        self.store.keep(name, packed(answer))
        self.told.setdefault(name, []).append(packed(answer))
        if self.is_roomy and answer:
            assert any(each.startswith(packed(answer)) for each in self.whole(name)), "the last one is kept"

    @rule(name=st.sampled_from([b"1", b"2", b"3", b"4", b"5"]))
    def find(self, name: bytes) -> None:
        continuations = self.store.continuations(name)
        assert sum(map(len, continuations)) <= MAX_BYTES and len(continuations) <= MAX_VARIANTS
        for each in continuations:
            assert each and any(told.startswith(each) for told in self.told[name]), "of another place"
        assert not self.is_roomy or bool(continuations) == any(self.told.get(name, ()))

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.told.clear()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()

    def whole(self, name: bytes) -> list[bytes]:
        return [variant.token_ids for variant in self.store._answers[name]]


TestAnswers = AnswersMachine.TestCase
TestAnswers.settings = settings(max_examples=50, stateful_step_count=30)
