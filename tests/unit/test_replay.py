"""The replay benchmark: what it reads, what it refuses, and that its virtual cluster loses nobody."""

import json
from pathlib import Path

import pytest

from benchmarks.replay import main, parse_roles, replay
from benchmarks.replaying.bounds import hit_rates
from benchmarks.replaying.cluster import Cluster
from benchmarks.replaying.report import spread
from benchmarks.replaying.routers import ROUTERS, Managed
from benchmarks.replaying.speeds import ConstantSpeeds, FittedSpeeds, read_costs
from benchmarks.replaying.traces import ReplayError, TraceRequest, read_trace
from benchmarks.replaying.worker import ReplayWorker
from raydix.engine.core.eviction.policies import EvictionPolicy
from raydix.engine.core.types import Role
from raydix.engine.core.worker.block_pool import BlockPool

# Simulations of hours, whose lines other tests run: tracing them would take longer than they do.
pytestmark = pytest.mark.no_cover

SPEEDS = ConstantSpeeds(prefill_tokens_per_s=5120, step_s=0.01, token_budget=512, handover_blocks_per_s=100)


def request(arrival_s: float, *blocks: int, output: int = 11) -> TraceRequest:
    hashes = tuple(block.to_bytes(16, "big") for block in blocks)
    return TraceRequest(arrival_s, hashes, 512 * len(blocks), output)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def row(ids: list[int], timestamp: int = 0) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": 512 * len(ids), "output_length": 20, "hash_ids": ids}


@pytest.fixture
def trace() -> list[TraceRequest]:
    """Conversations of five turns each, 30 s apart, all sharing block 0."""
    talks = [
        request(30.0 * turn + talk, 0, *range(talk * 100, talk * 100 + turn + 1))
        for turn in range(5)
        for talk in range(1, 8)
    ]
    return sorted(talks, key=lambda talk: talk.arrival_s)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("roles", ["1:1", "2:3", None])
@pytest.mark.parametrize("policy", EvictionPolicy)
def test_every_request_ends(trace: list[TraceRequest], router: str, roles: str | None, policy: EvictionPolicy) -> None:
    jobs, workers = replay(trace, parse_roles(3, roles), 12, policy, router, SPEEDS)
    for job in jobs:
        assert job.first_token_s is not None and job.finished_s is not None
        assert job.request.arrival_s < job.first_token_s < job.finished_s
    for worker in workers:
        worker.pool.check_integrity(held=())


def test_times_are_those_of_the_options() -> None:
    [job], [worker] = replay([request(5.0, 1, 2)], parse_roles(1, None), 8, EvictionPolicy.LRU, "directory", SPEEDS)
    assert job.first_token_s == pytest.approx(5.2)
    assert job.finished_s == pytest.approx(5.3)
    assert worker.busy_s == pytest.approx(0.2)


def test_decoding_waits_for_the_chunks_of_a_prefill() -> None:
    """Ten steps of 10 ms each, of which those beside the second prefill carry a chunk of 100 ms."""
    first, second = request(0.0, 1), request(0.15, 2, 3, 4)
    jobs, _ = replay([first, second], parse_roles(1, None), 8, EvictionPolicy.LRU, "directory", SPEEDS)
    alone_s, beside_s = 0.05, 0.3
    left = 10 - alone_s / 0.01 - beside_s / 0.11
    assert jobs[0].finished_s == pytest.approx(0.1 + alone_s + beside_s + left * 0.01)


def write_costs(path: Path, **changes: object) -> Path:
    """A step of 10 ms, 0.1 ms a prompt token, 1 ms a decode, an import of 5 ms and a microsecond a byte."""
    costs = {"step_s": 0.01, "prefill_token_s": 1e-4, "decode_token_s": 1e-3, "pair_s": 0, "import_s": 5e-3}
    path.write_text(json.dumps(costs | {"import_byte_s": 1e-6, "swap_s": 0, "swap_byte_s": 0, "spread": 0} | changes))
    return path


def fitted(path: Path) -> FittedSpeeds:
    return FittedSpeeds(read_costs(path), token_budget=512, block_bytes=1000)


