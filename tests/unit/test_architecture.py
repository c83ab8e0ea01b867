"""Each part of the project imports only what stands below it.

Read from the source, not from running it, so an import inside a function or for type checking counts as well, except
where a test is about what happens when a module is imported.
"""

import ast
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "cli", "configs", "engine", "kernels")
"""Folders of the tree that are packages of `raydix`, which links to them."""
PARTS = ("benchmarks", "raydix")

ROOMS = ("ingress", "manager", "worker")
"""The processes that `engine/core` and `actors` have a folder for."""

MAY_IMPORT = {
    "raydix.configs": {"raydix.configs", "raydix.engine.core", "pydantic", "yaml"},
    "raydix.kernels": {"raydix.kernels", "numpy", "torch", "triton"},
    "raydix.engine.core": {"raydix.engine.core"},
    "raydix.engine.api": {"raydix.engine.api", "raydix.engine.core", "orjson", "pydantic", "pydantic_core"},
    "raydix.engine.batches": {"raydix.engine.api", "raydix.engine.batches", "raydix.engine.core", "orjson"},
    "raydix.engine.serving": {
        "raydix.engine.api",
        "raydix.engine.background",
        "raydix.engine.core",
        "raydix.engine.model",
        "raydix.engine.serving",
        "llguidance",
        "numpy",
        "orjson",
        "psutil",
    },
    "raydix.engine.model": {
        "raydix.engine.core",
        "raydix.engine.model",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "numpy",
        "raydix.kernels",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "xxhash",
    },
}
"""What a part may import beside the standard library."""

MUST_NOT_IMPORT = {
    "raydix.actors": {"benchmarks", "raydix.cli", "raydix.kernels", "raydix.serve_app"},
    "raydix.serve_app": {"benchmarks", "raydix.cli", "raydix.kernels"},
    "raydix.cli": {"raydix.kernels"},
    "raydix.client": {"benchmarks", "raydix.engine.model", "raydix.kernels", "raydix.serve_app"},
    "raydix.llm": {"benchmarks", "raydix.engine.model", "raydix.kernels", "raydix.serve_app"},
    "benchmarks": {"raydix.actors", "raydix.serve_app"},
}

ALONE_MAY_IMPORT = {
    "raydix": {"raydix.client", "raydix.engine.api", "raydix.engine.batches", "raydix.engine.core", "raydix.llm"},
    "raydix.__main__": {"raydix.cli.main"},
    "raydix.engine": set[str](),
    "raydix.engine.background": {"raydix.engine.core"},
}
"""What single modules may import beside the standard library: those that stand between the parts."""

DECIDES_ONLY = {"asyncio", "datetime", "multiprocessing", "random", "secrets", "socket", "threading", "time", "uuid"}
"""Parts of the standard library that bring a clock, chance or I/O into a decision."""

WRITERS = {
    "BlockRecord": ("block_index", "block_index"),
    "PoolRecord": ("stock", "stock"),
    "Segment": ("block_index", "segment_store"),
    "WorkerRecord": ("records", "fleet"),
}
"""Of each record of `raydix.engine.core.manager` its module, and the only one that writes to its fields."""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Import:
    """One imported module; `name` keeps what was taken from it, which may be a submodule."""

    line: int
    name: str
    runs: bool
    """Whether importing the file carries it out: it is not inside a function and not for type checking."""


@cache
def sources() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    modules = {"raydix.serve_app": ROOT / "serve_app.py"}
    for folder in (*PACKAGES, *PARTS):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not file.is_symlink():
                modules[f"raydix.{name}" if folder in PACKAGES else name] = file
    return modules


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    file = sources()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(_walk(ast.parse(file.read_text(), str(file)), package, runs=True))


def _walk(node: ast.AST, package: str, runs: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, alias.name, runs)
        elif isinstance(child, ast.ImportFrom):
            base = _base(child, package)
            for alias in child.names:
                yield Import(child.lineno, f"{base}.{alias.name}", runs)
        elif isinstance(child, FUNCTIONS) or _is_for_type_checking(child):
            yield from _walk(child, package, runs=False)
        else:
            yield from _walk(child, package, runs)


def _is_for_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether `name` is one of `modules` or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def modules_of(part: str) -> list[str]:
    return [module for module in sources() if is_within(module, [part])]


