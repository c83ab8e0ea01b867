"""From the configuration to the engine's settings."""

from configs.schema import Config, WorkerSection
from engine.core.settings import GIB, DraftLimits, EngineSettings, SchedulerLimits
from engine.core.tenants import Tenant, Tenants
from engine.core.types import DraftSource

INDEX_TOKEN_BYTES = 128
"""Memory of an indexed token: 100 bytes were measured, and more where token ids are no small integers."""

PAST_SHARE = 4
"""Past answers have one part in so many of the memory."""

EARLIER = (DraftSource.PAST, DraftSource.CLUSTER)
"""Drafts from earlier requests."""


def engine_settings(config: Config, worker: WorkerSection) -> EngineSettings:
    """The engine of one of the configuration's worker sections."""
    return EngineSettings(
        source=config.model.source,
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        device=worker.device,
        max_model_len=config.model.max_model_len,
        deterministic=config.model.deterministic,
        block_size=config.cache.block_size,
        num_blocks=config.cache.num_blocks,
        pool_gib=config.cache.pool_gib,
        prefix_caching=config.cache.prefix_caching,
        eviction=config.cache.eviction,
        tenants=configured_tenants(config),
        limits=SchedulerLimits(worker.token_budget, worker.max_requests),
        swap_bytes=int(config.cache.swap_gib * GIB),
        drafts=_draft_limits(config),
    )


def _draft_limits(config: Config) -> DraftLimits | None:
    """The bounds of drafts; None for none. Without prefix caching no request finds anything of an earlier one."""
    speculation = config.speculation
    if speculation.mode == "off":
        return None
    kept = [source for source in speculation.sources if source not in EARLIER or config.cache.prefix_caching]
    num_tokens = (speculation.memory_mib << 20) // INDEX_TOKEN_BYTES
    past_tokens = num_tokens // PAST_SHARE if DraftSource.PAST in kept else 0
    return DraftLimits(speculation.depth, num_tokens - past_tokens, past_tokens, tuple(kept))


def answer_bytes(config: Config) -> int:
    """Memory of the manager for answers that drafts are made of; 0 for none."""
    limits = _draft_limits(config)
    return 0 if limits is None or DraftSource.CLUSTER not in limits.sources else config.speculation.cluster_mib << 20


def tenants(config: Config) -> Tenants:
    """All tenants that may send requests, with their API keys' hashes."""
    name_of_key = {key_hash: tenant.name for tenant in config.tenants for key_hash in tenant.key_hashes}
    return Tenants(configured_tenants(config), name_of_key)


def configured_tenants(config: Config) -> tuple[Tenant, ...]:
    """The tenants as the engine knows them, without their keys."""
    return tuple(
        Tenant(
            name=tenant.name,
            is_admin=tenant.admin,
            cache_min=tenant.cache_min,
            cache_max=tenant.cache_max,
            max_requests=tenant.max_requests,
            min_priority=tenant.min_priority,
        )
        for tenant in config.tenants
    )
