"""What the documents say by hand holds: the table of logged events, relative links, commands, and the length of the
first two and of lines of code.

Configuration, HTTP API, metrics and command line are generated from the code (`docs/generate.py`) and need no test.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from raydix.cli.main import parser

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "docs/guides/logs.md"
DOCUMENTS = [*ROOT.glob("*.md"), ROOT / "k8s/README.md", *(ROOT / "docs").rglob("*.md")]
GENERATED = {"docs/reference", "docs/architecture.md", "docs/guides/kubernetes.md"}
"""Pages that only the built site has."""


def table(document: Path, heading: str) -> list[str]:
    """Names in the first column of the table whose heading begins so."""
    [rows] = re.findall(rf"^\| {re.escape(heading)}.*\|\n\|[-|]+\|\n((?:\|.*\n)+)", document.read_text(), re.M)
    return [name for row in rows.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def code_in(document: Path) -> list[str]:
    """The lines of all blocks of code."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", document.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def words_of(line: str) -> list[str]:
    """A command's words, up to its comment and to the next command."""
    command = re.split(r"\s#|\s\(default|[|;&<>]|\s\\$", line.strip().removeprefix("$ "))[0]
    try:
        return shlex.split(command)
    except ValueError:  # its quotes end on another line
        return command.split()


def events_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "about":
            yield ast.literal_eval(node.args[0])


def links(document: Path) -> list[tuple[Path, str]]:
    """The relative links of a document: file, and anchor or an empty string."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.S)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match("[a-z]+:", target)]
    return [
        ((document.parent / path).resolve() if path else document, anchor)
        for path, _, anchor in (target.partition("#") for target in targets)
    ]


def anchors(document: Path) -> set[str]:
    """The headings of a document as GitHub and mkdocs name them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def is_generated(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return any(name == page or name.startswith(f"{page}/") for page in GENERATED)


def test_the_table_of_events_names_those_that_are_logged() -> None:
    sources = [path for folder in ("actors", "cli", "engine") for path in (ROOT / folder).rglob("*.py")]
    assert sorted(table(LOGS, "`event`")) == sorted({event for path in sources for event in events_in(path)})


@cache
def members() -> dict[str, set[str]]:
    """Names of the attributes of each class of the project, those of its bases included."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for part in ("actors", "cli", "configs", "engine", "kernels", "raydix"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    own.setdefault(node.name, set()).update(_names_in(node))
                    bases.setdefault(node.name, []).extend(base.id for base in node.bases if isinstance(base, ast.Name))
    for name, parents in bases.items():
        own[name] |= {attribute for parent in parents for attribute in own.get(parent, ())}
    return own


def _names_in(node: ast.ClassDef) -> Iterator[str]:
    """Methods, fields, and what methods assign to `self`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_attributes_of_classes_exist(document: Path) -> None:
    known = members()
    named = re.findall(r"`([A-Z]\w+)\.(\w+)[`(]", document.read_text())
    assert [f"{name}.{attribute}" for name, attribute in named if attribute not in known.get(name, {attribute})] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(document: Path) -> None:
    known = [(path, anchor) for path, anchor in links(document) if not is_generated(path)]
    assert [path for path, _ in known if not path.exists()] == []
    assert [(path, anchor) for path, anchor in known if anchor and anchor not in anchors(path)] == []


@pytest.mark.parametrize(("name", "most_lines"), [("README.md", 200), ("ARCHITECTURE.md", 300)])
def test_the_first_documents_stay_short(name: str, most_lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most_lines


def test_every_document_names_files_that_exist() -> None:
    """Paths in backticks that begin with a folder of the repository."""
    folders = "actors|benchmarks|cli|configs|docs|engine|examples|k8s|kernels|raydix|tests"
    pattern = re.compile(rf"`((?:{folders})/[\w/.*-]+)`")
    named = {(document, name) for document in DOCUMENTS for name in pattern.findall(document.read_text())}
    assert [(str(document), name) for document, name in sorted(named) if not any(ROOT.glob(name))] == []


MOST_LETTERS = 120
"""What a line of code has room for on the site at 1,280 px (`docs/site.css`)."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_line_of_code_is_cut_off(document: Path) -> None:
    assert [line for line in code_in(document) if len(line) > MOST_LETTERS] == []


def commands_of(program: str) -> list[tuple[str, list[str]]]:
    """The commands of a program in the documents: where, and the words behind the program's name."""
    found = []
    for document in DOCUMENTS:
        for line in code_in(document):
            words = words_of(line)
            start = words[: len(program.split())]
            if start and start[0].endswith("/raydix"):
                start[0] = "raydix"
            if start == program.split():
                found.append((f"{document.relative_to(ROOT)}: {line}", words[len(start) :]))
    return found


def test_commands_of_raydix_are_known_with_their_options() -> None:
    raydix = parser()
    commands = [(place, words) for place, words in commands_of("raydix") if "----" not in words]  # of a drawing
    assert len(commands) > 20
    refused = []
    for place, words in commands:
        try:
            raydix.parse_args(words)
        except SystemExit:
            refused.append(place)
    assert refused == []


def test_benchmarks_are_there_with_their_options() -> None:
    common = (ROOT / "benchmarks/command.py").read_text()
    commands = [(place, words) for place, words in commands_of("python -m") if words[0].startswith("benchmarks.")]
    assert len(commands) > 20
    for place, (module, *words) in commands:
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text() + common
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in text] == [], place


def test_targets_of_make_are_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = commands_of("make")
    assert len(commands) > 20
    for place, words in commands:
        named = [word for word in words if "=" not in word]
        assert all(name in targets or re.fullmatch("test-clients-.*", name) for name in named), place
