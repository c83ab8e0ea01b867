"""Sizes and counts of a worker's engine, for tests and operators."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the engine imports torch, which only a worker's process needs
    from raydix.engine.model.engine import Engine


def engine_statistics(engine: "Engine") -> dict[str, Any]:
    """Sizes and counts, after a check of the scheduler's integrity."""
    pool, scheduler = engine.pool, engine.scheduler
    scheduler.check_integrity()
    return {
        "num_blocks": pool.num_blocks,
        "num_available_blocks": pool.num_available,
        "num_cached_blocks": pool.num_cached,
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_swapped": scheduler.num_swapped,
        "num_idle": len(scheduler.idle),
        "idle": asdict(scheduler.idle.counts),
        "preemptions": asdict(engine.preemptions),
    }
