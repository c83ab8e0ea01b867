"""The mutants of a function, what a change touches, and a whole run over a module and tests of its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import changed_lines, functions_of, mutants_of, nearest_tests

ROOT = Path(__file__).parents[2]
SOURCE = """
class Count:
    def up(self, most: int = 5) -> int:
        assert most > 0, "never"
        if not self.closed and self.value < most:
            self.value += 1
        return self.value

def outer():
    def inner():
        return min(1, 2)
    inner()
"""


def faults(name: str) -> list[str]:
    [function] = [function for each, function in functions_of(ast.parse(SOURCE)) if each == name]
    return [mutant.fault for mutant in mutants_of(name, function)]


def test_a_function_s_mutants() -> None:
    assert faults("Count.up") == [
        "test negated",
        "And -> Or",
        "not dropped",
        "Lt -> LtE",
        "Add -> Sub",
        "dropped: self.value += 1",
        "1 -> 2",
        "return None",
        "raise in place of the body",
    ]


def test_a_function_inside_another_is_a_part_of_it() -> None:
    assert [name for name, _ in functions_of(ast.parse(SOURCE))] == ["Count.up", "outer"]
    assert "min -> max" in faults("outer") and "dropped: inner()" in faults("outer")


def test_a_mutant_has_its_fault_and_nothing_else() -> None:
    [function] = [function for name, function in functions_of(ast.parse(SOURCE)) if name == "Count.up"]
    before = ast.unparse(function)
    changed = {mutant.fault: ast.unparse(mutant.code) for mutant in mutants_of("Count.up", function)}
    assert ast.unparse(function) == before
    assert changed["Lt -> LtE"] == before.replace("<", "<=")
    assert changed["dropped: self.value += 1"] == before.replace("self.value += 1", "pass")


def test_lines_that_a_change_touches() -> None:
    diff = "--- a/x.py\n+++ b/x.py\n@@ -3,2 +3,3 @@ def f\n+a\n+b\n+c\n@@ -9 +10,0 @@\n-z\n+++ b/y.py\n@@ -1 +1 @@\n"
    assert changed_lines(diff) == {"x.py": {3, 4, 5, 10}, "y.py": {1}}


def test_the_tests_nearest_to_a_module() -> None:
    assert "tests/unit/test_shares.py" in nearest_tests(["raydix.engine.core.shares"])
    assert "tests/unit/test_fairness.py" in nearest_tests(["raydix.engine.core.worker.order"])


MODULE = """
class Gate:
    @property
    def is_open(self) -> bool:
        return self.num < 2

    def __init__(self) -> None:
        self.num = 0

    def enter(self) -> None:
        while not self.is_open:
            pass
        self.num += 1
"""
TESTS = """
from gate import Gate

def test_two_enter():
    gate = Gate()
    gate.enter()
    assert gate.is_open
    gate.enter()
    {}
"""


@pytest.mark.parametrize(("last", "survivors"), [("assert not gate.is_open", 0), ("assert gate.num == 2", 2)])
def test_faults_that_the_tests_do_not_see_are_named(last: str, survivors: int, tmp_path: Path) -> None:
    """Another comparison in `is_open` is seen by one of the tests only, and an endless loop by both."""
    (tmp_path / "gate.py").write_text(MODULE)
    (tmp_path / "test_gate.py").write_text(TESTS.format(last))
    program = "import sys, tests.mutants as tool; from pathlib import Path; tool.SPARE_S = 1; "
    program += f"tool.ROOT = Path({str(tmp_path)!r}); tool.main()"
    command = [sys.executable, "-c", program, "gate", "--tests", "test_gate.py"]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    named = [line for line in done.stdout.splitlines() if line.startswith("gate.py:")]
    assert (len(named), done.returncode) == (survivors, int(survivors > 0)), done.stdout + done.stderr
