"""What `benchmarks.served` makes of its measurements."""

from pathlib import Path

from benchmarks.peers.roster import Site
from benchmarks.served import SCENARIOS, raydix_servers, row, table

SUMMARY = {
    "output_tokens_per_s": 200.0,
    "ttft_ms": {"p50": 80.0},
    "later_turn_ttft_ms": {"p50": 60.0},
    "gap_ms": {"max": 30.0},
}


def test_each_load_is_read_three_ways() -> None:
    for scenario in SCENARIOS:
        own, first_token, gap = scenario.readings()
        assert own == scenario and own.read({"summary": SUMMARY}) in (200.0, 60.0)
        assert (first_token.read({"summary": SUMMARY}), gap.read({"summary": SUMMARY})) == (80.0, 30.0)
    names = [reading.name for scenario in SCENARIOS for reading in scenario.readings()]
    assert len(set(names)) == len(names)


def test_the_first_server_is_set_over_the_others() -> None:
    figures = {"vLLM": [100.0, 50.0, 90.0], "raydix cpu": [180.0, 200.0]}  # the last round began with the last server
    result = row(SCENARIOS[0], figures, "raydix cpu")
    assert result["medians"] == {"raydix cpu": 190.0, "vLLM": 90.0}
    assert result["first_over"] == {"vLLM": 2.111}
    assert table([result]).splitlines()[-1] == "| 512 in, 64 out, 8 streams, tok/s | 190.0 | 90.0 (x 2.11) |"


def test_each_configuration_is_a_server(tmp_path: Path) -> None:
    servers = raydix_servers(Site(tmp_path, tmp_path, None), ["cpu_mixed", "cpu"])
    assert [server.name for server in servers] == ["raydix cpu_mixed", "raydix cpu"]
    assert [server.command[-2] for server in servers] == ["cpu_mixed", "cpu"]
