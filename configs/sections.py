"""The parts of a configuration by deployment: what a constructor gets, and what changes in place.

| deployment | `arguments`: a change restarts its replicas | `live`: applied by `reconfigure` while they run |
|---|---|---|
| ingress | the model, the parsers, the batches' folder | limits, tenants, trusted sites, log level |
| manager | budgets and folder of the stores | objectives, first costs, elastic workers' limits, tenants' shares |
| each role | the engine, memory, resources at Ray | bounds of a step, tenants' shares, log level |

The ingress gets the whole configuration beside the arguments, because the ingress shows the settings of the server.

A part holds only the keys that the deployment reads, by their effects (`raydix.configs.section`), so a change elsewhere
changes nothing there; a part that is read back has defaults in place of the other keys. No part holds an API key; the
ingress alone gets the keys' hashes.

An application that a Serve config file declares has a second form: each replica gets the configuration that the
application was built of as its *base*, and a deployment's `user_config` is a configuration of only keys that change in
place, which `live_part` lays over the base. So a changed `user_config` restarts nothing, and it may be short.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from raydix.configs.changes import KEYS, table_key
from raydix.configs.load import explain, merge
from raydix.configs.pools import ElasticSection, Numbers, WorkerSection
from raydix.configs.schema import (
    CacheSection,
    Config,
    LoggingSection,
    ModelSection,
    ObservabilitySection,
    PlacementSection,
    SloSection,
    SpeculationSection,
    TenantSection,
)
from raydix.configs.section import DeploymentKind, Effect, effects_of
from raydix.engine.core.errors import StartupError

Values: TypeAlias = dict[str, Any]
"""Plain values, as JSON has them."""

INGRESS, MANAGER = "ingress", "kv_cache_manager"  # names of deployments; those of workers have the names of their roles

MANAGER_CPUS = 0.1  # reserved for the manager and its standby, half for each
# A host's child that answers nothing for so long hangs. An engine answers between two steps, and a step may take
# seconds.
CHECK_TIMEOUT_S = 60

S = TypeVar("S", bound=BaseModel)
VERSION_DIGITS = 16


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Share(_Part):
    """A tenant's share of caches, and of what all share by weight."""

    name: str
    cache_min: float
    cache_max: float
    weight: float


class IngressArguments(_Part):
    """An ingress replica's own, for its whole life."""

    model: ModelSection
    cache: CacheSection
    speculation: SpeculationSection
    logging: LoggingSection
    observability: ObservabilitySection
    hands_over: bool
    """True if workers may hand KV over to others."""
    has_tokenizer_info: bool
    unknown_fields: Literal["refuse", "ignore"]
    has_batches: bool
    batches_folder: str | None
    num_cpus: float
    label_selector: dict[str, str]


class ManagerArguments(_Part):
    """The manager's own, for its whole life."""

    cache: CacheSection
    speculation: SpeculationSection
    logging: LoggingSection


class ManagerLive(_Part):
    """What the manager changes in place."""

    placement: PlacementSection
    slo: SloSection
    max_elastic: int
    """Limit of the number of elastic workers; 1 without any."""
    min_elastic: int
    """Least number of elastic workers; 1 without any."""
    shrink_after_s: float
    shares: tuple[Share, ...]
    tenants_file: str | None
    """The file whose tenants' shares hold in the place of `shares`."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class WorkerArguments(_Part):
    """The workers' of one role, for their whole lives."""

    model: ModelSection
    cache: CacheSection
    worker: WorkerSection
    speculation: SpeculationSection
    logging: LoggingSection


