"""From the configuration to what the engine is built from."""

from configs.schema import Config, WorkerSection
from engine.core.scheduler import SchedulerLimits
from engine.core.settings import GIB, EngineSettings
from engine.core.tenants import Tenant, Tenants


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
        eviction=config.cache.eviction,
        tenants=configured_tenants(config),
        limits=SchedulerLimits(worker.token_budget, worker.max_requests),
        swap_bytes=int(config.cache.swap_gib * GIB),
    )


def tenants(config: Config) -> Tenants:
    """Who may send requests, and by which keys they are known."""
    name_of_key = {key_hash: tenant.name for tenant in config.tenants for key_hash in tenant.key_hashes}
    return Tenants(configured_tenants(config), name_of_key)


def configured_tenants(config: Config) -> tuple[Tenant, ...]:
    """The tenants as the engine knows them, without their keys."""
    return tuple(
        Tenant(tenant.name, tenant.admin, tenant.cache_min, tenant.cache_max, tenant.max_requests)
        for tenant in config.tenants
    )
