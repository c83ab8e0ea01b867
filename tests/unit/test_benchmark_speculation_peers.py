"""Drafts beside vLLM's: who takes part, and the figures."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafting.questions import Question
from benchmarks.peers.install import ARCTIC_INFERENCE, Environment, add_suffix_decoding
from benchmarks.peers.roster import Site
from benchmarks.speculation_peers import Found, contenders, figures, report, run, table
from raydix.engine.core.types import SamplingParams

SERVER = """
import json, sys
per_token = 0.25
for line in sys.stdin:
    request = json.loads(line)
    if "load" in request:
        per_token = 0.125 if "speculative" in request["load"] else 0.25
        reply = {"version": "7", "settings": {}, "caches_prefixes": True}
    else:
        prompts, count = request["prompts"], request["max_tokens"]
        reply = {"seconds": 3 + count * per_token, "tokens": [prompt[:1] * count for prompt in prompts]}
    print(json.dumps(reply), flush=True)
"""
"""An engine's process with known times."""
QUESTIONS = {name: [Question(name, (1, 2, 3), SamplingParams(9))] for name in ("edits", "retry")}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A machine on which vLLM's environment has its Python alone."""
    python = tmp_path / "vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    return Site(tmp_path, tmp_path / "model", None)


def test_each_engine_takes_part_without_drafts_and_with(site: Site) -> None:
    everyone = contenders()
    titles = [each.title for each in everyone]
    assert titles == ["raydix", "raydix, drafts", "vLLM CPU", "vLLM CPU, n-gram", "vLLM CPU, suffix"]
    assert [each.plain for each in everyone] == [None, "raydix", None, "vLLM CPU", "vLLM CPU"]
    options: list[dict[str, Any]] = [each.peer.options(site) for each in everyone]
    assert options[1] == options[0] | {"drafts": True}
    methods = [each.get("speculative", {}).get("method") for each in options]
    assert methods == [None, None, None, "ngram", "suffix"]
    assert len({each.peer.python(site) for each in everyone}) == 2, "vLLM's are one environment"


def test_suffix_decoding_needs_its_library(site: Site) -> None:
    suffix = contenders()[-1].peer
    assert "suffix decoding is not installed" in str(suffix.why_not(site))
    (site.home / "vllm/lib/python3.12/site-packages/arctic_inference").mkdir(parents=True)
    assert suffix.why_not(site) is None


def test_what_is_missing_or_fails_is_left_out(tmp_path: Path) -> None:
    found, left_out = run(contenders()[2:], Site(tmp_path, tmp_path, None), QUESTIONS, 8, 1)
    assert found == {} and set(left_out.values()) == {"not installed (make bench-peers)"}

    broken = tmp_path / "vllm/bin/python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    found, left_out = run(contenders()[2:3], Site(tmp_path, tmp_path, None), QUESTIONS, 8, 2)
    assert found == {} and "its process" in left_out["vLLM CPU"]


def test_engines_are_asked_everything(site: Site) -> None:
    server, python = site.home / "server.py", site.home / "vllm/bin/python"
    server.write_text(SERVER)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {server}\n")
    python.chmod(0o755)
    found, left_out = run(contenders()[2:], site, QUESTIONS, 8, 2)
    assert list(left_out) == ["vLLM CPU, suffix"]
    assert found["vLLM CPU"].seconds == {"edits": [0.25, 0.25], "retry": [0.25, 0.25]}
    assert found["vLLM CPU, n-gram"].seconds == {"edits": [0.125, 0.125], "retry": [0.125, 0.125]}
    assert found["vLLM CPU"].answers == {"edits": [[1] * 9], "retry": [[1] * 9]}
    engines = report(contenders(), found)
    assert engines["vLLM CPU, n-gram"]["version"] == "7"
    assert engines["vLLM CPU, n-gram"]["workloads"]["edits"]["times_as_fast"] == 2.0


def test_suffix_decoding_is_installed_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, asked = Environment(site.home, "vllm"), list[tuple[str, ...]]()
    packages = site.home / "vllm/lib"
    monkeypatch.setattr(environment, "site_packages", lambda: packages)
    monkeypatch.setattr(environment, "pip", lambda *arguments: asked.append(arguments))
    add_suffix_decoding(environment)
    assert asked == [("--no-deps", ARCTIC_INFERENCE)]
    (packages / "arctic_inference").mkdir(parents=True)
    add_suffix_decoding(environment)
    assert len(asked) == 1


def test_an_installation_without_suffix_decoding_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: str) -> None:
        raise subprocess.CalledProcessError(1, arguments)

    environment = Environment(site.home, "vllm")
    monkeypatch.setattr(environment, "site_packages", lambda: site.home)
    monkeypatch.setattr(environment, "pip", fail)
    add_suffix_decoding(environment)
    assert "without suffix decoding, a command ended with status 1" in capsys.readouterr().out


def test_figures_beside_the_same_engine_without_drafts() -> None:
    plain = Found({"version": "1"}, {"edits": [0.010, 0.012, 0.011]}, {"edits": [[1, 2], [3, 4]]})
    drafting = Found({"version": "1"}, {"edits": [0.005, 0.0055, 0.006]}, {"edits": [[1, 2], [3, 5]]})
    assert figures("edits", drafting, plain) == {
        "ms_per_token": 5.5,
        "rounds": [5.0, 5.5, 6.0],
        "times_as_fast": 2.0,
        "answers": 2,
        "changed_answers": 1,
    }
    assert (
        figures("edits", plain, plain)
        == figures("edits", plain, None)
        == {
            "ms_per_token": 11.0,
            "rounds": [10.0, 12.0, 11.0],
        }
    )


def test_the_table_has_a_column_for_each_engine() -> None:
    plain = Found({"version": "1"}, {"retry": [0.010]}, {"retry": [[1, 2]]})
    drafting = Found({"version": "1"}, {"retry": [0.004]}, {"retry": [[1, 2]]})
    engines = report(contenders(), {"raydix": plain, "raydix, drafts": drafting})
    assert table(engines).splitlines() == [
        "| ms per token | raydix | raydix, drafts |",
        "| --- | --- | --- |",
        "| the same question again | 10.00 | 4.00 (x 2.50, 0 of 1 changed) |",
    ]
    assert report(contenders(), {"vLLM CPU, suffix": drafting})["vLLM CPU, suffix"]["workloads"]["retry"] == {
        "ms_per_token": 4.0,
        "rounds": [4.0],
    }
    assert table({}) == "| ms per token |\n| --- |"
