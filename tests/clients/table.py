"""A table of Markdown that says how the clients fared: a row for each client, written at the end of a run.

A row belongs to a file of tests, whose `VERSION` is the version of the client, and its steps are the names of its
tests. Rows of other files stay, so that runs in several environments fill one table.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HEAD = "| client | version | passed | failed | skipped |\n|---|---|---|---|---|\n"


@dataclass(slots=True)
class Row:
    """One client's steps by outcome; reasons of skipped ones."""

    version: str = ""
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def markdown(self, client: str) -> str:
        skipped = [f"{step} ({reason})" for step, reason in self.skipped.items()]
        steps = ["; ".join(each).replace("|", "\\|") for each in (self.passed, self.failed, skipped)]
        return f"| {client} | {self.version} | {' | '.join(steps)} |"


class ClientsTable:
    """A pytest plugin that writes `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: defaultdict[str, Row] = defaultdict(Row)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if isinstance(item, pytest.Function):
            self._rows[_client(item.nodeid)].version = getattr(item.module, "VERSION", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._rows[_client(report.nodeid)].failed.append("cannot be imported")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row, step = self._rows[_client(report.nodeid)], _step(report.nodeid)
        if report.skipped:
            row.skipped[step] = _reason(report)
        elif report.failed and step not in row.failed:
            row.failed.append(step)
        elif report.when == "call" and report.passed:
            row.passed.append(step)

    def pytest_sessionfinish(self) -> None:
        rows = self._earlier_rows() | {client: row.markdown(client) for client, row in self._rows.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(HEAD + "".join(f"{rows[client]}\n" for client in sorted(rows)))

    def _earlier_rows(self) -> dict[str, str]:
        """The rows of the file by client."""
        if not self._path.exists():
            return {}
        lines = self._path.read_text().splitlines()[2:]
        return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def _client(nodeid: str) -> str:
    """`sdk/test_openai.py::test_a_chat` belongs to `openai`."""
    return Path(nodeid.partition("::")[0]).stem.removeprefix("test_").replace("_", "-")


def _step(nodeid: str) -> str:
    """`test_a_chat[streamed]` is `a chat (streamed)`."""
    name = nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
    return re.sub(r"\[(.+)\]$", r" (\1)", name)


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