def violations(part: str, forbidden: set[str]) -> list[str]:
    """`file:line imports name` for each import of `part` that is forbidden."""
    return imports_where(modules_of(part), lambda name: is_within(name, forbidden))


def not_allowed(modules: Iterable[str], allowed: set[str]) -> list[str]:
    """`file:line imports name` for each import that is neither allowed nor of the standard library."""
    return imports_where(
        modules, lambda name: not is_within(name, allowed) and name.split(".")[0] not in sys.stdlib_module_names
    )


def imports_where(modules: Iterable[str], is_wrong: Callable[[str], bool]) -> list[str]:
    return [
        f"{sources()[module].relative_to(ROOT)}:{found.line} imports {found.name}"
        for module in modules
        for found in imports_of(module)
        if is_wrong(found.name)
    ]


def loaded_by(module: str) -> set[str]:
    """Everything that importing `module` imports, each with the packages around it."""
    assert module in sources()
    loaded: set[str] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        parents = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
        if name.split(".")[0] not in PARTS:
            loaded.update(parents)
            continue
        for known in parents:
            if known in sources() and known not in loaded:
                loaded.add(known)
                queue += [found.name for found in imports_of(known) if found.runs]
    return loaded


def fields_of(module: str, name: str) -> set[str]:
    """The annotated fields of a class."""
    classes = [node for node in ast.parse(sources()[module].read_text()).body if isinstance(node, ast.ClassDef)]
    [found] = [node for node in classes if node.name == name]
    return {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}


