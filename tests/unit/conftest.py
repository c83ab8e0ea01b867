"""Fixtures of the unit tests. What builds a scheduler or a directory checks its integrity when the test is over."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from engine.core.block_pool import BlockPool
from engine.core.directory import Directory
from engine.core.placement import CostModel
from engine.core.scheduler import Scheduler, SchedulerLimits

settings.register_profile("unit", deadline=None)  # how long one example takes says more of the machine than of the code
settings.load_profile("unit")


@pytest.fixture
def make_scheduler() -> Iterator[Callable[..., Scheduler]]:
    """Builds schedulers of four-token blocks."""
    made: list[Scheduler] = []

    def make(
        num_blocks: int = 32, token_budget: int = 64, max_requests: int = 8, max_model_len: int | None = None
    ) -> Scheduler:
        pool = BlockPool(num_blocks, 4)
        scheduler = Scheduler(pool, SchedulerLimits(token_budget, max_requests), max_model_len or num_blocks * 4)
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.check_integrity()


@pytest.fixture
def make_directory() -> Iterator[Callable[..., Directory]]:
    """Builds directories of blocks of four tokens and ten bytes."""
    made: list[Directory] = []

    def make(segment_budget_bytes: int = 10_000, disk_budget_bytes: int = 0, piggyback_tokens: int = 0) -> Directory:
        costs = CostModel(block_size=4, piggyback_tokens=piggyback_tokens)
        directory = Directory(costs, segment_budget_bytes, disk_budget_bytes)
        made.append(directory)
        return directory

    yield make
    for directory in made:
        directory.check_integrity()
