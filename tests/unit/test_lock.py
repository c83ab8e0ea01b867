"""The lock files: they pin what pyproject.toml asks for, of the images by hash, the CPU image's nothing of CUDA."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "k8s/lock"
DOCKERFILE = (ROOT / "k8s/Dockerfile.cpu").read_text()
APART = {"torch", "triton"}
"""torch has a line of its own in the Dockerfile, and no pod without a GPU imports triton."""


def locked(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package of a lock file."""
    lines = re.sub(r"#.*\n", "", path.read_text()).replace("\\\n", " ").splitlines()
    found: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        requirement, *hashes = line.split()
        name, version = requirement.split("==")
        found[canonicalize_name(name)] = (version, hashes)
    return found


def wanted(*extras: str) -> list[Requirement]:
    """What the project depends on, with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = [text for extra in extras for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in (*project["dependencies"], *of_extras)]


@pytest.mark.parametrize("path", sorted(LOCK.glob("*.txt"), key=str), ids=lambda path: path.stem)
def test_every_package_has_hashes(path: Path) -> None:
    if path.stem == "excluded":
        return
    for name, (version, hashes) in locked(path).items():
        assert version, name
        assert hashes, name
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name


@pytest.mark.parametrize(("image", "apart"), [("cpu", APART), ("gpu", set())])
def test_what_the_project_depends_on_is_locked(image: str, apart: set[str]) -> None:
    """And the exporter of spans, which an operator turns on by a key of the configuration."""
    versions = {name: version for name, (version, _) in locked(LOCK / f"{image}.txt").items()}
    for requirement in wanted("otel"):
        if requirement.name not in apart:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_nothing_of_cuda_is_locked() -> None:
    names = set(locked(LOCK / "cpu.txt"))
    assert not [name for name in names if name in APART or name.startswith(("nvidia", "cuda"))]


def test_the_versions_of_torch_and_ray_agree() -> None:
    [torch] = [requirement for requirement in wanted() if requirement.name == "torch"]
    [version] = re.findall(r"^ARG TORCH_VERSION=(\S+)$", DOCKERFILE, re.M)
    assert torch.specifier.contains(version)
    assert locked(LOCK / "gpu.txt")["torch"][0] == version
    chart = yaml.safe_load((ROOT / "k8s/chart/values.yaml").read_text())
    assert locked(LOCK / "cpu.txt")["ray"][0] == chart["rayVersion"]


def test_both_images_have_the_same_versions() -> None:
    cpu, gpu = (
        {name: version for name, (version, _) in locked(LOCK / f"{each}.txt").items()} for each in ("cpu", "gpu")
    )
    assert cpu.items() <= gpu.items()


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_constraints_have_every_package_that_make_installs(python: str) -> None:
    environment = {"python_full_version": f"{python}.9", "python_version": python}
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    applied = [line for line in lines if line.marker is None or line.marker.evaluate(environment)]
    versions: dict[str, str] = {
        canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in applied
    }
    assert len(versions) == len(applied)
    for requirement in wanted("dev"):
        if requirement.name not in APART:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    assert versions["ray"] == locked(LOCK / "cpu.txt")["ray"][0]
    assert not APART & versions.keys()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_gets_every_file_that_it_needs(name: str) -> None:
    taken = (ROOT / f"k8s/{name}.dockerignore").read_text().splitlines()
    needed = ["pyproject.toml", "README.md", "raydix"]
    needed += [path.name for path in (ROOT / "raydix").iterdir() if path.is_symlink()]  # what the links point to
    assert {f"!{path}" for path in needed} <= set(taken)

    locks = re.findall(r"-r (?:/src/k8s)?(/lock/\S+)", (ROOT / "k8s" / name).read_text())
    assert locks
    for path in locks:
        assert (ROOT / "k8s" / path.lstrip("/")).is_file(), path
        assert {f"!k8s{path}", "!k8s/lock"} & set(taken), path
