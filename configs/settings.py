"""Makes settings of the engine, the manager and the tenants from a configuration."""

from collections.abc import Iterable
from typing import Any

from raydix.configs.pools import WorkerSection
from raydix.configs.schema import Config, SloSection
from raydix.configs.sections import (
    ManagerArguments,
    ManagerLive,
    Share,
    WorkerArguments,
    WorkerLive,
    worker_arguments,
    worker_live,
)
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.elastic import PoolLimits
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.manager.turns import TurnLimits
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.settings import GIB, DraftLimits, EngineSettings, SchedulerLimits
from raydix.engine.core.tenants import Tenant, Tenants
from raydix.engine.core.types import DraftSource

MIB = 1 << 20
# Memory of an indexed token: 100 bytes were measured, and more where token ids are no small integers.
INDEX_TOKEN_BYTES = 128

PAST_SHARE = 4  # past answers have one part in so many of the memory

EARLIER = (DraftSource.PAST, DraftSource.CLUSTER)  # drafts from earlier requests


def engine_settings(config: Config, worker: WorkerSection) -> EngineSettings:
    """The engine of one of the configuration's worker sections."""
    return settings_of(worker_arguments(config, worker), worker_live(config, worker))


def settings_of(arguments: WorkerArguments, live: WorkerLive) -> EngineSettings:
    model, cache = arguments.model, arguments.cache
    return EngineSettings(
        source=model.source,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_dtype=cache.kv_dtype,
        device=arguments.worker.device,
        max_model_len=model.max_model_len,
        deterministic=model.deterministic,
        device_share=min(1.0, arguments.worker.num_gpus or 1.0),
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        pool_gib=cache.pool_gib,
        prefix_caching=cache.prefix_caching,
        eviction=cache.eviction,
        tenants=sharing(live.shares),
        limits=step_limits(live),
        swap_bytes=int(cache.swap_gib * GIB),
        drafts=_draft_limits(arguments),
        adapters=tuple(model.adapters.items()),
    )


def step_limits(live: WorkerLive) -> SchedulerLimits:
    """Bounds of a worker's step."""
    return SchedulerLimits(live.token_budget, live.max_requests)


def objectives(slo: SloSection) -> Objectives:
    """The objectives of requests without their own."""
    return Objectives.of_ms(slo.ttft_ms, slo.tpot_ms, slo.when_late)


def sharing(shares: Iterable[Share]) -> tuple[Tenant, ...]:
    """The tenants with shares, as the owner of what they share knows them."""
    return tuple(
        Tenant(share.name, cache_min=share.cache_min, cache_max=share.cache_max, weight=share.weight)
        for share in shares
    )


def manager_settings(arguments: ManagerArguments, live: ManagerLive) -> dict[str, Any]:
    """The manager's constructor arguments, apart from its surroundings."""
    cache = arguments.cache
    return {
        "costs": CostModel(cache.block_size, piggyback_tokens=live.placement.piggyback_tokens, prior=prior(live)),
        "segment_budget_bytes": int(cache.segment_gib * GIB),
        "transcript_budget_bytes": int(cache.transcript_mib * MIB),
        "response_budget_bytes": int(cache.response_mib * MIB),
        "response_ttl_s": cache.response_ttl_s,
        "answer_budget_bytes": answer_bytes(arguments),
        "await_timeout_s": cache.await_timeout_s,
        "disk_budget_bytes": int(cache.disk_gib * GIB),
        "disk_path": cache.disk_path,
        "tenants": sharing(live.shares),
        "objectives": objectives(live.slo),
        "elastic": elastic_limits(live),
        "turns": turn_limits(live),
        "prefix_caching": cache.prefix_caching,
    }


def prior(live: ManagerLive) -> WorkerCosts:
    """Costs of a worker before anything is measured there."""
    return WorkerCosts(import_byte_s=1 / (live.placement.import_gib_per_s * GIB))


def elastic_limits(live: ManagerLive) -> PoolLimits:
    """Limits of the number of elastic workers."""
    return PoolLimits(live.max_elastic, live.shrink_after_s, live.min_elastic)


def turn_limits(live: ManagerLive) -> TurnLimits:
    """Times of the turns of sessions."""
    return TurnLimits(live.placement.session_quantum_s)


def _draft_limits(arguments: WorkerArguments) -> DraftLimits | None:
    """The bounds of drafts; None for none. Without prefix caching no request finds anything of an earlier one."""
    speculation, keeps_kv = arguments.speculation, arguments.cache.prefix_caching
    if speculation.mode == "off":
        return None
    kept = [source for source in speculation.sources if source not in EARLIER or keeps_kv]
    num_tokens = (speculation.memory_mib << 20) // INDEX_TOKEN_BYTES
    past_tokens = num_tokens // PAST_SHARE if DraftSource.PAST in kept else 0
    return DraftLimits(
        depth=speculation.depth,
        index_tokens=num_tokens - past_tokens,
        past_tokens=past_tokens,
        sources=tuple(kept),
    )


def answer_bytes(arguments: ManagerArguments) -> int:
    """Memory of the manager for answers that drafts are made of; 0 for none."""
    speculation = arguments.speculation
    is_used = speculation.uses(DraftSource.CLUSTER) and arguments.cache.prefix_caching
    return speculation.cluster_mib << 20 if is_used else 0


def tenants(config: Config) -> Tenants:
    """All tenants that may send requests, with their API keys' hashes."""
    return Tenants(configured_tenants(config), names_of_keys(config))


def names_of_keys(config: Config) -> dict[str, str]:
    """Names of tenants by the hashes of their API keys."""
    return {key_hash: tenant.name for tenant in config.tenants for key_hash in tenant.key_hashes}


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
            weight=tenant.weight,
            adapters=tenant.adapters,
        )
        for tenant in config.tenants
    )