def test_times_are_those_of_the_costs(tmp_path: Path) -> None:
    """A prompt of 1,024 tokens in two steps, then ten steps of one decode."""
    files = {
        write_costs(tmp_path / "fast.json"): (0.02 + 0.1024, 10 * 0.011),
        write_costs(tmp_path / "slow.json", pair_s=1e-7, decode_token_s=0.03): (
            0.02 + 0.1024 + 1024 * 512 * 1e-7,
            10 * 0.04,
        ),
    }
    for path, (first_s, rest_s) in files.items():
        [job], _ = replay([request(5, 1, 2)], [Role.MIXED], 8, EvictionPolicy.LRU, "directory", fitted(path))
        assert job.first_token_s == pytest.approx(5 + first_s)
        assert job.finished_s == pytest.approx(5 + first_s + rest_s)


def test_with_costs_decodes_slow_each_other_and_a_prefill_down(tmp_path: Path) -> None:
    """The second prompt is one token too long for a step beside a decode, so that the first answer gets two tokens
    meanwhile; then both decode until the first is complete."""
    trace = [request(0.0, 1, output=101), request(0.0, 2, output=101)]
    speeds = fitted(write_costs(tmp_path / "costs.json"))
    jobs, _ = replay(trace, [Role.MIXED], 8, EvictionPolicy.LRU, "directory", speeds)
    first_s = 0.01 + 0.0512
    second_s = first_s + 2 * 0.011 + 0.0512
    assert [job.first_token_s for job in jobs] == pytest.approx([first_s, second_s])
    ended_s = second_s + 98 * 0.012
    assert [job.finished_s for job in jobs] == pytest.approx([ended_s, ended_s + 2 * 0.011])


def test_with_costs_a_prefix_is_imported_from_a_busy_worker(tmp_path: Path) -> None:
    trace = [request(0.0, 1, 2), request(10.0, 1, 2, *range(10, 50)), request(10.1, 1, 2, 3)]
    speeds = fitted(write_costs(tmp_path / "costs.json"))
    jobs, workers = replay(trace, [Role.MIXED] * 2, 64, EvictionPolicy.LRU, "directory", speeds)
    assert [(job.num_hits, job.num_imported) for job in jobs] == [(0, 0), (2, 0), (2, 2)]
    assert jobs[0].prefill == jobs[1].prefill != jobs[2].prefill
    assert jobs[2].first_token_s == pytest.approx(10.1 + 0.005 + 2 * 1000 * 1e-6 + 0.01 + 0.0512)
    for worker in workers:
        worker.pool.check_integrity(held=())


def test_what_the_directory_asks_for_is_exported(tmp_path: Path, trace: list[TraceRequest]) -> None:
    speeds = fitted(write_costs(tmp_path / "costs.json"))
    workers = [ReplayWorker(name, Role.MIXED, BlockPool(12, 512), speeds) for name in ("a", "b")]
    router = Managed(workers, speeds)
    assert any(job.num_imported for job in list(Cluster(workers, router).run(trace)))
    router._directory.check_integrity()
    assert router._directory.stock.supply.num_asked == 0


def test_at_constant_rates_nothing_is_imported() -> None:
    """Even where the directory would, beside so many decodes that they make much of a prefill's time."""
    answers = [request(0.0, 1000 + number, output=4000) for number in range(200)]
    trace = [*answers, request(20.0, 1, 2), request(25.0, 1, 2, *range(10, 50)), request(25.1, 1, 2, 3)]
    jobs, _ = replay(trace, [Role.MIXED] * 2, 2000, EvictionPolicy.LRU, "directory", SPEEDS)
    assert jobs[-2].prefill != jobs[-1].prefill
    assert not any(job.num_imported for job in jobs)


@pytest.mark.parametrize("roles", ["1:1", "2:3", None])
def test_with_costs_every_request_ends(tmp_path: Path, trace: list[TraceRequest], roles: str | None) -> None:
    speeds = fitted(write_costs(tmp_path / "costs.json"))
    jobs, workers = replay(trace, parse_roles(3, roles), 12, EvictionPolicy.ADAPTIVE, "directory", speeds)
    assert all(job.finished_s is not None for job in jobs)
    for worker in workers:
        worker.pool.check_integrity(held=())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot read costs.json"),
        ("[]", "costs.json: not a JSON object"),
        ({"stepp_s": 1}, "costs.json: unknown 'stepp_s'; there are step_s, prefill_token_s"),
        ({"step_s": None}, "costs.json: 'step_s' missing"),
        ({"pair_s": -1}, "pair_s must be a number from 0, not -1"),
        ({"pair_s": True}, "pair_s must be"),
        ({"pair_s": "1"}, "pair_s must be"),
        ({"pair_s": float("nan")}, "pair_s must be"),
        ({"step_s": 0, "decode_token_s": 0}, "a step must take time"),
    ],
)
def test_wrong_costs_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | dict[str, object], reason: str
) -> None:
    path = tmp_path / "costs.json"
    if isinstance(text, str):
        path.write_text(text)
    else:
        costs = json.loads(write_costs(path, **text).read_text())
        path.write_text(json.dumps({name: value for name, value in costs.items() if value is not None}))
    assert main([str(write(tmp_path / "trace.jsonl", row([1]))), "--costs", str(path)]) == 2
    assert reason in capsys.readouterr().err


