"""The replay of agents' sessions: what it reads, that its loop is closed, and that turns save prompts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import RuleRun, main
from benchmarks.replaying.agents import AgentCall, AgentTrace, Chain, read_agents
from benchmarks.replaying.traces import ReplayError
from raydix.engine.core.types import FinishReason

pytestmark = pytest.mark.no_cover  # a simulation, whose lines other tests run


def call(
    num_blocks: int, common: int, *, think: float = 1.0, stop: str = "tool_use", output: int = 10
) -> dict[str, Any]:
    return {"think": think, "in": 64 * num_blocks, "out": output, "blocks": num_blocks, "lcp": common, "stop": stop}


def write(path: Path, *sessions: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as lines:
        for chains in sessions:
            lines.write(json.dumps({"block": 64, "chains": chains}) + "\n")
    return path


def growing(num_calls: int, num_blocks: int) -> Chain:
    """A session whose prompt grows by a block with each call."""
    calls = [
        AgentCall(
            2.0, 64 * (num_blocks + n), 20, num_blocks + n, num_blocks + n - 1 if n else 0, FinishReason.TOOL_CALLS
        )
        for n in range(num_calls)
    ]
    return Chain(calls, ())


def test_sessions_are_read_with_their_sub_agents(tmp_path: Path) -> None:
    main_chain = {"chain": "a", "parent": None, "at": None, "calls": [call(10, 0), call(12, 10, stop="end_turn")]}
    child = {"chain": "b", "parent": "a", "at": 1, "calls": [call(3, 0)]}
    trace = read_agents(write(tmp_path / "t.jsonl.gz", [child, main_chain]))
    [agent] = trace.sessions
    assert [each.num_blocks for each in agent.calls] == [10, 12] and trace.mean_footprint == 11
    assert agent.calls[1].stop is FinishReason.STOP
    [(at, sub_agent)] = agent.children
    assert at == 1 and sub_agent.calls[0].num_blocks == 3


def test_a_file_that_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"[]\n"))
    with pytest.raises(ReplayError, match=r"t\.jsonl\.gz"):
        read_agents(path)
    assert main([str(path)]) == 2 and "agents: cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["adaptive", "turns"])
def test_each_call_comes_after_the_one_before(rule: str) -> None:
    run = RuleRun(AgentTrace(64, [growing(50, 20)]), num_workers=2, capacity=100, rule=rule, seed=0)
    run.run(num_slots=4, end_s=300.0)
    ends: dict[int, float] = {}
    for slot, job in run.ended:
        assert job.request.arrival_s >= ends.get(slot, 0.0)
        assert job.first_token_s is not None and job.finished_s is not None
        ends[slot] = job.finished_s
    assert len(ends) == 4 and len(run.ended) > 100


def test_turns_save_prompts_where_sessions_do_not_fit() -> None:
    """Ten sessions on room for three, all of them at work."""
    trace = AgentTrace(64, [growing(200, 1000)])
    steps, hits = {}, {}
    for rule in ("lru", "turns-lru"):
        run = RuleRun(trace, num_workers=1, capacity=3800, rule=rule, seed=0)
        run.run(num_slots=10, end_s=400.0)
        steps[rule] = len(run.ended)
        hits[rule] = sum(job.num_hits for _, job in run.ended) / sum(len(job.request.hashes) for _, job in run.ended)
        assert len({slot for slot, _ in run.ended}) == 10, "everyone has had a turn"
    assert hits["lru"] < 0.3 and hits["turns-lru"] > 0.5
    assert steps["turns-lru"] > 1.5 * steps["lru"]


def test_turns_change_nothing_while_all_fit() -> None:
    trace = AgentTrace(64, [growing(200, 1000)])
    ended = []
    for rule in ("adaptive", "turns"):
        run = RuleRun(trace, num_workers=1, capacity=5000, rule=rule, seed=0)
        run.run(num_slots=3, end_s=200.0)
        ended.append([(slot, job.first_token_s, job.finished_s) for slot, job in run.ended])
    assert ended[0] == ended[1]
