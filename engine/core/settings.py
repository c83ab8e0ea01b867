"""What an engine is built from, as plain values that can be sent to the process that builds it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.core.eviction.policies import EvictionPolicy
from engine.core.scheduler import SchedulerLimits
from engine.core.tenants import Tenant

GIB = 1 << 30
"""Bytes."""

Quantization: TypeAlias = Literal["int8"]
"""What the weights of matrix products are rounded to: int8 with a float32 scale for each output channel."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything that an engine is built from."""

    source: str
    dtype: str
    device: str
    """`cpu`, `cuda`, or `auto`: a GPU if there is one and the weights are not quantised."""
    max_model_len: int | None
    block_size: int
    num_blocks: int | None
    """None: as many as `pool_gib` holds."""
    pool_gib: float
    limits: SchedulerLimits
    swap_bytes: int = 0
    """KV of preempted requests that is kept outside the pool; 0: they are always computed again."""
    eviction: EvictionPolicy = EvictionPolicy.ADAPTIVE
    tenants: tuple[Tenant, ...] = ()
    """Whose shares of the pool are to be kept."""
    deterministic: bool = False
    """On a GPU: the same bits whatever the batch, as a CPU gives them in bfloat16 anyway."""
    quantization: Quantization | None = None
