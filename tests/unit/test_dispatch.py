"""The decisions of an ingress replica's data plane, event by event."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import pytest

from raydix.engine.core.answers.continuations import BegunAnswer, packed
from raydix.engine.core.errors import LateError, NoWorkerError, ServiceError
from raydix.engine.core.ingress.cluster_view import ModelFacts, Timeouts
from raydix.engine.core.ingress.dispatch import MAX_ATTEMPTS, Dispatch
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.instructions import (
    Abort,
    Admit,
    AskAgain,
    AskWorkers,
    AttemptLost,
    DeliverTokens,
    FailedOver,
    Follow,
    Instruction,
    ModelDiffers,
    MovedOn,
    Ping,
    Read,
    Settle,
    StartWorker,
    StopAwaiting,
    Submit,
    WorkerSilent,
)
from raydix.engine.core.manager.turns import SILENT_S
from raydix.engine.core.objectives import LATE_PRIORITY, Late
from raydix.engine.core.signs_of_life import COMPUTING_S
from raydix.engine.core.types import (
    Admission,
    AttemptName,
    AttemptOver,
    CacheHints,
    Ended,
    FinishReason,
    Membership,
    Paused,
    PromptEvent,
    Role,
    Salt,
    Sampling,
    Stage,
    TokenEvent,
    TokenLogprobs,
    WorkerInfo,
)
from tests.unit.builders import FINGERPRINT

T = TypeVar("T")

P, D = WorkerInfo("p", Role.PREFILL, 1), WorkerInfo("d", Role.DECODE, 1)
EIGHT_TOKENS = Sampling(8)
SCORES = (TokenLogprobs(-1.0, (), ()),) * 2
TIMEOUTS = Timeouts(retry_s=1.0, dispatch_s=30.0)


def of_type(instructions: Iterable[Instruction], kind: type[T]) -> list[T]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def make_dispatch(*workers: WorkerInfo) -> Dispatch:
    """A machine that knows these workers."""
    facts = ModelFacts(FINGERPRINT.rpartition("/")[0], block_size=4, await_timeout_s=30.0)
    dispatch = Dispatch("i", facts, now=0.0, timeouts=TIMEOUTS)
    if workers:
        assert dispatch.membership(Membership(workers, 0, FINGERPRINT), now=0.0) == []
    return dispatch


def make_generation(request_id: str = "r", priority: int = 0, sampling: Sampling = EIGHT_TOKENS) -> Generation:
    return Generation(request_id, tuple(range(9)), sampling, Salt(), CacheHints(), priority=priority)


def admission_of(
    attempt: int = 0, prefill: str = "p", decode: str = "d", epoch: int = 1, request_id: str = "r"
) -> Admission:
    return Admission(
        request_id,
        attempt,
        prefill=prefill,
        decode=decode,
        prefill_epoch=epoch,
        decode_epoch=epoch,
        prefill_awaited=(),
        decode_awaited=(),
    )


def token(position: int, attempt: int = 0, *, ends: bool = False) -> TokenEvent:
    return TokenEvent("r", attempt, position, 100 + position, FinishReason.LENGTH if ends else None, None, 0)


def submitted(dispatch: Dispatch, sampling: Sampling = EIGHT_TOKENS) -> Generation:
    """Run a request up to its submission to `p` and `d`."""
    generation = make_generation(sampling=sampling)
    assert len(of_type(dispatch.begin(generation, 1.0), Admit)) == 1
    assert dispatch.admitted("r", 0, admission_of(), 1.0) == [Follow("p", 1), Follow("d", 1)]
    assert dispatch.found("p", 1, 1.0) == [Read("p", 1)]
    assert dispatch.flush(has_manager=True) == [], "nothing is submitted before both are followed"
    assert dispatch.found("d", 1, 1.0) == [Read("d", 1)]
    submits = of_type(dispatch.flush(has_manager=True), Submit)
    assert {each.worker_id: each.assignments[0].stage for each in submits} == {"p": Stage.PREFILL, "d": Stage.DECODE}
    return generation


def test_a_request_from_its_admission_to_its_last_token() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    assert dispatch.tokens("p", [token(0)], 2.5) == [DeliverTokens("r", [token(0)])]
    [settle] = dispatch.flush(has_manager=True)
    assert isinstance(settle, Settle)
    assert [(first.request_id, first.ttft_s) for first in settle.first_tokens] == [("r", 1.5)]
    assert dispatch.tokens("d", [token(1, ends=True)], 3.0) == [DeliverTokens("r", [token(1, ends=True)])]
    assert dispatch.end("r") == [Abort("p", "r", 0, has_ended=True)]
    [settle] = dispatch.flush(has_manager=True)
    assert isinstance(settle, Settle)
    assert [(ended.request_id, ended.how) for ended in settle.ended] == [("r", "finished")]
    assert list(dispatch.entries) == []
    dispatch.check_integrity()


def test_a_request_is_admitted_again_until_a_worker_comes() -> None:
    dispatch = make_dispatch(P, D)
    dispatch.begin(make_generation(), 1.0)
    assert dispatch.admitted("r", 0, None, 1.0) == []
    assert dispatch.retries.next_at == 2.0
    assert dispatch.tick(1.5) == []
    assert len(of_type(dispatch.tick(2.0), Admit)) == 1
    assert dispatch.retries.next_at is None
    assert dispatch.admitted("r", 0, admission_of(), 2.0) == [Follow("p", 1), Follow("d", 1)]
    dispatch.check_integrity()


def test_waiting_requests_are_admitted_by_priority_and_then_by_age() -> None:
    dispatch = make_dispatch(P, D)
    asked = {
        "late": (7, 0.0),
        "first": (1, 0.1),
        "usual": (5, 0.2),
        "second": (1, 0.3),
        "again": (5, 0.4),
        "last": (9, 0.5),
    }
    for name, (priority, now) in asked.items():
        dispatch.begin(make_generation(name, priority), now)
        dispatch.admitted(name, 0, None, now)
    admitted = [admit.request.request_id for admit in of_type(dispatch.tick(1.0), Admit)]
    assert admitted == ["first", "second", "usual", "again", "late"], "none waits behind one that goes later"
    dispatch.check_integrity()

    for name in admitted:
        dispatch.admitted(name, 0, admission_of(request_id=name), 1.0)
    dispatch.found("p", 1, 1.1)
    dispatch.found("d", 1, 1.1)
    submits = of_type(dispatch.flush(has_manager=True), Submit)
    for submit in submits:
        assert [assignment.request_id for assignment in submit.assignments] == admitted


def test_a_request_has_the_first_worker_started_and_waits_for_it() -> None:
    dispatch = make_dispatch(P, D)
    asleep = Membership((), 0, None, starts_on_demand=True)
    assert of_type(dispatch.membership(asleep, 1.0), StartWorker) == [], "nobody asks"
    assert dispatch.view.can_serve
    generation = make_generation()
    dispatch.begin(generation, 1.0)
    dispatch.admitted("r", 0, None, 1.0)
    for now in range(2, 90):
        assert len(of_type(dispatch.membership(asleep, now), StartWorker)) == 1
        assert of_type(dispatch.membership(replace(asleep, num_starting=1), now), StartWorker) == []
        dispatch.admitted("r", 0, None, now)
        dispatch.tick(now + 1.0)
    assert generation.failure is None
    assert of_type(dispatch.membership(replace(asleep, workers=(P, D)), 90.0), StartWorker) == []


@pytest.mark.parametrize("num_starting", [0, 1])
def test_a_request_waits_as_long_as_a_worker_is_starting(num_starting: int) -> None:
    dispatch = make_dispatch(P, D)
    generation = make_generation()
    dispatch.begin(generation, 0.0)
    for now in range(1, 40):
        dispatch.membership(Membership((), num_starting, None), now)
        dispatch.admitted("r", 0, None, now)
        dispatch.tick(now + 1.0)
    assert isinstance(generation.failure, NoWorkerError) is (num_starting == 0)


def test_a_start_that_a_lost_manager_told_of_is_waited_for_no_longer() -> None:
    """The manager does not come back: its last word, that a worker was starting, is no sign any more."""
    dispatch = make_dispatch(P, D)
    dispatch.membership(Membership((), 1, None), 0.0)
    for worker in (P, D):
        dispatch.not_found(worker.worker_id, worker.epoch, 0.0)  # died with the manager
    generation = make_generation()
    dispatch.begin(generation, 0.0)
    dispatch.admitted("r", 0, None, 0.0)
    now = 0.0
    while generation.failure is None and now < TIMEOUTS.manager_gone_s + 3 * TIMEOUTS.dispatch_s:
        now += TIMEOUTS.retry_s
        dispatch.view.no_update()
        asked = [admit.request for admit in of_type(dispatch.tick(now), Admit)]
        dispatch.not_admitted(asked, now, is_silent=False)
    assert isinstance(generation.failure, NoWorkerError)
    assert now > TIMEOUTS.manager_gone_s, "another manager may know more"


def paused(num_ahead: int = 0) -> Paused:
    return Paused(num_ahead, num_placed=2, num_blocks=3, paused_s=0.0)


def test_a_paused_request_asks_again_by_its_id_until_its_turn() -> None:
    """Longer than a request waits for a worker, and its blocks are named once more at the end only."""
    dispatch = make_dispatch(D)
    generation = make_generation()
    [first] = of_type(dispatch.begin(generation, 0.0), Admit)
    assert dispatch.admitted("r", 0, paused(), 0.0) == []
    now = 0.0
    while now < 2 * TIMEOUTS.dispatch_s:
        assert generation.paused is not None and dispatch.retries.next_at == now + TIMEOUTS.pause_s
        now += TIMEOUTS.pause_s
        assert dispatch.tick(now) == [AskAgain("r")] and dispatch.retries.next_at is None
        assert dispatch.asked_again({"r": paused()}, now) == []
        dispatch.check_integrity()
    now += TIMEOUTS.pause_s
    assert dispatch.tick(now) == [AskAgain("r")]
    [last] = of_type(dispatch.asked_again({"r": None}, now), Admit)
    assert last == first and last.request.hashes
    dispatch.admitted("r", 0, admission_of(prefill="d"), now)
    assert generation.paused is None and generation.failure is None


@pytest.mark.parametrize(("num_ahead", "pause_s"), [(0, 0.25), (3, 1.0), (7, 2.0), (1000, 2.0)])
def test_a_paused_request_asks_the_more_seldom_the_more_sessions_go_before(num_ahead: int, pause_s: float) -> None:
    dispatch = make_dispatch(D)
    dispatch.begin(make_generation(), 0.0)
    dispatch.admitted("r", 0, paused(num_ahead), 10.0)
    assert dispatch.retries.next_at == 10.0 + pause_s < 10.0 + SILENT_S / 2


def test_a_paused_request_whose_client_leaves_asks_no_more() -> None:
    dispatch = make_dispatch(D)
    dispatch.begin(make_generation(), 0.0)
    dispatch.admitted("r", 0, paused(), 0.0)
    assert dispatch.tick(0.25) == [AskAgain("r")]
    dispatch.end("r")
    assert [each.request_id for each in of_type(dispatch.flush(has_manager=True), Settle)[0].ended] == ["r"]
    assert dispatch.asked_again({"r": paused()}, 0.5) == dispatch.asked_again({"r": None}, 0.5) == []
    assert dispatch.retries.next_at is None and list(dispatch.entries) == []


def test_a_paused_request_goes_on_without_the_manager() -> None:
    dispatch = make_dispatch(D)
    generation = make_generation()
    dispatch.begin(generation, 0.0)
    dispatch.admitted("r", 0, paused(), 0.0)
    assert dispatch.tick(0.25) == [AskAgain("r")]
    [admit] = of_type(dispatch.asked_again({"r": None}, 2.25), Admit)
    assert of_type(dispatch.not_admitted([admit.request], 2.25, is_silent=True), Follow)
    assert generation.paused is None


def test_a_late_request_fails_with_the_time_to_wait() -> None:
    dispatch = make_dispatch(P, D)
    generation = make_generation()
    dispatch.begin(generation, 0.0)
    dispatch.admitted("r", 0, Late(predicted_s=3.2, objective_s=0.5), 1.0)
    error = generation.failure
    assert isinstance(error, LateError) and (error.status, error.retry_after_s) == (429, 3)
    assert str(error) == "The first token would come after 3,200 ms, later than the objective of 500 ms."


@pytest.mark.parametrize(("own", "last"), [(-3, LATE_PRIORITY), (LATE_PRIORITY + 1, LATE_PRIORITY + 1)])
def test_a_late_request_gives_way_from_its_admission_on(own: int, last: int) -> None:
    dispatch = make_dispatch(P, D)
    [admit] = of_type(dispatch.begin(make_generation(priority=own), 0.0), Admit)
    assert admit.request.priority == own
    dispatch.admitted("r", 0, replace(admission_of(), gives_way=True), 1.0)
    for name in ("p", "d"):
        dispatch.found(name, 1, 1.0)
    submits = of_type(dispatch.flush(has_manager=True), Submit)
    assert [assignment.priority for each in submits for assignment in each.assignments] == [last, last]
    [again] = of_type(dispatch.worker_lost("d", 1, "dead", 2.0, is_dead=True), Admit)
    assert again.request.priority == last


def test_before_any_worker_is_known_the_manager_is_asked() -> None:
    dispatch = make_dispatch()
    assert dispatch.begin(make_generation(), 0.0) == [AskWorkers()]
    assert not dispatch.view.can_serve
    dispatch.membership(Membership((P, D), 0, FINGERPRINT), 0.5)
    assert dispatch.view.can_serve
    assert len(of_type(dispatch.tick(1.0), Admit)) == 1


def test_without_the_manager_a_request_goes_whole_to_a_decode_worker() -> None:
    dispatch = make_dispatch(P, D)
    [admit] = of_type(dispatch.begin(make_generation(), 1.0), Admit)
    assert dispatch.not_admitted([admit.request], 1.0, is_silent=False) == [Follow("d", 1)]
    dispatch.found("d", 1, 1.0)
    [submit] = dispatch.flush(has_manager=False)
    assert isinstance(submit, Submit)
    assert submit.assignments[0].stage is Stage.WHOLE


def test_a_silent_manager_hears_later_that_its_admission_is_not_used() -> None:
    dispatch = make_dispatch(P, D)
    [admit] = of_type(dispatch.begin(make_generation(), 1.0), Admit)
    dispatch.not_admitted([admit.request], 1.0, is_silent=True)
    [settle] = of_type(dispatch.flush(has_manager=True), Settle)
    assert [(ended.request_id, ended.attempt) for ended in settle.ended] == [("r", 0)]
    dispatch.outbox.not_settled(settle.ended)
    assert of_type(dispatch.flush(has_manager=True), Settle) == [Settle([], settle.ended)]


def naming_dispatch() -> Dispatch:
    """A machine of a cluster whose manager keeps answers."""
    facts = ModelFacts(FINGERPRINT.rpartition("/")[0], block_size=4, await_timeout_s=30.0, names_answers=True)
    dispatch = Dispatch("i", facts, now=0.0, timeouts=TIMEOUTS)
    dispatch.membership(Membership((P, D), 0, FINGERPRINT), now=0.0)
    return dispatch


def ends_of(dispatch: Dispatch) -> list[Ended]:
    return [each for settle in of_type(dispatch.flush(has_manager=True), Settle) for each in settle.ended]


def test_each_answer_is_told_once_whatever_is_tried_again() -> None:
    dispatch = naming_dispatch()
    generation = submitted(dispatch)
    name = generation.answer_name
    dispatch.tokens("p", [token(0)], 2.0)
    dispatch.tokens("d", [token(1)], 2.0)
    [again] = of_type(dispatch.worker_lost("d", 1, "died", 3.0, is_dead=True), Admit)
    assert again.request.answer_name == name != b"" and again.request.num_tokens == 9 + 2
    dispatch.admitted("r", 1, admission_of(attempt=1, epoch=2), 3.0)
    dispatch.not_found("d", 2, 3.0)
    [given_up] = ends_of(dispatch)
    assert given_up.attempt == 1 and given_up.answer is None

    dispatch.end("r")
    ended = ends_of(dispatch)
    assert [each.answer for each in ended] == [BegunAnswer(name, packed([100, 101]))]
    dispatch.outbox.not_settled(ended)
    assert [each.answer for each in ends_of(dispatch)] == [None], "the manager may have heard of it"


def test_an_admission_that_is_given_up_tells_of_no_answer() -> None:
    dispatch = naming_dispatch()
    submitted(dispatch)
    dispatch.end("r")
    assert [each.answer for each in ends_of(dispatch)] == [None], "before its first token"


@pytest.mark.parametrize(
    ("names_answers", "sampling"),
    [(False, Sampling(8)), (True, Sampling(8, speculation=False)), (True, Sampling(0))],
)
def test_an_answer_that_nobody_may_draft_from_has_no_name(names_answers: bool, sampling: Sampling) -> None:
    dispatch = naming_dispatch() if names_answers else make_dispatch(P, D)
    generation = make_generation()
    generation.sampling = sampling
    [admit] = of_type(dispatch.begin(generation, 1.0), Admit)
    assert admit.request.answer_name == b""
    dispatch.admitted("r", 0, None, 1.0)
    generation.tokens.append(1)
    dispatch.end("r")
    assert [each.answer for each in ends_of(dispatch)] == [None]


def test_an_admitted_worker_that_is_not_there_costs_no_attempt() -> None:
    dispatch = make_dispatch(P, D)
    generation = make_generation()
    dispatch.begin(generation, 1.0)
    dispatch.admitted("r", 0, admission_of(), 1.0)
    dispatch.not_found("d", 1, 1.1)
    assert dispatch.retries.next_at == 2.1
    assert generation.attempt == 0
    dispatch.found("p", 1, 1.2)
    assert of_type(dispatch.flush(has_manager=True), Submit) == []
    dispatch.check_integrity()


def test_when_the_decode_worker_dies_the_request_goes_on_from_its_last_token() -> None:
    dispatch = make_dispatch(P, D)
    generation = submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    instructions = dispatch.worker_lost("d", 1, "died", 3.0, is_dead=True)
    assert of_type(instructions, Abort) == [Abort("p", "r", 0)]
    assert of_type(instructions, FailedOver) == [FailedOver("r", 1, ["d", "p"], 1)]
    [admit] = of_type(instructions, Admit)
    assert (admit.request.attempt, admit.request.num_tokens) == (1, 10)
    assert dispatch.admitted("r", 1, admission_of(1, epoch=1), 3.0) == [], "the dead incarnation is not looked for"
    assert dispatch.retries.next_at == 4.0
    assert dispatch.tokens("p", [token(1, attempt=0)], 3.5) == [], "an event of an older attempt"
    assert generation.tokens == [100]


def test_when_the_prefill_worker_dies_after_the_first_token_the_decode_worker_computes() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    instructions = dispatch.worker_lost("p", 1, "died", 3.0, is_dead=True)
    assert of_type(instructions, StopAwaiting) == [StopAwaiting("d", "r")]
    assert of_type(instructions, Admit) == []


def test_a_newer_incarnation_takes_the_older_ones_requests_away() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    instructions = dispatch.found("d", 2, 3.0)
    assert of_type(instructions, FailedOver)
    assert instructions[-1] == Read("d", 2)
    assert dispatch.worker_lost("d", 1, "died", 3.1, is_dead=True) == [], "the old stream ends later"


def test_a_request_under_which_ten_workers_died_fails() -> None:
    dispatch = make_dispatch(P, D)
    generation = submitted(dispatch)
    for attempt in range(1, MAX_ATTEMPTS):
        dispatch.worker_lost("d", attempt, "died", 3.0, is_dead=True)
        dispatch.admitted("r", attempt, admission_of(attempt, prefill="d", epoch=attempt + 1), 3.0)
        dispatch.found("d", attempt + 1, 3.0)
    assert generation.failure is None
    instructions = dispatch.worker_lost("d", MAX_ATTEMPTS, "died", 3.0, is_dead=True)
    assert of_type(instructions, DeliverTokens) == [DeliverTokens("r", [])]
    assert isinstance(generation.failure, ServiceError)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_request_that_goes_on_elsewhere_waits_anew(is_moved: bool) -> None:
    dispatch = make_dispatch(P, D)
    generation = submitted(dispatch)
    if is_moved:
        others = (P, D, WorkerInfo("d2", Role.DECODE, 1))
        dispatch.membership(Membership(others, 0, FINGERPRINT, leaving=frozenset({"d"})), 100.0)
    else:
        dispatch.worker_lost("d", 1, "died", 100.0, is_dead=True)
    assert generation.attempt == 1
    dispatch.admitted("r", 1, None, 100.0)
    while (now := dispatch.retries.next_at) is not None:
        assert now <= 130.0
        dispatch.tick(now)
        if generation.failure is None:
            assert now < 130.0
            dispatch.admitted("r", 1, None, now)
    assert isinstance(generation.failure, NoWorkerError) and generation.failure.retry_after_s == 5
    assert dispatch.tick(200.0) == [], "a request that has failed is not tried again"


def test_assignments_that_were_not_taken_fail_over_once() -> None:
    dispatch = make_dispatch(P, D)
    generation = make_generation()
    dispatch.begin(generation, 1.0)
    dispatch.admitted("r", 0, admission_of(), 1.0)
    dispatch.found("p", 1, 1.0)
    dispatch.found("d", 1, 1.0)
    submits = of_type(dispatch.flush(has_manager=True), Submit)
    for submit in submits:
        dispatch.not_submitted(submit.assignments, 2.0)
    assert generation.attempt == 1


def test_a_request_that_ends_before_it_is_sent_is_not_sent() -> None:
    dispatch = make_dispatch(P, D)
    dispatch.begin(make_generation(), 1.0)
    dispatch.admitted("r", 0, admission_of(), 1.0)
    dispatch.found("p", 1, 1.0)
    dispatch.found("d", 1, 1.0)
    assert sorted(dispatch.end("r")) == [Abort("d", "r", 0), Abort("p", "r", 0)]
    assert of_type(dispatch.flush(has_manager=True), Submit) == []


def test_an_admission_of_a_request_that_left_is_released() -> None:
    dispatch = make_dispatch(P, D)
    dispatch.begin(make_generation(), 1.0)
    dispatch.end("r")
    dispatch.flush(has_manager=True)
    assert dispatch.admitted("r", 0, admission_of(), 1.5) == []
    [settle] = of_type(dispatch.flush(has_manager=True), Settle)
    assert [ended.request_id for ended in settle.ended] == ["r"]


def test_workers_are_told_for_which_requests_to_wait_on() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    here = [AttemptName("r", 0)]
    pings = [Ping("p", [], here, []), Ping("d", [], here, ["r"])]
    assert dispatch.keep_alive(2.0, 0.0) == [*pings, AskWorkers(is_probe=True)]
    dispatch.submitted("d", here)
    assert Ping("d", here, [], ["r"]) in dispatch.keep_alive(2.0, 0.0)
    dispatch.tokens("p", [token(0)], 2.0)
    pings = [Ping("p", [], [], []), Ping("d", here, [], [])]
    assert of_type(dispatch.keep_alive(2.0, 0.0), Ping) == pings, "the prefill worker has done its part"


def test_a_submission_that_nobody_answers_counts_as_taken_after_a_while() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    dispatch.submitted("p", [AttemptName("r", 7)])
    for worker_id in ("p", "d"):
        dispatch.view.heard(worker_id, 5.9)
    assert not any(ping.taken for ping in of_type(dispatch.keep_alive(5.9, 0.0), Ping))
    assert all(ping.taken for ping in of_type(dispatch.keep_alive(6.0, 0.0), Ping))


@pytest.mark.parametrize("worker_id", ["p", "d"])
def test_an_attempt_that_is_over_before_its_last_token_came_goes_on_elsewhere(worker_id: str) -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    assert dispatch.tokens(worker_id, [AttemptOver("r", 1), AttemptOver("other", 0)], 2.0) == []
    instructions = dispatch.tokens(worker_id, [AttemptOver("r", 0)], 2.0)
    assert instructions[:3] == [AttemptLost(worker_id, "r", 0), Abort("d", "r", 0), Abort("p", "r", 0)]
    assert [admit.request.attempt for admit in of_type(instructions, Admit)] == [1]
    assert dispatch.tokens(worker_id, [AttemptOver("r", 0)], 3.0) == [], "that is another attempt"


def test_a_prefill_worker_that_has_answered_is_not_asked_for_more() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    assert of_type(dispatch.tokens("p", [token(0), AttemptOver("r", 0)], 2.0), AttemptLost) == []


def test_an_attempt_that_has_ended_is_not_lost() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    assert of_type(dispatch.tokens("d", [token(1, ends=True), AttemptOver("r", 0)], 2.0), AttemptLost) == []


def test_a_token_that_was_lost_on_the_way_is_computed_again() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    assert dispatch.tokens("d", [token(1), token(2)], 2.0) == [], "the first token comes from the other worker"
    assert of_type(dispatch.tokens("p", [token(0)], 2.1), DeliverTokens) == [
        DeliverTokens("r", [token(0), token(1), token(2)])
    ]
    instructions = dispatch.tokens("d", [token(4)], 2.2)
    assert of_type(instructions, AttemptLost) == [AttemptLost("d", "r", 0)]
    assert [over.num_tokens for over in of_type(instructions, FailedOver)] == [3]


@pytest.mark.parametrize("event", [PromptEvent("r", 0, 5, SCORES), token(0)], ids=["scores", "token"])
def test_scores_that_were_lost_on_the_way_are_computed_again(event: PromptEvent | TokenEvent) -> None:
    dispatch = make_dispatch(P, D)
    generation = submitted(dispatch, Sampling(8, prompt_logprobs=0))
    assert dispatch.tokens("p", [PromptEvent("r", 0, 1, SCORES)], 2.0) == []
    instructions = dispatch.tokens("p", [event], 2.1)
    assert of_type(instructions, AttemptLost) == [AttemptLost("p", "r", 0)]
    assert generation.prompt_logprobs == [*SCORES] and not generation.tokens


def test_a_later_attempt_needs_its_prefill_worker_up_to_its_own_first_token() -> None:
    """The decode worker may have been handed over to, and then nobody would send that token."""
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    dispatch.worker_lost("d", 1, "died", 2.1, is_dead=True)
    dispatch.membership(Membership((P, WorkerInfo("d", Role.DECODE, 2)), 0, FINGERPRINT), 2.2)
    again = replace(admission_of(attempt=1), decode_epoch=2)
    assert dispatch.admitted("r", 1, again, 2.3) == [Follow("d", 2)]
    dispatch.found("d", 2, 2.3)
    assert Ping("d", [], [AttemptName("r", 1)], ["r"]) in dispatch.keep_alive(2.4, 0.0), "its prefill worker is alive"
    instructions = dispatch.worker_lost("p", 1, "died", 2.5, is_dead=True)
    assert [over.attempt for over in of_type(instructions, FailedOver)] == [2]


def test_a_worker_whose_stream_ended_is_avoided_for_a_while_though_nobody_calls_it_dead() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    dispatch.view.heard("p", 4.0)

    def avoided(name: str, now: float) -> tuple[str, ...]:
        [admit] = of_type(dispatch.begin(make_generation(name), now), Admit)
        return admit.request.avoided

    [again] = of_type(dispatch.worker_lost("d", 1, "unavailable", 4.0, is_dead=False), Admit)
    assert again.request.avoided == ("d",) == avoided("s", 4.1)
    dispatch.view.heard("p", 6.0)
    dispatch.leave_silent(6.0, 0.0)
    assert avoided("t", 6.1) == ("d",)
    dispatch.view.heard("p", 9.0)
    dispatch.leave_silent(9.0, 0.0)
    assert avoided("u", 9.1) == (), "the doubt has ended"


def test_a_doubted_worker_that_is_heard_is_doubted_no_longer() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    [again] = of_type(dispatch.worker_lost("d", 1, "unavailable", 4.0, is_dead=False), Admit)
    assert again.request.avoided == ("d",)
    dispatch.admitted("r", 1, admission_of(1), 4.1)
    dispatch.found("d", 1, 4.2)
    dispatch.tokens("d", [], 4.3)
    [admit] = of_type(dispatch.begin(make_generation("s"), 4.4), Admit)
    assert admit.request.avoided == ()


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "found"])
def test_a_doubt_ends_with_its_incarnation(is_listed: bool) -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    dispatch.worker_lost("d", 1, "unavailable", 4.0, is_dead=False)
    if is_listed:
        dispatch.membership(Membership((P, WorkerInfo("d", Role.DECODE, 2)), 0, FINGERPRINT), 4.5)
    else:
        dispatch.admitted("r", 1, admission_of(1, epoch=2), 4.5)
        dispatch.found("d", 2, 4.5)
    [admit] = of_type(dispatch.begin(make_generation("s"), 4.6), Admit)
    assert admit.request.avoided == ()


def test_a_request_leaves_a_silent_worker_once_the_other_one_is_doubted_no_longer() -> None:
    a, b = (WorkerInfo(name, Role.MIXED, 1) for name in "ab")
    dispatch = make_dispatch(a, b)
    for name, worker_id in (("r", "a"), ("s", "b")):
        dispatch.begin(make_generation(name), 0.0)
        dispatch.admitted(name, 0, admission_of(prefill=worker_id, decode=worker_id, request_id=name), 0.0)
        dispatch.found(worker_id, 1, 0.0)
    dispatch.flush(has_manager=True)
    dispatch.worker_lost("b", 1, "unavailable", 2.9, is_dead=False)
    for now in (3.1, 5.0, 7.8):
        assert of_type(dispatch.leave_silent(now, 0.0), FailedOver) == [], "nobody could take the request"
    instructions = dispatch.leave_silent(8.0, 0.0)
    assert [over.request_id for over in of_type(instructions, FailedOver)] == ["r"]
    assert [admit.request.avoided for admit in of_type(instructions, Admit)] == [("a",)]


def test_a_silent_worker_is_left_between_two_pings() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    dispatch.view.heard("d", 2.0)
    dispatch.view.heard("p", 4.0)
    assert dispatch.leave_silent(5.0, 0.0) == []
    instructions = dispatch.leave_silent(5.2, 0.0)
    assert of_type(instructions, WorkerSilent) == [WorkerSilent("d", 1)]
    assert of_type(instructions, Ping) == []


def test_requests_of_a_silent_worker_go_on_elsewhere() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    for now in (2.0, 3.0, 4.0):
        dispatch.view.heard("p", now)
        assert of_type(dispatch.keep_alive(now, 0.0), FailedOver) == []

    dispatch.view.heard("p", 5.0)
    instructions = dispatch.keep_alive(5.0, 0.0)
    assert of_type(instructions, WorkerSilent) == [WorkerSilent("d", 1)]
    assert Abort("d", "r", 0) in instructions, "the worker is not to compute for nobody when it goes on"
    assert [over.num_tokens for over in of_type(instructions, FailedOver)] == [1]
    assert [admit.request.avoided for admit in of_type(instructions, Admit)] == [("d",)]
    assert of_type(instructions, Ping) == [Ping("p", [], [], []), Ping("d", [], [], [])], "it may answer again"
    dispatch.view.heard("p", 6.0)
    assert of_type(dispatch.keep_alive(6.0, 0.0), WorkerSilent) == [], "said once"

    # If the request comes there again it is left there; and an answer ends the silence.
    dispatch.view.heard("p", 8.0)
    assert dispatch.admitted("r", 1, admission_of(1), 8.0) == []
    assert of_type(dispatch.keep_alive(8.1, 0.0), FailedOver) == []
    dispatch.view.heard("d", 8.2)
    assert [admit.request.avoided for admit in of_type(dispatch.begin(make_generation("s"), 8.3), Admit)] == [()]
    dispatch.check_integrity()


def test_an_admission_that_names_a_worker_fallen_silent_meanwhile_is_made_again() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    dispatch.begin(make_generation("s"), 6.0)
    dispatch.view.heard("p", 6.5)
    dispatch.keep_alive(6.5, 0.0)  # now d is silent
    [again] = dispatch.admitted("s", 0, admission_of(request_id="s"), 6.6)
    assert isinstance(again, Admit)
    assert (again.request.attempt, again.request.avoided) == (0, ("d",))

    # While another worker is looked for.
    dispatch.admitted("s", 0, admission_of(decode="d2", request_id="s"), 6.7)
    dispatch.keep_alive(12.0, 0.0)  # now p is silent
    [again] = dispatch.found("d2", 1, 12.1)[1:]
    assert isinstance(again, Admit)
    assert again.request.avoided == ("d", "p")
    assert of_type(dispatch.flush(has_manager=False), Submit) == []

    # If the manager knows no better, the request goes there all the same.
    dispatch.admitted("s", 0, admission_of(decode="d2", request_id="s"), 12.2)
    assert {each.worker_id for each in of_type(dispatch.flush(has_manager=False), Submit)} == {"p", "d2"}
    dispatch.check_integrity()


def test_a_link_that_is_gone_for_two_seconds_moves_no_request() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    instructions = list[object]()
    for now in (2.0, 3.0, 4.0):  # d is heard at 2.0 for the last time, then again at 4.1
        for worker_id in ("p", "d") if now == 2.0 else ("p",):
            dispatch.view.heard(worker_id, now)
        instructions += dispatch.keep_alive(now, 0.0)
    dispatch.view.heard("d", 4.1)
    dispatch.view.heard("p", 5.0)
    instructions += dispatch.keep_alive(5.0, 0.0)
    assert [each for each in instructions if isinstance(each, WorkerSilent | FailedOver | Abort)] == []
    assert [deliver.events for deliver in of_type(dispatch.tokens("d", [token(1)], 5.1), DeliverTokens)] == [[token(1)]]


def test_the_time_of_a_hand_over_is_told_with_the_end() -> None:
    """From the first token of the attempt to the second one, if another worker has computed it."""
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    for worker_id, position, now in (("p", 0, 2.0), ("d", 1, 2.5), ("d", 2, 9.0)):
        dispatch.tokens(worker_id, [token(position)], now)
    dispatch.end("r")
    [settle] = of_type(dispatch.flush(has_manager=True), Settle)
    assert [ended.handover_s for ended in settle.ended] == [0.5]


@pytest.mark.parametrize(("early", "handover_s"), [((1,), 0.0), ((), None)])
def test_the_time_of_a_hand_over_whose_tokens_come_at_once(early: tuple[int, ...], handover_s: float | None) -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    for position in early:
        dispatch.tokens("d", [token(position)], 1.5)
    dispatch.tokens("p", [token(0)], 2.0)
    dispatch.end("r")
    [settle] = of_type(dispatch.flush(has_manager=True), Settle)
    assert [ended.handover_s for ended in settle.ended] == [handover_s]


def test_a_replica_that_stood_still_takes_nobody_for_silent() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    assert of_type(dispatch.keep_alive(60.0, late_s=57.0), WorkerSilent) == []


def test_a_worker_that_answers_nothing_and_computes_keeps_its_requests_for_a_while() -> None:
    dispatch = make_dispatch(P, D, WorkerInfo("d2", Role.DECODE, 1))
    submitted(dispatch)
    for now in (4.0, 5.0, 20.0, 30.0):
        dispatch.view.heard("p", now)
        assert dispatch.view.quiet(now, 1.0) == [D]
        dispatch.view.computes("d", now)
        assert of_type(dispatch.keep_alive(now, 0.0), WorkerSilent) == []
    dispatch.view.heard("p", 1.0 + COMPUTING_S + TIMEOUTS.worker_silent_s)
    late = 1.1 + COMPUTING_S + TIMEOUTS.worker_silent_s
    dispatch.view.computes("d", late)
    assert of_type(dispatch.keep_alive(late, 0.0), WorkerSilent) == [WorkerSilent("d", 1)], "it hangs"


def test_silent_workers_keep_their_requests_if_nobody_else_could_take_them() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    assert of_type(dispatch.keep_alive(60.0, 0.0), WorkerSilent) == []


def test_requests_of_a_leaving_worker_move_to_others() -> None:
    other = WorkerInfo("d2", Role.DECODE, 1)
    dispatch = make_dispatch(P, D, other)
    submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    leaving = Membership((P, D, other), 0, FINGERPRINT, leaving=frozenset({"d"}))
    instructions = dispatch.membership(leaving, 3.0)
    assert of_type(instructions, MovedOn) == [MovedOn("r", 1, ["d", "p"], 1)]
    assert of_type(instructions, Abort) == [Abort("d", "r", 0), Abort("p", "r", 0)]
    assert [admit.request.attempt for admit in of_type(instructions, Admit)] == [1]
    assert of_type(instructions, FailedOver) == [], "nothing has failed"
    assert dispatch.membership(leaving, 3.5) == [], "on its way already"

    # An admission from before the manager knew: the request moves again, as often as needed.
    for attempt in range(1, MAX_ATTEMPTS + 2):
        dispatch.admitted("r", attempt, admission_of(attempt), 4.0)
        dispatch.flush(has_manager=True)
        [moved] = of_type(dispatch.membership(leaving, 4.0), MovedOn)
        assert moved.attempt == attempt + 1
    last = MAX_ATTEMPTS + 2
    dispatch.admitted("r", last, admission_of(last, decode="d2"), 4.0)
    dispatch.found("d2", 1, 4.0)
    instructions = dispatch.worker_lost("d2", 1, "died", 5.0, is_dead=True)
    assert of_type(instructions, Admit) and not of_type(instructions, DeliverTokens), "moves are no failures"
    dispatch.check_integrity()


def test_a_leaving_worker_keeps_its_requests_if_nobody_else_could_take_them() -> None:
    dispatch = make_dispatch(P, D)
    submitted(dispatch)
    assert dispatch.membership(Membership((P, D), 0, FINGERPRINT, leaving=frozenset({"p", "d"})), 3.0) == []


def test_without_the_manager_leaving_workers_are_preferred_last() -> None:
    dispatch = make_dispatch()
    workers = (D, WorkerInfo("d2", Role.DECODE, 1))
    dispatch.membership(Membership(workers, 0, FINGERPRINT, leaving=frozenset({"d"})), 0.0)
    for number in range(8):
        name = f"r{number}"
        [admit] = of_type(dispatch.begin(make_generation(name), 1.0), Admit)
        instructions = dispatch.not_admitted([admit.request], 1.0, is_silent=False)
        assert all(each.worker_id == "d2" for each in of_type(instructions, Follow))


def test_workers_of_another_model_are_no_workers() -> None:
    dispatch = make_dispatch(P, D)
    other = Membership((P, D), 0, "other/cpu")
    assert of_type(dispatch.membership(other, 1.0), ModelDiffers)
    assert dispatch.membership(other, 2.0) == [], "said once"
    assert not dispatch.view.can_serve
    dispatch.membership(Membership((P, D), 0, FINGERPRINT), 3.0)
    assert dispatch.view.can_serve


def test_the_next_turns_prompt_is_computed_at_idle_priority_where_the_last_one_ended() -> None:
    dispatch = make_dispatch(P, D)
    generation = submitted(dispatch)
    dispatch.tokens("p", [token(0)], 2.0)
    dispatch.tokens("d", [token(1, ends=True)], 3.0)
    following = (*generation.prompt, 100, 101, 5, 6)
    [submit] = of_type(dispatch.prepare(generation, following), Submit)
    [assignment] = submit.assignments
    assert (submit.worker_id, assignment.is_idle, assignment.stage) == ("d", True, Stage.WHOLE)
    assert assignment.token_ids == following[:12], "full blocks"
    assert dispatch.prepare(generation, following[:3]) == [], "no full block"
    dispatch.worker_lost("d", 1, "died", 4.0, is_dead=True)
    assert dispatch.prepare(generation, following) == []


def test_a_stopped_request_is_delivered_nothing_more_and_has_ended() -> None:
    dispatch = make_dispatch(P, D)
    generation = submitted(dispatch)
    assert dispatch.tokens("p", [token(0)], 2.0) == [DeliverTokens("r", [token(0)])]
    dispatch.stopped("r")
    assert generation.is_stopped and dispatch.tokens("d", [token(1)], 3.0) == []
    assert dispatch.end("r") == [Abort("d", "r", 0, has_ended=True), Abort("p", "r", 0, has_ended=True)]
