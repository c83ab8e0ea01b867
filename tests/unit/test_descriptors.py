"""A low limit of open files costs connections."""

import resource

import pytest

from raydix.cli.descriptors import MOST_OF_CLIENTS, OWN, check_descriptors, connections
from raydix.engine.core.errors import StartupError


@pytest.mark.parametrize(
    ("limit", "most"),
    [(256, 64), (1024, 320), (3 * MOST_OF_CLIENTS + OWN, 4096), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)],
)
def test_connections_follow_from_the_hard_limit(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, limit))
    found = connections()
    assert found.of_clients == most
    assert limit < 0 or 2 * found.total + OWN <= limit
    line = check_descriptors()
    assert f"takes {most} connections" in line if most < MOST_OF_CLIENTS else line == ""


def test_a_limit_that_is_too_low_for_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 255))
    with pytest.raises(StartupError, match="255 files"):
        check_descriptors()
