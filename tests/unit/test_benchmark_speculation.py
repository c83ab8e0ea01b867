"""The benchmark of drafts: its workloads and figures."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.drafting.questions import Question
from benchmarks.drafting.speed import clients_of
from benchmarks.drafting.statistics import AnsweredWorkload, compared, since, speed_table, spread
from benchmarks.drafting.workloads import WORKLOADS, chosen, encoded, load
from raydix.engine.api.requests import parse_chat
from raydix.engine.core.types import DraftSource, Sampling
from raydix.engine.core.worker.drafts.draft import DraftCounts

QUESTIONS = [Question("chats", (1, 2, number), Sampling(8, seed=5)) for number in range(3)]


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


def turn(
    seconds: float, *, tokens: int = 41, answers: str = "a", drafted: int = 0, accepted: int = 0
) -> AnsweredWorkload:
    """A turn with one answer whose first token takes no time."""
    counts = {source: DraftCounts() for source in DraftSource}
    counts[DraftSource.PAST].add(drafted, accepted)
    return AnsweredWorkload(
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
    figures = compared(off, auto)
    assert figures["time_per_token_ms"] == {"off": 15.0, "auto": 5.0}
    assert figures["times_as_fast"]["rounds"] == figures["throughput_ratio"]["rounds"] == [2.0, 4.0]
    assert figures["tokens_per_step"] == 2.0
    assert figures["drafts"] == {"past": {"drafted": 50, "accepted": 40}}
    assert figures["same_answers"]

    figures = compared(off, [turn(0.2), turn(0.2, answers="b")])
    assert not figures["same_answers"]
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


def test_the_table_has_a_row_for_each_workload_and_number_of_streams() -> None:
    figures = compared([turn(0.4)], [turn(0.2, drafted=30, accepted=20, answers="b")])
    assert cells(speed_table({"edits": {"8": figures}})) == [
        *("code edit", "8", "10.00", "5.00", "2.00", "2.00", "2.00", "past 20 / 30", "DIFFER")
    ]


def cells(table: str) -> Sequence[str]:
    """Of the first row."""
    return [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