def attributes_written(module: str) -> set[str]:
    """Names of the attributes that a module assigns to or deletes, except attributes of `self`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(sources()[module].read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }


def test_every_part_is_found() -> None:
    assert {module.split(".")[0] for module in sources()} == set(PARTS)
    assert {f"raydix.{package}" for package in PACKAGES} <= sources().keys()
    assert {f"raydix.engine.{part}" for part in ("api", "batches", "core", "model", "serving")} <= sources().keys()


def test_every_module_has_a_rule() -> None:
    parts = {*MAY_IMPORT, *MUST_NOT_IMPORT}
    assert [module for module in sources() if not is_within(module, parts) and module not in ALONE_MAY_IMPORT] == []
    assert {*parts, *ALONE_MAY_IMPORT} <= sources().keys()


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_only_what_stands_below(part: str) -> None:
    assert not_allowed(modules_of(part), MAY_IMPORT[part]) == []


@pytest.mark.parametrize("module", ALONE_MAY_IMPORT)
def test_a_module_between_the_parts_imports_only_what_stands_below(module: str) -> None:
    assert not_allowed([module], ALONE_MAY_IMPORT[module]) == []


@pytest.mark.parametrize("part", MUST_NOT_IMPORT)
def test_does_not_import_what_stands_above(part: str) -> None:
    assert violations(part, MUST_NOT_IMPORT[part]) == []


def test_core_has_no_clock_no_chance_and_no_io() -> None:
    assert violations("raydix.engine.core", DECIDES_ONLY) == []


def test_core_holds_no_mutable_module_state() -> None:
    """Collaborators are arguments: no dict, list or set is created at the top of a module of the core."""
    mutable = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    found = [
        f"{sources()[module].relative_to(ROOT)}:{statement.lineno}"
        for module in modules_of("raydix.engine.core")
        for statement in ast.parse(sources()[module].read_text()).body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, mutable)
    ]
    assert found == []


@pytest.mark.parametrize("record", WRITERS)
def test_a_record_has_one_writer(record: str) -> None:
    """No other module of the manager assigns to an attribute with the name of a field, but to its own (`self`)."""
    modules = [*modules_of("raydix.engine.core.manager"), *modules_of("raydix.actors.manager")]
    home, writer = (f"raydix.engine.core.manager.{module}" for module in WRITERS[record])
    fields = fields_of(home, record)
    found = {module: written for module in modules if (written := attributes_written(module) & fields)}
    assert found.keys() == {writer}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_do_not_import_each_other(room: str) -> None:
    """Each room is one process; what two of them need lies beside the rooms, in `engine/core` itself."""
    others = {f"{part}.{other}" for part in ("raydix.actors", "raydix.engine.core") for other in ROOMS if other != room}
    assert violations(f"raydix.engine.core.{room}", others) == []
    assert violations(f"raydix.actors.{room}", others) == []


def test_what_rooms_share_knows_no_room() -> None:
    rooms = [f"raydix.engine.core.{room}" for room in ROOMS]
    shared = [module for module in modules_of("raydix.engine.core") if not is_within(module, rooms)]
    assert [module for module in shared for found in imports_of(module) if is_within(found.name, rooms)] == []


@pytest.mark.parametrize("part", ["raydix.configs", "raydix.engine", "raydix.kernels"])
def test_ray_stays_at_the_edge(part: str) -> None:
    assert violations(part, {"ray"}) == []


def test_everything_is_imported_as_raydix() -> None:
    """Other distributions have packages of the names that the tree's folders have, such as `kernels`."""
    assert sorted(path.name for path in (ROOT / "raydix").iterdir() if path.is_symlink()) == [*PACKAGES, "serve_app.py"]
    assert [found for part in PARTS for found in violations(part, {*PACKAGES, "serve_app"})] == []
    tests = [path for folder in ("docs", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    imports = [found.name for path in tests for found in _walk(ast.parse(path.read_text()), "", runs=True)]
    assert [name for name in imports if is_within(name, {*PACKAGES, "serve_app"})] == []


def test_nothing_imports_its_tests() -> None:
    assert [found for part in PARTS for found in violations(part, {"tests", "pytest", "hypothesis"})] == []


def test_no_test_goes_untyped() -> None:
    """Mypy is strict with every module; only types of other people's packages may be missing."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] and "tests" in settings["packages"] and "exclude" not in settings
    assert [override.keys() for override in settings["overrides"]] == [{"module", "ignore_missing_imports"}]


def test_the_manager_starts_without_torch() -> None:
    loaded = loaded_by("raydix.actors.manager.kv_cache_manager")
    assert "raydix.engine.core.manager.directory" in loaded
    assert not loaded & {"torch", "triton", "transformers", "numpy"}


def test_workers_and_the_manager_start_without_serve() -> None:
    """Serve takes a second of CPU time to import, and a killed actor's successor is waited for."""
    for module in ("raydix.actors.worker.worker", "raydix.actors.manager.kv_cache_manager"):
        assert not loaded_by(module) & {"fastapi", "starlette", "ray.serve"}


def test_parts_of_other_packages_count_as_loaded() -> None:
    assert {"ray", "ray.serve", "ray.serve.config"} <= loaded_by("raydix.actors.scaling")


def test_the_host_starts_without_torch() -> None:
    """A host of the manager is a process of its own, and should not load what only its workers need."""
    assert not loaded_by("raydix.actors.host") & {"torch", "triton", "transformers"}


@pytest.mark.parametrize(
    "module", ["raydix.serve_app", "raydix.actors.ingress.app", "raydix.engine.serving.reader_process"]
)
def test_what_computes_nothing_starts_without_torch(module: str) -> None:
    assert not loaded_by(module) & {"torch", "triton", "transformers"}


@pytest.mark.parametrize("module", ["raydix.cli.serve", "raydix.cli.deploy", "raydix.cli.batch"])
def test_commands_read_a_configuration_before_they_load_ray_or_torch(module: str) -> None:
    assert not loaded_by(module) & {"ray", "torch", "transformers", "fastapi"}


def test_whoever_deploys_does_not_load_what_runs_in_replicas() -> None:
    loaded = loaded_by("raydix.serve_app")
    assert not {
        name
        for name in loaded
        if name.startswith(("raydix.actors.ingress", "raydix.actors.host", "raydix.engine.model"))
    }


@pytest.mark.parametrize("module", ["raydix.client", "raydix.llm"])
def test_other_programs_import_raydix_quickly(module: str) -> None:
    """The package itself loads these two when one of their names is first used."""
    assert not loaded_by(module) & {"ray", "torch", "transformers", "numpy"}


def test_the_command_line_answers_without_ray_or_torch() -> None:
    """`raydix --help` must not take seconds."""
    assert not loaded_by("raydix.cli.main") & {"ray", "torch", "transformers"}


def test_a_type_checking_import_is_not_loaded(tmp_path: Path) -> None:
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import ray")
    assert [(found.name, found.runs) for found in _walk(tree, "", runs=True)] == [
        ("typing.TYPE_CHECKING", True),
        ("torch", False),
        ("ray", False),
    ]
