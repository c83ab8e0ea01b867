"""Every token once and in order, whatever is repeated, reordered, or sent by earlier attempts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.answers.continuations import MAX_BYTES, BegunAnswer, packed
from raydix.engine.core.errors import ModelFailedError, RequestError
from raydix.engine.core.ingress.dispatch import Outbox
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.types import (
    Admission,
    CacheHints,
    DraftSource,
    DraftUse,
    FinishReason,
    Salt,
    Sampling,
    Stage,
    TokenEvent,
)

ANSWER = [7, 7, 8, 9, 7]


def make_generation(prefill: str = "p", decode: str = "d") -> Generation:
    generation = Generation("r", (1, 2, 3), Sampling(max_tokens=len(ANSWER)), Salt(), CacheHints("anonymous"))
    generation.place(admission(prefill, decode), block_size=4, now=0.0)
    return generation


def admission(prefill: str, decode: str, attempt: int = 0) -> Admission:
    return Admission("r", attempt, prefill, decode, 1, 1, (b"a", b"b"), ())


def event(position: int, attempt: int = 0) -> TokenEvent:
    finish = FinishReason.LENGTH if position == len(ANSWER) - 1 else None
    return TokenEvent("r", attempt, position, ANSWER[position], finish, None, 10 * attempt + 2)


def error(attempt: int = 0) -> TokenEvent:
    return TokenEvent("r", attempt, 0, None, FinishReason.ERROR, None, 0, "why")


def test_all_but_decode_workers_wait_until_one_of_them_had_time_to_compute() -> None:
    assigned = make_generation().assignments(admission("p", "d"), "ingress", 30.0)
    assert [(a.stage, a.await_timeout_s) for _, a in assigned] == [(Stage.PREFILL, 60.0), (Stage.DECODE, 30.0)]
    [(_, whole)] = make_generation("m", "m").assignments(admission("m", "m"), "ingress", 30.0)
    assert (whole.stage, whole.await_timeout_s) == (Stage.WHOLE, 60.0)


def test_a_prediction_goes_to_the_worker_that_decodes() -> None:
    generation = replace(make_generation(), prediction=(7, 8))
    assigned = generation.assignments(admission("p", "d"), "ingress", 30.0)
    assert [(a.stage, a.prediction) for _, a in assigned] == [(Stage.PREFILL, ()), (Stage.DECODE, (7, 8))]
    [(_, whole)] = generation.assignments(admission("m", "m"), "ingress", 30.0)
    assert whole.prediction == (7, 8)


def test_idle_work_is_of_the_same_tenant_and_never_takes_others_tokens_for_public_ones() -> None:
    salt, hints = Salt(b"tenant", num_public_tokens=2), CacheHints("tenant", priority=3)
    generation = Generation("r", (1, 2, 3), Sampling(max_tokens=9), salt, hints)
    assignment = generation.idle_assignment([1, 2, 9, 9], "ingress")
    assert assignment is not None and assignment.is_idle
    assert (assignment.token_ids, assignment.num_prompt_tokens, assignment.sampling.max_tokens) == ((1, 2, 9, 9), 4, 0)
    assert (assignment.salt, assignment.cache, assignment.stage) == (salt, hints, Stage.WHOLE)
    assert assignment.request_id != generation.request_id
    assert generation.idle_assignment([1, 9, 3, 9], "ingress") is None
    assert generation.idle_assignment([], "ingress") is None


POSITIONS = st.integers(0, len(ANSWER) - 1)


@given(st.lists(st.tuples(POSITIONS, st.integers(0, 1), st.booleans()), max_size=30))
def test_every_token_comes_once_and_in_order(sent: list[tuple[int, int, bool]]) -> None:
    generation = make_generation()
    delivered: list[int | None] = []
    in_order = [(position, 0, False) for position in range(len(ANSWER))]
    for position, attempts_ago, fails in sent + in_order:
        if fails and not generation.is_over:
            assert generation.start_over(1.0) == {"p", "d"}
            generation.place(admission("p", "d"), block_size=4, now=0.0)
            assert generation.token_ids == (1, 2, 3, *delivered)
        due = generation.take(event(position, generation.attempt - attempts_ago), "d")
        delivered += [token.token_id for token in due]
        assert delivered == generation.tokens == ANSWER[: len(delivered)]
    assert delivered == ANSWER
    assert generation.finished_by == "d" and generation.workers_to_abort() == {"p"}
    assert generation.take(event(0, generation.attempt), "d") == []


def test_after_a_stop_string_nothing_is_taken_and_the_workers_are_told() -> None:
    generation = make_generation()
    generation.take(event(0), "d")
    assert not generation.has_ended
    generation.is_stopped = True
    assert generation.has_ended and generation.take(event(1), "d") == []
    assert generation.workers_to_abort() == {"p", "d"} and not generation.dies_with("d")


def drafted(position: int, source: DraftSource, num_accepted: int, num_rejected: int) -> TokenEvent:
    """The last event of a step with a draft."""
    return event(position)._replace(num_accepted=num_accepted, num_rejected=num_rejected, draft_source=source)


def test_known_answers_go_to_the_worker_that_decodes() -> None:
    placed = replace(admission("p", "d"), continuations=(b"12345678",))
    assigned = make_generation().assignments(placed, "ingress", 30.0)
    assert [each.continuations for _, each in assigned] == [(), (b"12345678",)]
    [(_, whole)] = make_generation("m", "m").assignments(replace(placed, decode="p"), "ingress", 30.0)
    assert whole.continuations == (b"12345678",)


def test_an_answer_is_told_if_it_has_a_name() -> None:
    generation = replace(make_generation(), answer_name=b"n")
    assert generation.answer() is None, "before the first token"
    for position in range(3):
        generation.take(event(position), "d")
    assert generation.answer() == BegunAnswer(b"n", packed(ANSWER[:3]))
    assert replace(generation, answer_name=b"").answer() is None
    generation.tokens += [9] * 1_000
    answer = generation.answer()
    assert answer is not None and len(answer.token_ids) == MAX_BYTES
    generation.take(error(), "d")
    assert generation.answer() is None


def test_the_tokens_of_drafts_are_counted_once_and_by_source() -> None:
    generation = make_generation()
    generation.take(event(0), "d")
    generation.take(drafted(1, DraftSource.PAST, 0, 3), "d")
    generation.take(drafted(1, DraftSource.PAST, 0, 3), "d")
    generation.take(event(2), "d")
    generation.take(drafted(3, DraftSource.REQUEST, 1, 2), "d")
    generation.take(drafted(4, DraftSource.PAST, 1, 0), "d")
    assert (generation.accepted, generation.num_rejected) == ([2, 3], 5)
    uses = [DraftUse(DraftSource.PAST, 4, 1), DraftUse(DraftSource.REQUEST, 3, 1)]
    assert list(generation.drafts.values()) == uses

    outbox = Outbox()
    outbox.release(generation)
    assert outbox.ended[0].drafts == tuple(uses)
    generation.start_over(1.0)
    assert not generation.drafts and generation.accepted == [2, 3], "the next attempt has its own"


def test_an_early_event_waits_for_its_predecessors() -> None:
    generation = make_generation()
    assert generation.take(event(1), "d") == []
    assert [token.position for token in generation.take(event(0), "p")] == [0, 1]


def test_early_events_do_not_outlive_their_attempt() -> None:
    """The attempt that sent them may not have finished by them."""
    generation = make_generation()
    generation.take(event(len(ANSWER) - 1), "d")
    generation.start_over(1.0)
    for position in range(len(ANSWER) - 1):
        generation.take(event(position, 1), "d")
    assert not generation.is_over


def test_an_error_ends_the_attempt_it_belongs_to() -> None:
    generation = make_generation()
    generation.start_over(1.0)
    assert generation.take(error(0), "d") == [] and generation.failure is None
    assert generation.take(error(1), "d") == []
    assert isinstance(generation.failure, ModelFailedError) and "why" in generation.failure.message
    assert generation.failure.status == 500
    assert not generation.dies_with("d")


def test_a_refused_request_is_its_client_s_fault() -> None:
    generation = make_generation()
    assert generation.take(error(0)._replace(is_refusal=True), "d") == []
    assert isinstance(generation.failure, RequestError) and "why" in generation.failure.message


def test_what_the_first_attempt_found_is_what_counts() -> None:
    generation = make_generation()
    generation.take(event(0), "p")
    generation.start_over(1.0)
    generation.place(admission("p", "d", 1), block_size=16, now=0.0)
    generation.take(event(1, 1), "p")
    assert (generation.cached_tokens, generation.imported_tokens) == (2, 8)


@pytest.mark.parametrize(
    ("lost", "num_tokens", "dies", "loses_kv"),
    [
        ("d", 0, True, False),
        ("d", 1, True, False),
        ("p", 0, True, True),
        ("p", 1, False, True),
        ("x", 0, False, False),
    ],
)
def test_who_is_needed(lost: str, num_tokens: int, dies: bool, loses_kv: bool) -> None:
    generation = make_generation()
    for position in range(num_tokens):
        generation.take(event(position), "p")
    assert generation.dies_with(lost) == dies
    assert generation.loses_kv_with(lost) == loses_kv
    assert generation.awaits_prefill == (num_tokens == 0)


def test_a_request_that_is_not_split_awaits_nobody() -> None:
    assert not make_generation("m", "m").awaits_prefill
    assert not Generation("r", (1,), Sampling(max_tokens=1), Salt(), CacheHints("anonymous")).awaits_prefill
