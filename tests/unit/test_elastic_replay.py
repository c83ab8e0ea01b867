"""Elastic workers in the replay: they come, go and change duties, and nobody is lost."""

import json
from pathlib import Path

import pytest

from benchmarks.elastic import Machines, as_day, cheapest, joined, main, run
from benchmarks.replaying.speeds import FittedSpeeds
from benchmarks.replaying.traces import ReplayError, TraceRequest
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.objectives import Objectives

# Simulations of hours, whose lines other tests run: tracing them would take longer than they do.
pytestmark = pytest.mark.no_cover

COSTS = WorkerCosts(step_s=0.01, prefill_token_s=1e-4, decode_token_s=1e-3, import_s=1e-3, import_byte_s=0, spread=0)
MACHINES = Machines(FittedSpeeds(COSTS, 512, 1000), 400, "lru", Objectives(2.0, 0.04), most=6)


def request(arrival_s: float, number: int, num_blocks: int = 4, output: int = 40) -> TraceRequest:
    hashes = tuple((1000 * number + block).to_bytes(16, "big") for block in range(num_blocks))
    return TraceRequest(arrival_s, hashes, 512 * num_blocks, output)


@pytest.fixture
def busy_then_quiet() -> list[TraceRequest]:
    """Five minutes of 10 requests/s, which keep two to three workers busy, and then ten minutes of one."""
    busy = [request(number / 10, number) for number in range(3000)]
    return busy + [request(300 + number, 3000 + number) for number in range(600)]


@pytest.mark.parametrize("name", ["3", "2:1", "elastic 4", "elastic 1-6"])
def test_every_request_ends_whoever_comes_and_goes(name: str) -> None:
    trace = [request(number / 8, number, 1 + number % 5, 1 + number % 90) for number in range(400)]
    row = run(trace, name, MACHINES)
    assert 0 < row["goodput_share"] <= 1 and row["worker_seconds"] > 0
    assert row["ttft_ms"]["p99"] > 0


def test_the_number_of_workers_follows_the_load_down(busy_then_quiet: list[TraceRequest]) -> None:
    fixed, planned = (run(busy_then_quiet, name, MACHINES) for name in ("6", "elastic 1-6"))
    assert fixed["mean_workers"] == pytest.approx(6, rel=0.01)
    assert planned["worker_seconds"] < 0.6 * fixed["worker_seconds"]
    assert planned["goodput_per_worker_second"] > fixed["goodput_per_worker_second"]


def test_a_day_has_the_requests_of_the_trace_in_their_order() -> None:
    trace = [request(float(number), number) for number in range(1001)]
    day = as_day(trace, 0.25)
    assert [each.hashes for each in day] == [each.hashes for each in trace]
    times = [each.arrival_s for each in day]
    assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(1000, rel=0.01)
    night, noon = (sum(low <= at < low + 100 for at in times) for low in (0, 450))
    assert noon / night == pytest.approx(3.7, rel=0.1)


def test_traces_are_played_one_after_the_other() -> None:
    whole = joined([[request(0.0, 1), request(5.0, 2)], [request(0.0, 3), request(2.0, 4)]])
    assert [each.arrival_s for each in whole] == [0.0, 5.0, 5.0, 7.0]


def test_the_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * number, "input_length": 512, "output_length": 20, "hash_ids": [number]}
        for number in range(50)
    ]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    report = tmp_path / "r.json"
    options = ["--most", "2", "--fixed", "2", "--day", "0.5", "--faster", "2", "--json", str(report)]
    assert main([str(trace), *options]) == 0
    shown = [row["workers"] for row in json.loads(report.read_text())["rows"]]
    assert shown == ["2", "elastic 2", "elastic 1-2"]
    shown_too = capsys.readouterr().out
    assert "good/worker-s" in shown_too and shown_too.count("as much goodput") + shown_too.count("more goodput") == 2


def test_rows_are_compared_with_the_cheapest_fixed_cluster_of_as_much_goodput() -> None:
    figures = {"8": (0.9, 800), "7": (0.9, 700), "4:4": (0.95, 900), "elastic 8": (0.99, 500)}
    rows = [{"workers": name, "goodput_share": good, "worker_seconds": s} for name, (good, s) in figures.items()]
    found = {row["workers"]: cheapest(row, rows) for row in rows}
    assert {name: row and row["workers"] for name, row in found.items()} == {
        "8": "7",
        "7": "7",
        "4:4": "4:4",
        "elastic 8": None,
    }


def test_each_trace_has_its_own_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("slow.jsonl", "quick.jsonl")]
    for path in paths:
        rows = [{"timestamp": 8000 * n, "input_length": 9, "output_length": 2, "hash_ids": [n]} for n in range(2)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([*map(str, paths), "--faster", "1", "4", "--only", "1"]) == 0
    assert "4 requests in 10 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--only", "many"], "'many'"),
        (["--only", "0"], "at least 1"),
        (["--day", "2"], "--day above 0"),
        (["--faster", "0"], "--faster must be above 0"),
        (["--faster", "1", "2"], "one for each trace"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 20, "hash_ids": [1]}\n')
    assert main([str(trace), *options]) == 2
    assert reason in capsys.readouterr().err
    with pytest.raises(ReplayError):
        run([request(0.0, 1)], "elastic many", MACHINES)
