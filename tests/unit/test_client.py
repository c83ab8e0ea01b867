"""`raydix.connect()` in a program of somebody else: what Ray says of itself is not printed there."""

import logging

import pytest
from ray.serve._private.router import SharedRouterLongPollClient

from raydix.client import RAYS_NOTES, _silence_notes


def test_exactly_the_lines_about_connecting_are_silenced(caplog: pytest.LogCaptureFixture) -> None:
    serves, rays = logging.getLogger("ray.serve"), logging.getLogger("ray._private.worker")
    router = SharedRouterLongPollClient.__new__(SharedRouterLongPollClient)
    _silence_notes()
    num_filters = [len(logging.getLogger(name).filters) for name in RAYS_NOTES]  # of other tests, too
    _silence_notes()
    for logger in (serves, rays):
        logger.propagate = True
        caplog.set_level(logging.INFO, logger.name)

    serves.info(f"Started {router}.")
    rays.info("Connecting to existing Ray cluster at address: %s...", "127.0.0.1:1")
    rays.info("Connected to Ray cluster.")
    assert caplog.records == []

    serves.warning("a replica is temporarily unavailable")
    serves.info("Started to be useful")
    rays.warning("Connected to Ray cluster with another version")
    assert {record.getMessage() for record in caplog.records} == {
        "a replica is temporarily unavailable",
        "Started to be useful",
        "Connected to Ray cluster with another version",
    }
    assert [len(logging.getLogger(name).filters) for name in RAYS_NOTES] == num_filters
