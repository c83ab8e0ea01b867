"""Instructions of the directory to workers and disk."""

from dataclasses import dataclass
from typing import TypeAlias

from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.disk_instructions import DiskInstruction
from raydix.engine.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a segment to a worker."""

    worker_id: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class Export:
    """Ask a worker to export blocks of its pool."""

    worker_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell a worker that awaited blocks will not come."""

    worker_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class HandoverLost:
    """Tell a decode worker that the prefill worker of a request will not hand over."""

    worker_id: str
    request_id: str


WorkerInstruction: TypeAlias = Deliver | Export | Lost | HandoverLost
Instruction: TypeAlias = WorkerInstruction | DiskInstruction
