"""The contract of skips, in a pytest of its own, and each line of the list against this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import ALLOWED, NO_PRODUCT, Skip, fault

ROOT = Path(__file__).parents[2]
GEMMA = "RAYDIX_GEMMA3_GGUF names no file"


def run(folder: Path, source: str, name: str = "test_gemma.py", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `source` as a file of tests/model in a tree with this project's hooks."""
    file = folder / "tests" / "model" / name
    file.parent.mkdir(parents=True)
    file.write_text("import pytest\n" + source)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), "-c", os.devnull]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", str(file)]
    environment = {name: value for name, value in os.environ.items() if name != "RAYDIX_GEMMA3_GGUF"} | env
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, env=environment, capture_output=True, text=True)


SKIPPED = """
def test_a(): pytest.skip({reason!r})
@pytest.mark.skipif(True, reason={reason!r})
def test_b(): pass
@pytest.fixture
def absent(): pytest.skip({reason!r})
def test_c(absent): pass
"""


def test_a_listed_skip_is_a_skip(tmp_path: Path) -> None:
    result = run(tmp_path, SKIPPED.format(reason=GEMMA))
    assert (result.returncode, "3 skipped" in result.stdout) == (0, True), result.stdout


def test_a_listed_skip_on_another_machine_fails(tmp_path: Path) -> None:
    result = run(tmp_path, SKIPPED.format(reason=GEMMA), RAYDIX_GEMMA3_GGUF="/a/file")
    assert (result.returncode, "skipped" in result.stdout.splitlines()[-1]) == (1, False), result.stdout
    assert "but this machine is not one without that file" in result.stdout


@pytest.mark.parametrize(
    "source",
    [
        SKIPPED.format(reason="it is slow today"),
        "pytest.skip('no time', allow_module_level=True)",
        "pytest.importorskip('a_package_that_is_not_there', reason='no package')",
    ],
    ids=["tests", "module", "import"],
)
def test_any_other_skip_fails(source: str, tmp_path: Path) -> None:
    result = run(tmp_path, source)
    assert result.returncode and "that tests/skips.py does not list" in result.stdout, result.stdout
    assert "skipped" not in result.stdout.splitlines()[-1]


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    result = run(tmp_path, "@pytest.mark.xfail\ndef test_a(): assert False")
    assert (result.returncode, "1 xfailed" in result.stdout) == (0, True), result.stdout


def test_a_reason_counts_for_the_tests_of_its_line_alone() -> None:
    allowed = (Skip("tests/model/", "no disk", "without a disk", lambda: True),)
    assert fault("tests/model/test_a.py::test_b[c]", "no disk", allowed) is None
    assert fault("tests/unit/test_a.py::test_b", "no disk", allowed) is not None
    assert fault("tests/model/test_a.py::test_b", "no disk at all", allowed) is not None


def test_exactness_is_never_skipped_where_the_processor_has_the_product() -> None:
    """The list looks at the processor, the kernels say what they have: both must agree."""
    from raydix.kernels.cpp import cpu_ops

    ops = cpu_ops()
    has_product = ops is not None and ops.has_linear()
    assert (fault("tests/kernels/test_linear.py::test_a", NO_PRODUCT) is None) == (not has_product)


@pytest.mark.parametrize("line", ALLOWED, ids=lambda line: f"{line.tests} {line.where}")
def test_each_line_can_be_decided_here_and_names_tests_that_exist(line: Skip) -> None:
    assert line.holds() in (True, False)
    assert (ROOT / line.tests).exists()
