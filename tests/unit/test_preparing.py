"""What is done once before the workers start."""

from dataclasses import replace
from pathlib import Path

import pytest

from raydix.configs import load_config
from raydix.configs.settings import engine_settings
from raydix.engine.model.preparing import prepare


def test_kernels_for_cpus_are_not_built_for_a_worker_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIX_CACHE", str(tmp_path / "nothing has been built"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = load_config("gpu_single")
    settings = engine_settings(config, config.workers.sections["mixed"])
    steps: list[str] = []
    prepare([replace(settings, source=str(tmp_path / "model"))], steps.append)
    assert steps and not any("kernels" in step for step in steps)
