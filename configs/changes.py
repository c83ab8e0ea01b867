"""The effect of a change of each configuration key, and the changes between two configurations.

`KEYS` says in words what `raydix.configs.sections.parts` does: a key in the arguments of a deployment restarts its
replicas, a key in live values alone applies in place. Keys of a role of workers stand below `workers.<role>`, those of
elastic workers alone below `workers.elastic`. A Serve config file, and the Helm chart that writes one, divide a
configuration by the same table (`Effect.is_live`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from raydix.configs.schema import Config, TenantSection

ROLE = "<role>"
TENANTS = "tenants"
MAX_SHOWN = 60
"""Characters of a value that a change shows."""


class Effect(StrEnum):
    """What a change of a key does."""

    IN_PLACE = "applies in place"
    IN_PLACE_UNLESS_OFF = "applies in place; from or to 0 restarts the ingress"
    INGRESS = "restarts the ingress"
    MANAGER = "restarts the manager"
    ROLE = "restarts the workers of the role"
    WORKERS = "restarts all workers"
    INGRESS_AND_MANAGER = "restarts the ingress and the manager"
    INGRESS_AND_WORKERS = "restarts the ingress and all workers"
    EVERYTHING = "restarts everything"
    NUMBER = "adds or removes replicas; the others go on"
    ROLES = "starts or ends the workers of the role; with prefill or elastic the ingress may restart"
    SERVER = "at the next start of raydix serve"

    @property
    def is_live(self) -> bool:
        """True if a change restarts no replica, so that the key may stand in a `user_config`."""
        return self in (Effect.IN_PLACE, Effect.IN_PLACE_UNLESS_OFF, Effect.NUMBER)


_SECTIONS: Mapping[str, Mapping[Effect, str]] = {
    "": {Effect.IN_PLACE: "tenants_file"},
    "model": {
        Effect.INGRESS_AND_WORKERS: "source dtype quantization max_model_len deterministic",
        Effect.INGRESS: "name special_tokens_in_messages tool_parser reasoning_parser pooling "
        "chat_templates_in_requests volatile_lines",
    },
    "cache": {
        Effect.EVERYTHING: "prefix_caching block_size",
        Effect.WORKERS: "num_blocks pool_gib eviction swap_gib",
        Effect.MANAGER: "label_selector segment_gib disk_gib disk_path transcript_mib response_mib response_ttl_s",
        Effect.INGRESS_AND_MANAGER: "await_timeout_s",
        Effect.INGRESS: "public_prefixes",
    },
    "workers": {Effect.ROLES: "prefill decode mixed elastic"},
    f"workers.{ROLE}": {
        Effect.NUMBER: "replicas",
        Effect.IN_PLACE: "token_budget max_requests",
        Effect.ROLE: "num_threads device num_cpus num_gpus resources label_selector",
    },
    "workers.elastic": {Effect.NUMBER: "min_replicas max_replicas", Effect.IN_PLACE: "shrink_after_s"},
    "speculation": {
        Effect.EVERYTHING: "mode sources",
        Effect.WORKERS: "depth memory_mib",
        Effect.MANAGER: "cluster_mib",
    },
    "placement": {Effect.IN_PLACE: "import_gib_per_s piggyback_tokens"},
    "slo": {Effect.IN_PLACE: "ttft_ms tpot_ms when_late"},
    "ingress": {
        Effect.NUMBER: "replicas",
        Effect.IN_PLACE: "max_queued_requests max_body_bytes body_timeout_s max_waiting_mib answer_mib "
        "reader_processes any_content_type",
        Effect.INGRESS: "num_cpus label_selector",
    },
    "http": {
        Effect.IN_PLACE: "allowed_hosts allowed_origins",
        Effect.INGRESS: "tokenizer_info unknown_fields",
        Effect.SERVER: "host port header_timeout_s connections_per_address",
    },
    "batches": {
        Effect.IN_PLACE_UNLESS_OFF: "gib",
        Effect.IN_PLACE: "tenant_gib concurrency max_lines max_file_mib max_files keep_days",
        Effect.INGRESS: "folder",
    },
    "logging": {
        Effect.IN_PLACE: "level",
        Effect.EVERYTHING: "format",
        Effect.INGRESS: "recording recording_mib",
    },
    TENANTS: {Effect.IN_PLACE: "name key_hashes admin cache_min cache_max max_requests min_priority weight"},
}

KEYS: Mapping[str, Effect] = {
    f"{section}.{key}".lstrip("."): effect
    for section, effects in _SECTIONS.items()
    for effect, keys in effects.items()
    for key in keys.split()
}
"""The effect of each key, by its path."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another value of a key, as it is shown to an operator, and its effect."""

    key: str
    was: str
    becomes: str
    effect: Effect


def changes(old: Config, new: Config) -> list[Change]:
    """The changes from one configuration to another, in the order of the schema. Of tenants only names are shown."""
    return [*_changes_of(old, new, ""), *_changes_of_tenants(old.tenants, new.tenants)]


def _changes_of(old: BaseModel, new: BaseModel, prefix: str) -> Iterator[Change]:
    for name in type(old).model_fields:
        one, other = getattr(old, name), getattr(new, name)
        if one == other or name == TENANTS:
            continue
        if isinstance(one, BaseModel) and isinstance(other, BaseModel):
            yield from _changes_of(one, other, f"{prefix}{name}.")
        else:
            yield Change(f"{prefix}{name}", _shown(one), _shown(other), KEYS[table_key(f"{prefix}{name}")])


def _changes_of_tenants(old: tuple[TenantSection, ...], new: tuple[TenantSection, ...]) -> Iterator[Change]:
    were, will_be = ({tenant.name: tenant for tenant in tenants} for tenants in (old, new))
    for name in {**were, **will_be}:
        if were.get(name) != will_be.get(name):
            was = "known" if name in were else "unknown"
            becomes = "unknown" if name not in will_be else "changed" if name in were else "known"
            yield Change(f"{TENANTS}.{name}", was, becomes, Effect.IN_PLACE)


def table_key(path: str) -> str:
    """The key in the table of a key by its path, in which a role has its name."""
    *sections, name = path.split(".")
    return f"{sections[0]}.{ROLE}.{name}" if len(sections) > 1 and path not in KEYS else path


def _shown(value: object) -> str:
    text = "none" if value is None else "there" if isinstance(value, BaseModel) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
