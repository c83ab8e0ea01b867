"""Recording of a worker's decisions: the stimuli of its engine's scheduler."""

import os
from typing import TYPE_CHECKING

from actors.recording import record
from configs.schema import LoggingSection
from engine.core.settings import EngineSettings
from engine.core.stimuli import Stimulus
from engine.core.types import Role
from engine.core.worker.notes import SchedulerNotes
from engine.core.worker.replaying import replaying_scheduler

if TYPE_CHECKING:
    from engine.model.engine import Engine


def record_scheduler(engine: "Engine", settings: EngineSettings, role: Role, logs: LoggingSection) -> None:
    """Record the stimuli of a new engine's scheduler, if the configuration asks for recordings."""
    scheduler = engine.scheduler
    notes = SchedulerNotes(scheduler, engine.root, key=os.urandom(16)).notes()
    sizes = scheduler.pool.num_blocks, scheduler.max_model_len, engine.store.block_bytes
    made = Stimulus(replaying_scheduler.__name__, (settings, *sizes), {})
    record(role, logs, notes, scheduler, made)
