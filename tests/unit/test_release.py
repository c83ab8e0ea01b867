"""A release is refused while its parts name different versions, and its workflow names what there is."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release import ROOT, faults

WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
DIGEST = "@sha256:" + "0" * 64


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that can be released as 0.1.0."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "CHANGELOG.md").write_text("## 0.1.0\n")
    for name in ("Dockerfile", "Dockerfile.cpu"):
        file = tmp_path / "k8s" / name
        pinned = re.sub(r"^(ARG \w+_IMAGE=[^@\n]+)(@\S+)?$", rf"\1{DIGEST}", file.read_text(), flags=re.MULTILINE)
        file.write_text(pinned)
    return tmp_path


def test_a_tree_that_agrees_is_released(tree: Path) -> None:
    assert faults("v0.1.0", tree) == []


@pytest.mark.parametrize("tag", ["v0.1.1", "0.1.0"])
def test_another_tag_is_refused(tree: Path, tag: str) -> None:
    assert faults(tag, tree) == [f"the tag is {tag}, pyproject.toml has version 0.1.0: the tag must be v0.1.0"]


@pytest.mark.parametrize(
    ("path", "old", "new", "part"),
    [
        ("k8s/chart/Chart.yaml", "\nversion: 0.1.0", "\nversion: 0.0.9", "version is 0.0.9"),
        ("k8s/chart/Chart.yaml", "appVersion: 0.1.0", "appVersion: 0.0.9", "appVersion is 0.0.9"),
        ("CHANGELOG.md", "0.1.0", "Unreleased", "no heading '## 0.1.0'"),
        ("k8s/Dockerfile.cpu", DIGEST, "", "Dockerfile.cpu: PYTHON_IMAGE=python:3.12-slim has no digest"),
    ],
)
def test_what_does_not_agree_is_named(tree: Path, path: str, old: str, new: str, part: str) -> None:
    file = tree / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    [fault] = faults("v0.1.0", tree)
    assert part in fault


def test_nothing_is_published_before_the_check() -> None:
    assert [name for name, job in JOBS.items() if job.get("needs") != "check"] == ["check"]
    assert any(step.get("run") == ".ci/run" for step in JOBS["check"]["steps"])


def test_the_workflow_names_what_there_is() -> None:
    steps = [step for job in JOBS.values() for step in job["steps"]]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [target for step in steps for target in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))]
    assert asked and set(asked) <= set(targets)
    images = JOBS["images"]["strategy"]["matrix"]["include"]
    assert {image["file"] for image in images} == {
        str(path.relative_to(ROOT)) for path in ROOT.glob("k8s/Dockerfile*") if path.suffix != ".dockerignore"
    }
