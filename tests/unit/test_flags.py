"""Options for single keys, and files of one's own over the configuration that suits the machine."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from raydix.cli import restart
from raydix.cli.flags import FLAGS, add_flags
from raydix.cli.main import parser
from raydix.cli.serve import chosen
from raydix.configs import Config, load_config
from raydix.configs.choose import Machine
from raydix.engine.core.errors import StartupError
from raydix.engine.core.tenants import key_hash

SMALL, LARGE, GPU = Machine(2, 24), Machine(8, 32), Machine(8, 64, (80.0,))


def config_of(machine: Machine, *words: str) -> Config:
    options = parser().parse_args(["serve", *words])
    return chosen(options.config or (), {}, machine, options)[1]


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_each_option_sets_its_key() -> None:
    words = {
        "--max-model-len": "4096",
        "--dtype": "float32",
        "--quantization": "int8",
        "--served-model-name": "123",
        "--kv-cache-gib": "1.5",
        "--kv-cache-dtype": "int8",
        "--max-num-seqs": "9",
        "--token-budget": "99",
        "--workers": "3",
    }
    assert words.keys() == FLAGS.keys()
    config = config_of(LARGE, *(word for pair in words.items() for word in pair))
    model, cache = config.model, config.cache
    assert (model.max_model_len, model.dtype, model.quantization, model.name) == (4096, "float32", "int8", "123")
    assert (cache.pool_gib, cache.dtype) == (1.5, "int8")
    for section in config.workers.sections.values():
        assert (section.max_requests, section.token_budget, section.replicas) == (9, 99, 3)
    assert config_of(SMALL, "--max-model-len", "auto").model.max_model_len is None


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--max-model-len", "3", "greater than or equal to 16"),
        ("--dtype", "int3", "'bfloat16', 'float16' or 'float32'"),
        ("--kv-cache-gib", "0", "greater than 0"),
        ("--kv-cache-dtype", "fp8", "'auto' or 'int8'"),
        ("--workers", "many", "valid integer"),
    ],
)
def test_bounds_are_the_schema_s(flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", flag, value])
    told = capsys.readouterr().err
    assert f"argument {flag}: {value!r}: " in told and says in told


def test_the_help_has_the_schema_s_sentences() -> None:
    command = argparse.ArgumentParser()
    add_flags(command)
    told = " ".join(command.format_help().split())
    assert "model.dtype: Weights, activations, KV." in told and "up to 90 % of its memory" in told


@pytest.mark.parametrize(
    ("role", "roles", "budgets"),
    [
        ("mixed", ["mixed"], [256]),
        ("prefill-decode", ["prefill", "decode"], [512, 128]),
        ("elastic", ["elastic"], [512]),
    ],
)
def test_roles(role: str, roles: list[str], budgets: list[int]) -> None:
    for machine in (SMALL, LARGE):
        sections = config_of(machine, "--role", role, "--workers", "2").workers.sections
        assert list(sections) == roles
        assert [section.token_budget for section in sections.values()] == budgets
        assert all(section.replicas == 2 for section in sections.values())


def test_a_key_for_all_clients(file: Any) -> None:
    (tenant,) = config_of(SMALL, "--api-key", "secret").tenants
    assert tenant.key_hashes == (key_hash("secret"),) and tenant.admin
    with pytest.raises(StartupError, match="--api-key is for a server without tenants"):
        config_of(SMALL, "--config", file("tenants: [{name: a}]"), "--api-key", "secret")


def test_a_file_of_one_s_own_changes_only_what_it_says(file: Any) -> None:
    tenants = file("tenants: [{name: alice}]")
    for machine, name in ((SMALL, "cpu_mixed"), (LARGE, "cpu"), (GPU, "gpu_single")):
        own = config_of(machine, "--config", tenants)
        assert own.tenants and own.model_copy(update={"tenants": ()}) == load_config(name)
    mixed = config_of(LARGE, "--config", file("workers: {mixed: {max_requests: 8}}")).workers
    assert list(mixed.sections) == ["mixed"] and mixed.mixed is not None
    assert (mixed.mixed.token_budget, mixed.mixed.max_requests) == (256, 8), "of the configuration with these roles"
    both = config_of(SMALL, "--config", tenants, "--config", file("cache: {segment_gib: 0.5}"))
    assert (both.tenants[0].name, both.cache.segment_gib) == ("alice", 0.5)


def test_one_of_raydix_s_own_stands_by_itself(file: Any) -> None:
    assert config_of(SMALL, "--config", "cpu") == load_config("cpu")
    over = config_of(GPU, "--config", "cpu_mixed", "--config", file("tenants: [{name: a}]"), "--max-num-seqs", "7")
    assert over.workers.mixed is not None
    assert (over.workers.mixed.device, over.workers.mixed.max_requests) == ("auto", 7)


def test_roles_of_no_configuration_of_raydix_s_own(file: Any) -> None:
    config = config_of(SMALL, "--config", file("workers: {elastic: {max_replicas: 3}}"))
    assert list(config.workers.sections) == ["elastic"]
    with pytest.raises(StartupError, match=r"--role mixed contradicts .*: elastic"):
        config_of(SMALL, "--config", file("workers: {elastic: {}}"), "--role", "mixed")


def test_a_restarted_server_has_the_same_options() -> None:
    words = ["--max-model-len", "4096", "--served-model-name", "m", "--role", "mixed", "--api-key", "k"]
    options = parser().parse_args(["serve", *words, "--restart"])
    command = restart._command(options)
    assert parser().parse_args(command[command.index("serve") :]) == parser().parse_args(["serve", *words])
