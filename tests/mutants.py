"""Small faults in the project's functions, each of which some test must see: `python -m tests.mutants --since main`.

A *mutant* is a function with one small fault: another comparison, a lost `not`, a count off by one, a return of None, a
dropped statement, or an error in place of the whole body. Its tests are those nearest to the module by imports. All are
collected once, and run once in a fork that notes which of them call which function. Then each mutant has a fork of its
own, in which the function gets the faulty code and the tests of that function run, the quickest first, until one fails:
a mutant costs what its tests take, and no imports.

A mutant *survives* if all its tests pass. One whose tests need far more processor time than before, or stand still, is
seen. Mutants that change nothing cannot be told apart from others that survive.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import math
import os
import pickle
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import psutil
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "cli", "configs", "engine", "kernels")
PARTS = (*PACKAGES, "raydix", "tests")
STILL_S = 20.0
"""Time without any progress after which a process counts as one that stands still."""
SPARE_S = 10.0
"""Processor time that a mutant may use beside `TIMES` that of its tests."""
TIMES = 5
MEMORY_BYTES = 4 << 30
"""Memory that a mutant may take beside what it is forked with."""

SURVIVED, SEEN, NOT_APPLIED = range(3)
"""Exit codes of a mutant's process."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, int]
"""Qualified name and first line, decorators among them, of a function."""

OTHER_OPERATORS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One fault; `code` is the function's whole tree with the fault in it."""

    function: str
    line: int
    fault: str
    code: Function

    @property
    def place(self) -> Place:
        return self.function, first_line(self.code)


def first_line(function: Function) -> int:
    return min(each.lineno for each in (function, *function.decorator_list))


