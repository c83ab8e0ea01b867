"""Holds every tier to the list of skips: a test that is skipped for another reason, or on another machine, fails.

Has the Ray cluster that all tests of a session share, too; it starts when the first test asks for it.
"""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.skips import fault

if TYPE_CHECKING:
    from tests.integration.cluster import Cluster


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_skip = call.excinfo is not None and isinstance(call.excinfo.value, pytest.skip.Exception)
    if is_skip and (wrong := fault(item.nodeid, str(call.excinfo.value))) is not None:  # type: ignore[union-attr]
        report.outcome, report.longrepr = "failed", wrong
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself while it is imported takes all of its tests along."""
    report = yield
    if report.outcome == "skipped":
        assert isinstance(report.longrepr, tuple)  # path, line and reason
        if (wrong := fault(collector.nodeid, report.longrepr[2].removeprefix("Skipped: "))) is not None:
            report.outcome, report.longrepr = "failed", wrong
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Cluster]":
    from tests.integration.cluster import Cluster
    from tests.integration.local import require_default_model

    require_default_model()
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        running.start()
        yield running
    finally:
        running.stop()
