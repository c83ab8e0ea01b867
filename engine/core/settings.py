"""Settings of an engine, as plain values that can be sent to another process."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from raydix.engine.core.eviction.policies import EvictionPolicy
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import DraftSource

GIB = 1 << 30  # bytes

Quantization: TypeAlias = Literal["int8", "stored"]
"""Weights of matrix products: rounded to int8 with a float32 scale for each output channel, or in the 4 to 8 bits in
which their files store them."""
KVDtype: TypeAlias = Literal["int8"]
"""Keys and values: rounded to int8 with a float32 factor for each head and token."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step."""

    token_budget: int
    """Tokens computed in one step, decodes and prefill chunks together."""
    max_requests: int
    """Requests that hold blocks at the same time."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of the drafts of one worker."""

    depth: int = 15
    """Tokens of one draft."""
    index_tokens: int = 1 << 18
    """Tokens that may be indexed, of all requests together, when another request begins to decode."""
    past_tokens: int = 1 << 16
    """Tokens of past answers."""
    sources: tuple[DraftSource, ...] = tuple(DraftSource)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All settings of one engine."""

    source: str
    dtype: str
    device: str
    """`cpu`, `cuda`, or `auto`: a GPU if there is one, and neither the weights nor keys and values are quantised."""
    max_model_len: int | None
    block_size: int
    num_blocks: int | None
    """None: as many as `pool_gib` holds."""
    pool_gib: float | None
    """None: as much as the device has free beside the weights."""
    limits: SchedulerLimits
    swap_bytes: int = 0
    """Limit of the KV of preempted requests kept outside the pool; 0: always recompute."""
    prefix_caching: bool = True
    """True keeps KV for later requests; False names blocks for hand-overs only."""
    eviction: EvictionPolicy = EvictionPolicy.ADAPTIVE
    tenants: tuple[Tenant, ...] = ()
    """Tenants with shares of the pool."""
    deterministic: bool = True
    """True for the same bits on a GPU whatever the batch, as a CPU gives in bfloat16 anyway."""
    quantization: Quantization | None = None
    kv_dtype: KVDtype | None = None
    """None: keys and values are kept in `dtype`."""
    device_share: float = 1.0
    """Share of the device's memory that this engine may use, where several engines share a GPU."""
    drafts: DraftLimits | None = None
    """None: no drafts. They are made only where a row's bits do not depend on the number of rows."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of the adapters that are in memory from the start on."""
