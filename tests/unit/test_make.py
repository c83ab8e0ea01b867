"""What `make` does where a registry of packages cannot be reached."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_registry_that_cannot_be_reached_is_asked_once(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    npm = tmp_path / "bin/npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\necho >> {asked}\nexit 1\n")
    npm.chmod(0o755)
    installed = tmp_path / "venv-page/.installed"
    # Not that of the `make` that may run this test, whose options it would take over.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {"PATH": f"{npm.parent}:{environment['PATH']}", "LC_ALL": "C"}

    def make() -> str:
        command = ["make", f"VENV={tmp_path}/venv", str(installed)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert f"not checked; rm {installed} to ask again" in make()
    assert "is up to date" in make()
    assert asked.read_text() == "\n"
    installed.unlink()
    make()
    assert asked.read_text() == "\n\n"
