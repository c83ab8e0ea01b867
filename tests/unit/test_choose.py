"""Which configuration `raydix serve` takes by itself, and what it believes the machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raydix.cli.cluster import free_port
from raydix.cli.machine import this_machine
from raydix.configs import load_config
from raydix.configs.choose import Machine, choose
from raydix.engine.core.settings import GIB
from raydix.engine.model.host import num_cores

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("machine", "config", "because"),
    [
        (Machine(2, 24), "cpu_mixed", "2 cores and no GPU"),
        (Machine(1, 24), "cpu_mixed", "one core and no GPU"),
        (Machine(3, 400), "cpu_mixed", "3 cores and no GPU"),
        (Machine(4, 24), "cpu", "4 cores and no GPU"),
        (Machine(64, 8), "cpu_mixed", "8 GiB of memory"),
        (Machine(64, 12), "cpu", "64 cores and no GPU"),
        (Machine(16, 128, (80,)), "gpu_single", "one GPU"),
        (Machine(2, 12, (80, 80)), "gpu_single", "one GPU"),
        (Machine(16, 128, (80, 80, 80, 80)), "gpu_disaggregated", "4 GPUs"),
        (Machine(16, 128, (80, 8)), "gpu_single", "one GPU"),
        (Machine(16, 128, (16,)), "gpu_single", "one GPU"),
        (Machine(16, 128, (4,)), "cpu_mixed", "a GPU of 4 GiB"),
    ],
)
def test_each_machine_gets_what_suits_it_and_hears_why(machine: Machine, config: str, because: str) -> None:
    choice = choose(machine)
    assert choice.config == config
    assert because in choice.reason
    load_config(choice.config)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000\n", None),
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("99900000 100000\n", None),
        ("0 0\n", None),
        ("nonsense", None),
    ],
)
def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, limit: str, expected: int | None) -> None:
    without = num_cores(tmp_path / "nowhere")
    assert without >= 1
    own = tmp_path / "own"
    own.write_text("0::/pod/mine\n4:cpu,cpuacct:/pod/mine\n")
    (tmp_path / "second" / "pod" / "mine").mkdir(parents=True)
    # A quota of a group around this one holds, too.
    (tmp_path / "second" / "pod" / "cpu.max").write_text(limit)
    assert num_cores(tmp_path / "second", own) == (expected or without)
    assert this_machine(tmp_path / "second", own).num_cores == (expected or without)

    folder = tmp_path / "first" / "cpu" / "pod" / "mine"
    folder.mkdir(parents=True)
    quota, period = limit.replace("max", "-1").split() if " " in limit else (limit, "100000")  # as version 1 says it
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text(period)
    assert num_cores(tmp_path / "first", own) == (expected or without)


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path) -> None:
    without = this_machine(tmp_path).memory_gib
    (tmp_path / "memory.max").write_text("max\n")
    assert this_machine(tmp_path).memory_gib == without
    (tmp_path / "memory.max").write_text(f"{GIB // 2}\n")
    assert this_machine(tmp_path).memory_gib == 0.5


@pytest.mark.parametrize("named", [(), ("--config", "cpu")])
def test_serve_says_what_it_chose_and_nothing_of_what_was_named(tmp_path: Path, named: tuple[str, ...]) -> None:
    """Up to where Ray would start: this one ends the process."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("import os\nos._exit(99)\n")
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **dict.fromkeys(fields, 16)}
    (tmp_path / "config.json").write_text(json.dumps(model))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "raydix.cli.main",
            "serve",
            "--model",
            str(tmp_path),
            "--port",
            str(free_port()),
            *named,
        ],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=240,
        check=False,
    )
    assert done.returncode == 99, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("configuration ")]
    choice = choose(this_machine())
    assert said == ([] if named else [f"configuration {choice.config} for {choice.reason} (--config takes another)"])
    assert "KV pool of" in done.stderr and "requests of up to 64 tokens" in done.stderr