def test_costs_of_two_files_are_replayed(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", *[row([1, 2 + number % 3], 1000 * number) for number in range(20)])
    reports = []
    for name, step_s in (("fast", 0.01), ("slow", 0.02)):
        costs, result = write_costs(tmp_path / f"{name}.json", step_s=step_s), tmp_path / f"{name}_result.json"
        assert main([str(trace), "--workers", "2", "--costs", str(costs), "--json", str(result)]) == 0
        reports.append(json.loads(result.read_text()))
        assert reports[-1]["command"].endswith(f"--costs {name}.json --json {name}_result.json")
    fast, slow = reports
    assert slow["ttft_ms"]["p50"] > fast["ttft_ms"]["p50"]
    assert slow["tpot_ms"]["p50"] == pytest.approx(21) and fast["tpot_ms"]["p50"] == pytest.approx(11)


def test_a_thousand_workers() -> None:
    """A hundred conversations of three turns."""
    trace = [
        request(30.0 * turn + 0.1 * talk, *range(talk * 100, talk * 100 + turn + 2), output=50)
        for turn in range(3)
        for talk in range(1, 101)
    ]
    jobs, workers = replay(trace, parse_roles(1000, None), 32, EvictionPolicy.LRU, "directory", SPEEDS)
    assert len(workers) == 1000 and all(job.finished_s is not None for job in jobs)
    assert sum(worker.busy_s > 0 for worker in workers) > 1
    assert all(job.num_hits >= len(job.request.hashes) - 1 for job in jobs[100:]), "later turns hit all earlier ones"


def test_a_prompt_is_hit_again() -> None:
    trace = [request(0.0, 1, 2), request(10.0, 1, 2, 3)]
    jobs, _ = replay(trace, parse_roles(2, None), 8, EvictionPolicy.ADAPTIVE, "directory", SPEEDS)
    assert [job.num_hits for job in jobs] == [0, 2]


def test_jitter_is_of_each_worker_and_repeatable() -> None:
    """Ten prompts that share nothing, on workers that are equal but for the jitter."""
    trace = [request(10.0 * number, number) for number in range(10)]
    took_s = {}
    for jitter, seed in ((0.0, 1), (0.1, 1), (0.1, 1), (0.1, 2)):
        jobs, _ = replay(trace, [Role.MIXED] * 4, 8, EvictionPolicy.LRU, "round-robin", SPEEDS, jitter, seed)
        took_s[jitter, seed] = [
            round(job.first_token_s - job.request.arrival_s, 6) for job in jobs if job.first_token_s
        ]
        assert took_s.setdefault((jitter, -seed), took_s[jitter, seed]) == took_s[jitter, seed]
    assert set(took_s[0.0, 1]) == {0.1}
    assert len(set(took_s[0.1, 1])) == 4 and all(0.09 <= each <= 0.11 for each in took_s[0.1, 1])
    assert took_s[0.1, 1] != took_s[0.1, 2]


def test_sessions_use_all_workers_though_their_fits_differ() -> None:
    """40 conversations of three turns, one request at a time: later turns come back to their blocks."""
    trace = [
        request(10.0 * (40 * turn + talk), *range(talk * 100, talk * 100 + 4 + turn))
        for turn in range(3)
        for talk in range(1, 41)
    ]
    jobs, workers = replay(trace, [Role.MIXED] * 4, 400, EvictionPolicy.LRU, "directory", SPEEDS, 0.1)
    used = [job.prefill for job in jobs]
    assert all(4 <= used[:40].count(worker.worker_id) <= 16 for worker in workers)
    assert used[:40] == used[40:80] == used[80:]


def test_what_fits_no_pool_is_refused() -> None:
    jobs, _ = replay(
        [request(0.0, 1, 2, 3), request(1.0, 4)], parse_roles(1, None), 3, EvictionPolicy.LRU, "directory", SPEEDS
    )
    assert jobs[0].first_token_s is None
    assert jobs[1].finished_s is not None


def test_bounds_are_ordered(trace: list[TraceRequest]) -> None:
    rates = hit_rates(trace, 20)
    assert 0 < rates["lru"] <= rates["belady"] <= rates["infinite"] < 1
    assert max(rates["adaptive"], rates["once_first"]) <= rates["belady"]


def test_blocks_used_once_go_before_older_ones() -> None:
    """Of a cache of two blocks the third request takes the second's, though the first's was used longer ago."""
    again = [request(0.0, 1), request(1.0, 1), request(2.0, 2), request(3.0, 3), request(4.0, 1)]
    assert hit_rates(again, 2)["once_first"] == 2 / 5
    assert hit_rates(again, 2)["lru"] == 1 / 5


def test_mooncake_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", row([1, 2], 3000), row([1], 1000), "")
    requests = read_trace(path)
    assert [(r.arrival_s, len(r.hashes), r.num_prompt_tokens) for r in requests] == [(0.0, 1, 512), (2.0, 2, 1024)]
    assert requests[0].hashes[0] == requests[1].hashes[0]


def test_azure_is_read_and_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    write(path, "TIMESTAMP,ContextTokens,GeneratedTokens", *["2023-11-16 18:15:46.6805900,600,44"] * 2)
    first, second = read_trace(path)
    assert len(first.hashes) == 2 and not set(first.hashes) & set(second.hashes)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "not a JSON object"),
        ({"timestamp": 0}, "'hash_ids' is missing"),
        (row([1]) | {"hash_ids": []}, "list of block ids"),
        (row([1]) | {"hash_ids": ["x"]}, "whole numbers"),
        (row([1]) | {"input_length": 5000}, "10 blocks of 512, but there are 1"),
        (row([1]) | {"timestamp": "now"}, "milliseconds"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: object, reason: str) -> None:
    path = write(tmp_path / "trace.jsonl", row([1]), bad)
    with pytest.raises(ReplayError, match=r"trace.jsonl, line 2: .*" + reason):
        read_trace(path)