class WorkerLive(_Part):
    """What the workers of one role change in place."""

    token_budget: int
    max_requests: int
    shares: tuple[Share, ...]
    tenants_file: str | None
    """The file whose tenants' shares hold in the place of `shares`."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        WorkerSection(token_budget=self.token_budget, max_requests=self.max_requests)
        return self


@dataclass(frozen=True, slots=True)
class DeploymentPart:
    """A deployment as a configuration wants it."""

    arguments: Values
    live: Values
    replicas: Numbers
    follows_load: bool = False
    """True if the load sets the number within its bounds, which may leave no choice."""

    def version(self, code: str) -> str:
        """A name for what its replicas are made of: the code and the arguments."""
        dumped = json.dumps([code, self.arguments], sort_keys=True)
        return hashlib.sha256(dumped.encode()).hexdigest()[:VERSION_DIGITS]


def parts(config: Config) -> dict[str, DeploymentPart]:
    """Every deployment of a configuration, by name."""
    ingress = config.ingress.replicas
    return {
        MANAGER: _part(manager_arguments(config), manager_live(config), Numbers(1, 1)),
        **{role: _worker_part(config, section) for role, section in config.workers.sections.items()},
        INGRESS: _part(ingress_arguments(config), config, Numbers(ingress, ingress)),
    }


def base_for(name: str, config: Config) -> Values:
    """The base of a deployment's replicas: the whole configuration, the keys' hashes for the ingress alone."""
    if name == INGRESS:
        return config.model_dump(mode="json")
    # Only the ingress lets clients in, and a hash that is nowhere else cannot be read there.
    without = tuple(tenant.model_copy(update={"key_hashes": ()}) for tenant in config.tenants)
    return config.model_copy(update={"tenants": without}).model_dump(mode="json")


def live_part(name: str, base: Mapping[str, Any], user_config: Mapping[str, Any]) -> Values:
    """What a deployment's replicas change in place, of a base and a `user_config` laid over it.

    Raises:
        StartupError: the result is not valid, or a key cannot change in place; names the keys.
    """
    before = Config.model_validate(base)
    effects = _effects(user_config, before.workers.sections)
    # A key that restarts replicas would seem to be changed, and have no effect until something else restarts them.
    fixed = [f"{key} {effect}" for key, effect in effects if not effect.is_live]
    if fixed:
        raise StartupError(f"user_config: {'; '.join(fixed)}: such keys belong into the application's args")
    try:
        after = Config.model_validate(merge(base, user_config))
    except ValidationError as error:
        raise StartupError(f"user_config: {'; '.join(explain(error))}") from None
    # Off and on is the one change of this key that needs another replica: the folder and its watchers.
    if bool(before.batches.gib) != bool(after.batches.gib):
        raise StartupError(f"user_config: batches.gib {Effect.IN_PLACE_UNLESS_OFF}; args have {before.batches.gib:g}")
    return parts(after)[name].live


def _effects(content: Mapping[str, Any], roles: Collection[str], prefix: str = "") -> Iterator[tuple[str, Effect]]:
    """The effects of the keys in plain values of a configuration, by their paths; keys that no configuration has are
    left to the schema. Other roles of workers than these count as keys themselves."""
    for name, value in content.items():
        effect = KEYS.get(table_key(f"{prefix}{name}"))
        # A role that runs already is a section of keys; another one is a new deployment, and so a key itself.
        is_section = isinstance(value, Mapping) and (effect is None or (effect is Effect.ROLES and name in roles))
        if is_section:
            yield from _effects(value, roles, f"{prefix}{name}.")
        elif effect is not None:
            yield f"{prefix}{name}", effect


def ingress_arguments(config: Config) -> IngressArguments:
    """The ingress replicas' constructor argument."""
    return IngressArguments(
        model=_fixed(config.model, DeploymentKind.INGRESS),
        cache=_fixed(config.cache, DeploymentKind.INGRESS),
        speculation=_fixed(config.speculation, DeploymentKind.INGRESS),
        logging=_fixed(config.logging, DeploymentKind.INGRESS),
        observability=_fixed(config.observability, DeploymentKind.INGRESS),
        hands_over=config.workers.hands_over,
        has_tokenizer_info=config.http.tokenizer_info,
        unknown_fields=config.http.unknown_fields,
        has_batches=config.batches.gib > 0,
        batches_folder=config.batches.folder,
        num_cpus=config.ingress.num_cpus,
        label_selector=config.ingress.label_selector,
    )


