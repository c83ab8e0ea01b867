"""The folders where `make test-clients` puts programs, and how tests run them.

Programs run in a folder of their own and see no module of this checkout. They may use no model hub: what they need lies
on this machine.
"""

import os
import subprocess
from importlib.metadata import distributions
from pathlib import Path

from tests.clients.server import ROOT

ENVIRONMENTS = ROOT / ".venv-clients"
PROGRAMS = ENVIRONMENTS / "programs"
TIMEOUT_S = 500
"""Of one run of a program, start included."""


def installed_version(distribution: str, environment: Path = PROGRAMS) -> str:
    """The version of a Python distribution in a virtual environment; empty where it is not installed."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    return next((found.version for found in distributions(name=distribution, path=folders)), "") if folders else ""


def run(command: list[str | Path], folder: Path, *, stdin: str | None = None, **variables: str) -> str:
    """Run a program in `folder`, with `variables` in its environment, and return its output.

    A program that ends with an error fails the test, with its output.
    """
    left_out = ("PYTHONPATH", "RAY_", "PYTEST_")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "COLUMNS": "200"}
    own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**own, **offline, "OPENAI_API_KEY": "none", **variables},
        input=stdin,
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