def functions_of(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods by qualified name. Functions inside them are parts of them."""

    def inside(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function):
                yield prefix + node.name, node

    yield from inside(tree.body, "")


def mutants_of(name: str, function: Function) -> Iterator[Mutant]:
    """All mutants of a function. What only holds for the programmer stays: assertions, annotations, and texts."""
    for node in _nodes(function):
        for fault, change in _faults(node):
            memo: dict[int, Any] = {}
            changed = copy.deepcopy(function, memo)
            change(memo[id(node)])
            yield Mutant(name, getattr(node, "lineno", function.lineno), fault, changed)
    whole = copy.deepcopy(function)
    whole.body.insert(0, ast.Raise(ast.Call(ast.Name("RuntimeError", ast.Load()), [ast.Constant("a mutant")], [])))
    yield Mutant(name, function.lineno, "raise in place of the body", whole)


def _nodes(root: Function) -> Iterator[ast.AST]:
    """The nodes of a function's statements, each once."""
    todo: list[ast.AST] = [*reversed(root.body)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assert | ast.JoinedStr):
            continue
        yield node
        for name, value in reversed(list(ast.iter_fields(node))):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            todo += [child for child in reversed(children) if isinstance(child, ast.AST)]


def _faults(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Faults of one node: a name, and what makes the fault in a copy of the node."""
    match node:
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                other = OTHER_OPERATORS[type(operator)]

                def compare(each: Any, place: int = place, other: type[ast.AST] = other) -> None:
                    each.ops[place] = other()

                yield f"{type(operator).__name__} -> {other.__name__}", compare
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) | ast.AugAssign(op=operator):
            if type(operator) in OTHER_OPERATORS:
                other = OTHER_OPERATORS[type(operator)]
                yield f"{type(operator).__name__} -> {other.__name__}", lambda each: setattr(each, "op", other())
        case ast.UnaryOp(op=ast.Not()):
            yield "not dropped", lambda each: _become(each, ast.Call(ast.Name("bool", ast.Load()), [each.operand], []))
        case ast.Constant(value=bool() as value):
            yield f"{value} -> {not value}", lambda each: setattr(each, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield f"{value} -> {value + 1}", lambda each: setattr(each, "value", value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAMES:
            yield f"{name} -> {OTHER_NAMES[name]}", lambda each: setattr(each.func, "id", OTHER_NAMES[name])
        case ast.Return(value=ast.expr() as given) if not (isinstance(given, ast.Constant) and given.value is None):
            yield "return None", lambda each: setattr(each, "value", ast.Constant(None))
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "test negated", lambda each: setattr(each, "test", ast.UnaryOp(ast.Not(), each.test))
    if _may_be_dropped(node):
        yield f"dropped: {ast.unparse(node).splitlines()[0][:60]}", lambda each: _become(each, ast.Pass())


def _may_be_dropped(node: ast.AST) -> bool:
    """True of statements that do something by themselves. Without a name's first assignment any test would fail."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)


def _become(node: Any, other: ast.AST) -> None:
    """Make a node another one in its place."""
    location = {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    node.__dict__.clear()
    node.__class__ = other.__class__
    node.__dict__.update(other.__dict__ | location)


class Target:
    """A module whose functions get faults."""

    def __init__(self, name: str) -> None:
        self.module: ModuleType = importlib.import_module(name)
        assert self.module.__file__ is not None
        self.file = self.module.__file__
        self.tree = ast.parse(Path(self.file).read_text())

    def mutants(self, lines: set[int] | None) -> list[Mutant]:
        """The mutants of each function with one of these lines; of all functions for None."""
        return [
            mutant
            for name, function in functions_of(self.tree)
            if name.rpartition(".")[2] != "check_integrity"  # assertions, in a loop
            if lines is None or not lines.isdisjoint(range(first_line(function), (function.end_lineno or 0) + 1))
            for mutant in mutants_of(name, function)
        ]

    def apply(self, mutant: Mutant) -> None:
        """Give the function in this process the faulty code, whoever holds the function already.

        Raises ValueError for a fault that takes away the last use of a variable of an outer function.
        """
        tree = copy.deepcopy(self.tree)
        for name, function in functions_of(tree):
            if (name, first_line(function)) == mutant.place:
                function.body = mutant.code.body
        code = compile(ast.fix_missing_locations(tree), self.file, "exec")
        [faulty] = [each for each in _codes(code) if _place(each) == mutant.place]
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and (each.__code__.co_filename, _place(each.__code__)) == (
                self.file,
                mutant.place,
            ):
                each.__code__ = faulty


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno


@dataclass
class Baseline:
    """What one test does without a fault."""

    item: pytest.Item
    seconds: float
    """Of processor time."""
    calls: set[tuple[str, Place]]
    """Functions of the modules, by file, that were called."""


class Trials:
    """A pytest plugin that runs each mutant's tests in a fork, in place of the tests themselves."""

    def __init__(self, targets: Mapping[str, set[int] | None], num_processes: int) -> None:
        """`targets`: the lines whose functions get faults, by module; None for all."""
        self._lines = targets
        self._num_processes = num_processes
        self.num_seen = 0
        self.survivors: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Have Hypothesis try the same examples for each mutant, and not look for the least that fails."""
        from hypothesis import Phase, settings  # which pytest wants to import first

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.default, database=None, derandomize=True, phases=phases)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "the tests cannot be collected"
        targets = [Target(name) for name in self._lines]
        baselines = self._baselines(session.items, {target.file for target in targets})
        began = time.monotonic()
        todo = [
            (target, mutant, [each for each in baselines if (target.file, mutant.place) in each.calls])
            for target in targets
            for mutant in target.mutants(self._lines[target.module.__name__])
        ]
        running: dict[int, Trial] = {}  # by descriptor of the process
        while todo or running:
            while todo and len(running) < self._num_processes:
                trial = Trial(*todo.pop(0))
                running[trial.descriptor] = trial
            ended, _, _ = select.select(running, [], [], STILL_S)
            for descriptor in ended:
                self._note(running.pop(descriptor))
            for trial in running.values():
                trial.kill_if_still()
        num = self.num_seen + len(self.survivors)
        print(f"\n{self.num_seen} of {num} mutants seen by {len(baselines)} tests, {time.monotonic() - began:.0f} s")
        return True

    def _note(self, trial: "Trial") -> None:
        outcome = trial.end()
        if outcome == NOT_APPLIED:
            return
        if outcome != SURVIVED:
            self.num_seen += 1
            return
        place = f"{Path(trial.target.file).relative_to(ROOT)}:{trial.mutant.line}"
        self.survivors.append(f"{place} {trial.mutant.function}: {trial.mutant.fault} ({trial.num_tests} tests)")
        print(self.survivors[-1], flush=True)

    def _baselines(self, items: list[pytest.Item], files: set[str]) -> list[Baseline]:
        """The tests that pass, the quickest first, run once in a fork."""
        with tempfile.TemporaryFile() as found:
            pid = os.fork()
            if not pid:
                _be_quiet()
                pickle.dump(list(_observed(items, files)), found)
                found.flush()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the tests end their process"
            found.seek(0)
            outcomes = pickle.load(found)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is None:
                print(f"{item.nodeid} fails without a fault, and is left out")
        passed = [Baseline(item, *each) for item, each in zip(items, outcomes, strict=True) if each is not None]
        return sorted(passed, key=lambda each: each.seconds)


def _observed(items: list[pytest.Item], files: set[str]) -> Iterator[tuple[float, set[tuple[str, Place]]] | None]:
    """Seconds and calls of each test; None for one that fails."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        calls = set[tuple[str, Place]]()

        def note(frame: FrameType, event: str, _: object, calls: set[tuple[str, Place]] = calls) -> None:
            if event == "call" and (code := frame.f_code).co_filename in files:
                calls.add((code.co_filename, _place(code)))

        began = time.process_time()
        threading.setprofile(note)
        sys.setprofile(note)
        passed = _passes(item, following)
        sys.setprofile(None)
        threading.setprofile(None)
        yield (time.process_time() - began, calls) if passed else None


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))


def _be_quiet() -> None:
    """Write nothing any more, and be the head of a group of processes that can be killed together."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)


class Trial:
    """A process that runs the tests of a mutant."""

    def __init__(self, target: Target, mutant: Mutant, baselines: list[Baseline]) -> None:
        self.target = target
        self.mutant = mutant
        self.num_tests = len(baselines)
        self._pid = os.fork()
        if not self._pid:
            _be_quiet()
            os._exit(self._run(baselines))
        self.descriptor = os.pidfd_open(self._pid)
        self._checked_s = time.monotonic()
        self._used_s = -1.0

    def _run(self, baselines: list[Baseline]) -> int:
        seconds = math.ceil(SPARE_S + TIMES * sum(each.seconds for each in baselines))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        memory = psutil.Process().memory_info().data + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        try:
            self.target.apply(self.mutant)
        except ValueError:
            return NOT_APPLIED
        items = [each.item for each in baselines]
        return SURVIVED if all(map(_passes, items, [*items[1:], None])) else SEEN

    def kill_if_still(self) -> None:
        """Kill the process if it has used no processor time for `STILL_S`, and does not wait for a processor."""
        if time.monotonic() - self._checked_s < STILL_S:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            family = [process, *process.children(recursive=True)]
            used_s = sum(sum(each.cpu_times()[:2]) for each in family)
            if used_s == self._used_s and all(each.status() == psutil.STATUS_SLEEPING for each in family):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            self._checked_s, self._used_s = time.monotonic(), used_s

    def end(self) -> int:
        """The outcome, once the process has ended; kills processes that it has left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def changed_lines(diff: str) -> dict[str, set[int]]:
    """Lines by file that a diff without context adds or changes, and those beside which it takes some away."""
    lines: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, num = int(found[1]), int(found[2] or 1)
            lines.setdefault(file, set()).update(range(first, first + max(1, num)))
    return lines


def module_of(file: str) -> str:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"raydix.{name}" if name.partition(".")[0] in PACKAGES else name


@cache
def importers() -> dict[str, set[str]]:
    """The files, from the root of the tree, that import a module or a name in one."""
    found: dict[str, set[str]] = {}
    for path in (path for part in PARTS for path in (ROOT / part).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
            for name in names:
                found.setdefault(name, set()).add(file)
    return found


def nearest_tests(modules: Iterable[str]) -> list[str]:
    """The files of unit tests that import one of the modules over the fewest others."""
    found = set[str]()
    for module in modules:
        known, border, tests = {module}, {module}, set[str]()
        while border and not tests:
            files = {file for name in border for file in importers().get(name, ())}
            tests = {file for file in files if file.startswith("tests/unit/test_")}
            border = {module_of(file) for file in files} - known
            known |= border
        found |= tests
    return sorted(found)


def main() -> None:
    """Try the mutants of modules or of a change; exit with 1 if too many survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules or their files, all of whose functions get faults")
    parser.add_argument("--since", default="HEAD", help="without modules: the commit with which the tree is compared")
    parser.add_argument("--tests", nargs="+", help="files of tests; by default those nearest by imports")
    parser.add_argument("--floor", type=float, default=0.95, help="the part of all mutants that must be seen")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    targets: dict[str, set[int] | None] = {module_of(each): None for each in options.modules}
    if not targets:
        diff = subprocess.run(
            [
                "git",
                "diff",
                "--unified=0",
                "--no-color",
                options.since,
                "--",
                *(part for part in PARTS if part != "tests"),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
        targets = {module_of(file): lines for file, lines in changed_lines(diff).items() if file.endswith(".py")}
    tests = options.tests or nearest_tests(targets)
    if not targets or not tests:
        sys.exit("nothing to try: no function has changed, or no test imports the modules")
    trials = Trials(targets, options.processes)
    quiet = ["-q", "-p", "no:cacheprovider", "--capture=no", "-m", "not gpu"]
    assert pytest.main([*quiet, *tests], plugins=[trials]) == pytest.ExitCode.OK
    seen, survived = trials.num_seen, len(trials.survivors)
    sys.exit(seen < options.floor * (seen + survived))


if __name__ == "__main__":
    main()
