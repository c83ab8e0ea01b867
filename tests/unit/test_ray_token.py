"""Ray's token is nobody's but its owner's."""

import stat
from pathlib import Path

import pytest

from raydix.cli.ray_node import TOKEN_FILE, secure_token


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_one_is_made_for_its_owner_alone_and_ray_can_use_it(tmp_path: Path) -> None:
    secure_token(tmp_path)
    path = tmp_path / TOKEN_FILE
    assert mode(path) == 0o600
    assert len(path.read_text()) == 64
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_one_that_ray_has_written_is_tightened_and_kept(tmp_path: Path) -> None:
    path = tmp_path / TOKEN_FILE
    path.parent.mkdir()
    path.write_text("known")
    path.chmod(0o644)
    secure_token(tmp_path)
    assert (mode(path), path.read_text()) == (0o600, "known")


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t"), ("RAY_AUTH_TOKEN_PATH", "/run/token")],
)
def test_what_the_environment_says_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    secure_token(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_home_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE.parent).write_text("a file in the way")
    secure_token(tmp_path)