def manager_arguments(config: Config) -> ManagerArguments:
    """The manager's host's constructor argument."""
    return ManagerArguments(
        cache=_fixed(config.cache, DeploymentKind.MANAGER),
        speculation=_fixed(config.speculation, DeploymentKind.MANAGER),
        logging=_fixed(config.logging, DeploymentKind.MANAGER),
    )


def manager_live(config: Config) -> ManagerLive:
    """The manager's host's `user_config`."""
    elastic = config.workers.elastic or ElasticSection()
    return ManagerLive(
        placement=config.placement,
        slo=config.slo,
        max_elastic=elastic.numbers.most,
        min_elastic=elastic.numbers.least,
        shrink_after_s=elastic.shrink_after_s,
        shares=shares(config.tenants),
        tenants_file=config.tenants_file,
        level=config.logging.level,
    )


def worker_arguments(config: Config, worker: WorkerSection) -> WorkerArguments:
    """The constructor argument of the workers' hosts of one of the configuration's worker sections."""
    return WorkerArguments(
        model=_fixed(config.model, DeploymentKind.WORKERS),
        cache=_fixed(config.cache, DeploymentKind.WORKERS),
        worker=WorkerSection.model_validate(_fixed_values(worker, WorkerSection, DeploymentKind.WORKERS)),
        speculation=_fixed(config.speculation, DeploymentKind.WORKERS),
        logging=_fixed(config.logging, DeploymentKind.WORKERS),
    )


def worker_live(config: Config, worker: WorkerSection) -> WorkerLive:
    """The `user_config` of the workers' hosts of one of the configuration's worker sections."""
    return WorkerLive(
        token_budget=worker.token_budget,
        max_requests=worker.max_requests,
        shares=shares(config.tenants),
        tenants_file=config.tenants_file,
        level=config.logging.level,
    )


def read(kind: type[S], content: Mapping[str, Any]) -> S:
    """A part from its plain values, all of which must be there: a default in the place of one that was forgotten could
    let everybody in.

    Raises:
        StartupError: a value is missing, unknown or invalid.
    """
    missing = kind.model_fields.keys() - content.keys()
    if missing:
        raise StartupError(f"{kind.__name__} without {', '.join(sorted(missing))}: all keys are needed here")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise StartupError(f"{kind.__name__}: {'; '.join(explain(error, kind))}") from None


def shares(tenants: Iterable[TenantSection]) -> tuple[Share, ...]:
    """The tenants with a floor, a ceiling or a weight of their own, which alone make a difference."""
    return tuple(
        Share(name=tenant.name, cache_min=tenant.cache_min, cache_max=tenant.cache_max, weight=tenant.weight)
        for tenant in tenants
        if (tenant.cache_min, tenant.cache_max, tenant.weight) != (0, 1, 1)
    )


def _fixed(section: S, kind: DeploymentKind) -> S:
    """The section with the defaults in all keys but those that replicas of this kind have for their whole lives."""
    return type(section).model_validate(_fixed_values(section, type(section), kind))


def _fixed_values(section: BaseModel, declared: type[BaseModel], kind: DeploymentKind) -> Values:
    return {name: getattr(section, name) for name, effect in effects_of(declared).items() if effect.restarts(kind)}


def _worker_part(config: Config, section: WorkerSection) -> DeploymentPart:
    """Make the part of the workers of one section. Serve sets the number of elastic workers even where the bounds
    are equal: a host asks the manager only if it started so, and the bounds may change later."""
    part = _part(worker_arguments(config, section), worker_live(config, section), section.numbers)
    return replace(part, follows_load=isinstance(section, ElasticSection))


def _part(arguments: BaseModel, live: BaseModel, replicas: Numbers) -> DeploymentPart:
    """Make a part of these values, of the arguments those that were given (`_fixed`)."""
    return DeploymentPart(arguments.model_dump(mode="json", exclude_unset=True), live.model_dump(mode="json"), replicas)
