"""Fixtures of the unit tests. What builds a scheduler or a directory checks its integrity when the test is over."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.manager.turns import NO_TURNS, TurnLimits
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.scheduler import Scheduler
from tests.unit.served_app import CURRENT

if TYPE_CHECKING:
    from tests.unit.ingress import Replica, Served

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

    def make(
        segment_budget_bytes: int = 10_000,
        disk_budget_bytes: int = 0,
        piggyback_tokens: int = 0,
        turns: TurnLimits = NO_TURNS,
    ) -> Directory:
        costs = CostModel(block_size=4, piggyback_tokens=piggyback_tokens)
        directory = Directory(costs, segment_budget_bytes, disk_budget_bytes, turns=turns)
        made.append(directory)
        return directory

    yield make
    for directory in made:
        directory.check_integrity()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> "Served":
    """Runs a function while the routes answer from a replica built by the test."""

    from ray import serve

    from raydix.actors.ingress import replica as replica_module
    from raydix.actors.ingress.app import Ingress  # all of Serve, which other tests can spare
    from raydix.configs import Config
    from raydix.configs.sections import INGRESS, parts

    @asynccontextmanager
    async def serving(replica: "Replica", config: dict[str, Any]) -> AsyncGenerator[None]:
        as_written: Any = Ingress.__mro__[1]  # Serve's wrapper around it wants a replica
        ingress = as_written.__new__(as_written)
        context = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="r"), servable_object=ingress)
        monkeypatch.setattr(serve, "get_replica_context", lambda: context)
        monkeypatch.setattr(replica_module, "forgo_torch", lambda: None)
        monkeypatch.setattr(replica_module, "build_frontend", lambda *_: replica.frontend)
        whole = Config.model_validate({"workers": {"mixed": {}}, "batches": {"gib": 0}} | config)
        part = parts(whole)[INGRESS]
        ingress.__init__(part.arguments)
        app = ingress.__serve_build_asgi_app__()
        token = CURRENT.set(app)
        await ingress.reconfigure(part.live)
        yield
        CURRENT.reset(token)

    def run(replica: "Replica", work: Callable[[], Awaitable[Any]], **config: Any) -> Any:
        async def serve_and_work() -> Any:
            async with serving(replica, config):
                return await work()

        return asyncio.run(serve_and_work())

    return run
