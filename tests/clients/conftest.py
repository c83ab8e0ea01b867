"""One server for the clients of a run, and a table of how they fared where `RAYDIX_CLIENTS_TABLE` names a file.

Nothing here imports raydix: `make test-clients` runs these tests in environments of the clients.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.server import URL_VARIABLE, Server, model_folder, serving
from tests.clients.table import ClientsTable


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("RAYDIX_CLIENTS_TABLE"):
        config.pluginmanager.register(ClientsTable(Path(path).absolute()), "clients-table")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that `RAYDIX_CLIENTS_URL` names, or one of this run's own."""
    if url := os.environ.get(URL_VARIABLE):
        yield Server(url.rstrip("/"))
        return
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer() -> Path:
    """Folder of the model's tokenizer, for programs that count tokens themselves."""
    return model_folder()