def test_a_malformed_csv_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,many,1")
    with pytest.raises(ReplayError, match=r"trace.csv, line 2"):
        read_trace(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--policy", "fifo"], "unknown policy 'fifo'; there are adaptive, lru"),
        (["--router", "magic"], "unknown router 'magic'; there are directory"),
        (["--roles", "4"], "--roles must be P:D"),
        (["--workers", "0"], "--workers must be"),
        (["--capacity-blocks", "0"], "--capacity-blocks must be"),
        (["--jitter", "1"], "--jitter must be from 0 to below 1"),
        (["--prefill-rate", "0"], "must be above 0"),
        (["--costs", "costs.json", "--decode-step-ms", "5"], "--costs stands instead of --decode-step-ms"),
        (["--costs", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_wrong_options_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    assert main([str(write(tmp_path / "trace.jsonl", row([1]))), *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_missing_trace_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.jsonl"]) == 2
    assert "cannot read nowhere.jsonl" in capsys.readouterr().err


def test_figures_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "trace.jsonl", *[row([1, 2 + number % 3], 1000 * number) for number in range(20)])
    result = tmp_path / "result.json"
    assert main([str(trace), "--workers", "2", "--json", str(result)]) == 0
    assert "prompt blocks hit" in capsys.readouterr().out
    report = json.loads(result.read_text())
    assert report["command"].startswith("python -m benchmarks.replay trace.jsonl")
    assert 0 < report["hit_rate"] <= report["one_shared_cache"]["infinite"]


def test_percentiles_interpolate() -> None:
    figures = spread([0.001 * n for n in range(1, 102)])
    assert figures == {"mean": 51, "p50": 51, "p90": 91, "p99": 100, "max": 101, "count": 101}
    assert spread([0.002]) == {"mean": 2, "p50": 2, "p90": 2, "p99": 2, "max": 2, "count": 1}
    assert spread([]) is None
