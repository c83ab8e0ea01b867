"""One server with the scripted model for all agents, and a table of figures in the file `RAYDIX_AGENTS_TABLE`."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.agents.programs import AGENTS, MODEL
from tests.clients.agents.table import AgentsTable
from tests.clients.server import BIN, ROOT, Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model answers each agent by its script."""
    folder = tmp_path_factory.mktemp("scripted")
    lines = [{"after": "", "answer": "There is nothing to do."}, *(line for agent in AGENTS for line in agent.script())]
    subprocess.run(
        [BIN / "python", "-m", "tests.model.scripted", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="".join(f"{json.dumps(line)}\n" for line in lines),
        text=True,
        check=True,
    )
    options = ("--local", "--model", f"scripted:{folder}", "--served-model-name", MODEL, "--kv-cache-gib", "1")
    with serving(tmp_path_factory.mktemp("server"), *options, model=MODEL) as running:
        yield running


@pytest.fixture(scope="session")
def table() -> Iterator[AgentsTable]:
    """The table of this run, written at its end."""
    found = AgentsTable()
    yield found
    if path := os.environ.get("RAYDIX_AGENTS_TABLE"):
        found.write(Path(path))
