"""The benchmark of drafts: its workloads, figures, spoilt drafts and comparison."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafting.comparing import Step, Tally, compared, differing, first_difference, take
from benchmarks.drafting.drafters import adversarial, at_random
from benchmarks.drafting.identity import GROUP, groups, requests
from benchmarks.drafting.questions import Question
from benchmarks.drafting.speed import clients_of
from benchmarks.drafting.statistics import Turn, since, spread
from benchmarks.drafting.statistics import compared as compared_turns
from benchmarks.drafting.tables import identity_table, speed_table
from benchmarks.drafting.workloads import WORKLOADS, chosen, encoded, load
from benchmarks.speculation import differs
from raydix.engine.api.requests import parse_chat
from raydix.engine.core.types import DraftSource, FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from raydix.engine.core.worker.drafts.draft import DraftCounts

QUESTIONS = [Question("chats", (1, 2, number), SamplingParams(8, seed=5)) for number in range(3)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_several_requests_that_a_server_takes(name: str) -> None:
    specs = [parse_chat(encoded(body)) for body in WORKLOADS[name].bodies()]
    assert len({repr(spec.messages) for spec in specs}) == len(specs) >= 4
    assert all((spec.prediction is not None) == WORKLOADS[name].predicts for spec in specs)
    assert all((spec.sampling.grammar is not None) == (name == "extraction") for spec in specs)
    assert all(spec.max_tokens and spec.sampling.temperature in (0.0, 0.8) for spec in specs)


def test_an_edit_s_prediction_is_the_file_before_the_edit() -> None:
    for body in WORKLOADS["edits-predicted"].bodies():
        assert body["prediction"]["content"] == body["messages"][-1]["content"][-1]["text"]


def test_the_workloads_that_are_asked_for() -> None:
    assert [each.name for each in chosen(["retry", "edits"])] == ["retry", "edits"]
    assert chosen([]) == list(WORKLOADS.values())
    with pytest.raises(ValueError, match="no such workload: poems; there are: edits"):
        chosen(["edits", "poems"])


@pytest.mark.parametrize("text", ["body: {}", "body: {}\nrequests: []", "[]", "body: {}\nrequests: [{}]\nmore: 1"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="must have 'body' and 'requests'"):
        load(path)


def test_a_request_s_own_fields_count(tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text("body: {seed: 1, max_tokens: 2}\nrequests: [{}, {seed: 3}]")
    assert load(path) == [{"seed": 1, "max_tokens": 2}, {"seed": 3, "max_tokens": 2}]


# Figures


def turn(seconds: float, *, tokens: int = 41, answers: str = "a", drafted: int = 0, accepted: int = 0) -> Turn:
    """A turn with one answer whose first token takes no time."""
    counts = {source: DraftCounts() for source in DraftSource}
    counts[DraftSource.PAST].add(drafted, accepted)
    return Turn(
        tokens=tokens,
        seconds=seconds,
        decode_tokens=tokens - 1,
        decode_s=seconds,
        decode_steps=tokens - 1 - accepted,
        drafts=counts,
        answers=answers,
    )


def test_the_figures_of_two_engines() -> None:
    off, auto = [turn(0.4), turn(0.8)], [turn(0.2, drafted=30, accepted=20), turn(0.2, drafted=20, accepted=20)]
    figures = compared_turns(off, auto)
    assert figures["time_per_token_ms"] == {"off": 15.0, "auto": 5.0}
    assert figures["times_as_fast"]["rounds"] == figures["throughput_ratio"]["rounds"] == [2.0, 4.0]
    assert figures["tokens_per_step"] == 2.0
    assert figures["drafts"] == {"past": {"drafted": 50, "accepted": 40}}
    assert figures["same_answers"] and not differs({"speed": {"edits": {"1": figures}}})

    figures = compared_turns(off, [turn(0.2), turn(0.2, answers="b")])
    assert not figures["same_answers"] and differs({"speed": {"edits": {"1": figures}}})
    assert figures["drafts"] == {}


def test_a_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "low": 1.0,
        "high": 3.0,
        "standard_error": 0.5774,
        "rounds": [3.0, 1.0, 2.0],
    }
    assert spread([1.5])["standard_error"] is None


def test_counts_since() -> None:
    before, now = DraftCounts(), DraftCounts()
    for counts in (before, now):
        counts.add(4, 3)
    now.add(2, 1)
    grown = since({DraftSource.PAST: now}, {DraftSource.PAST: before})[DraftSource.PAST]
    assert (grown.num_drafted, grown.num_accepted) == (2, 1) and grown.lengths == {2: 1}


def test_streams_ask_the_same_questions_as_different_clients() -> None:
    clients = clients_of(QUESTIONS, 4)
    assert [[each.token_ids[-1] for each in client] for client in clients] == [
        [0, 1, 2],
        [1, 2, 0],
        [2, 0, 1],
        [0, 1, 2],
    ]
    assert [{each.sampling.seed for each in client} for client in clients] == [{5}, {6}, {7}, {8}]
    assert len({each.request_id for client in clients for each in client}) == 12
    assert len({each.salt.private for client in clients for each in client}) == 4
    assert all(each.salt.num_public_tokens == 3 for client in clients for each in client)


# Identity


def test_spoilt_drafts_are_short_enough_and_of_all_kinds() -> None:
    chance, right = random.Random(0), list(range(1000, 1020))
    drafts = [adversarial(right, chance, 8) for _ in range(300)]
    assert max(map(len, drafts)) == 8 and any(draft == right[:8] for draft in drafts)
    lengths = {next((n for n in range(len(draft)) if draft[n] != right[n]), len(draft)) for draft in drafts}
    assert lengths == set(range(9)), "drafts are right up to every place"
    assert all(0 < len(at_random(right, chance, 8)) <= 8 for _ in range(50))
    assert len(adversarial([], chance, 8)) <= 8


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("", "", None), ("", "a", 0)],
)
def test_the_first_difference(one: str, other: str, position: int | None) -> None:
    assert first_difference(steps(one), steps(other)) == position


def steps(text: str) -> list[Step]:
    return [(ord(letter), TokenLogprobs(-1.0, (), ()), None) for letter in text]


def test_a_log_probability_of_other_bits_is_a_difference() -> None:
    one, other = (TokenLogprobs(value, (), ()) for value in (0.1 + 0.2, 0.3))
    assert first_difference([(5, one, None)], [(5, other, None)]) == 0
    assert first_difference([(5, one, None)], [(5, one, FinishReason.STOP)]) == 0


def test_a_tally_counts_what_differs() -> None:
    tally = Tally()
    tally.compare({"a": steps("one"), "b": steps("two"), "c": steps("six")}, {"a": steps("one"), "b": steps("to")})
    report = tally.report()
    assert (report["compared"], report["tokens"], report["differing"]) == (2, 6, 1)
    [detail] = report["first_differences"]
    assert (detail["request"], detail["position"]) == ("b", 1)
    assert detail["expected"] == str(steps("w")[0]) and detail["got"] == str(steps("o")[0])
    assert differs({"differing": 1}) and not differs({"differing": 0})


def test_tokens_are_taken_in_order_or_not_at_all() -> None:
    answers: dict[str, list[Step]] = {"a": []}
    take(answers, [event(0), event(1)])
    assert [token_id for token_id, _, _ in answers["a"]] == [7, 8]
    with pytest.raises(RuntimeError, match="a: position 3 came in place of 2"):
        take(answers, [event(3)])


def event(position: int) -> TokenEvent:
    return TokenEvent("a", 0, position, 7 + position, None, None, 0)


def test_requests_of_all_workloads_and_the_same_ones_again() -> None:
    asked = requests(dict.fromkeys(("edits", "retry", "chats"), QUESTIONS), 60, 9)
    assert len({each.request_id for each in asked}) == 60
    assert {each.sampling.temperature == 0 for each in asked} == {True, False}
    assert {each.sampling.logprobs for each in asked} == {0, 3} and {each.sampling.max_tokens for each in asked} == {9}
    assert [(each.token_ids, each.sampling) for each in asked[1::3]] == [
        (each.token_ids, each.sampling) for each in asked[2::3]
    ]
    assert len({(each.token_ids, repr(each.sampling)) for each in asked[::3]}) == 20
    assert [len(group) for group in groups(asked)] == [GROUP, GROUP, GROUP, 12]


def test_tables() -> None:
    counts = {"compared": 4, "differing": 1, "drafted": 9, "accepted": 5, "events": 2}
    report: dict[str, dict[str, dict[str, Any]]] = {"all": {"alone": {**counts, "events": 0}, "killed": counts}}
    assert identity_table(report).splitlines()[2:] == [
        "| all | 1 of 4 | 1 of 4 | 10 / 18 |",
        "| times that occurred |  | 2 |  |",
    ]
    assert (compared(report), differing(report)) == (8, 2)

    figures = compared_turns([turn(0.4)], [turn(0.2, drafted=30, accepted=20, answers="b")])
    assert cells(speed_table({"edits": {"8": figures}})) == [
        *("code edit", "8", "10.00", "5.00", "2.00", "2.00", "2.00", "past 20 / 30", "DIFFER")
    ]


def cells(table: str) -> Sequence[str]:
    """Of the first row."""
    return [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
