"""The effect of a change of each configuration key, and the changes between two configurations.

Each key's effect stands at its field in the schema (`Effect`), and `KEYS` has them by path. Keys of a role of workers
stand below `workers.<role>`, those of elastic workers alone below `workers.elastic`. A Serve config file, and the Helm
chart that writes one, divide a configuration by the same table (`Effect.is_live`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from raydix.configs.pools import ElasticSection, WorkerSection, WorkersSection
from raydix.configs.schema import Config, TenantSection
from raydix.configs.section import Effect, Section, effects_of

ROLE = "<role>"
ELASTIC = "elastic"
TENANTS = "tenants"
MAX_SHOWN = 60  # characters of a value that a change shows


def _effects(section: type[BaseModel], prefix: str, of_all: Effect | None = None) -> Iterator[tuple[str, Effect]]:
    """The effect of each key below a section by its path: its own, or that of the section around it."""
    own = effects_of(section)
    for name, field in section.model_fields.items():
        effect, path = own.get(name, of_all), f"{prefix}{name}"
        inner = next((each for each in _types_in(field.annotation) if issubclass(each, Section)), None)
        if inner is WorkersSection:
            yield from _effects_of_workers(path)
        elif inner is not None:
            yield from _effects(inner, f"{path}.", effect)
        elif effect is not None:
            yield path, effect


def _effects_of_workers(path: str) -> Iterator[tuple[str, Effect]]:
    """The effect of each role, of the keys that all roles have, and of those that elastic workers have besides."""
    for role, effect in effects_of(WorkersSection).items():
        yield f"{path}.{role}", effect

    yield from _effects(WorkerSection, f"{path}.{ROLE}.")

    elastic = f"{path}.{ELASTIC}."
    shared = {f"{elastic}{name}" for name in WorkerSection.model_fields}
    yield from ((key, effect) for key, effect in _effects(ElasticSection, elastic) if key not in shared)


def _types_in(annotation: Any) -> Iterator[type]:
    """The classes in an annotation such as `tuple[TenantSection, ...]`."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


KEYS: Mapping[str, Effect] = dict(_effects(Config, ""))  # the effect of each key, by its path


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
        # Tenants are compared by name (`_changes_of_tenants`): their sections hold hashes of keys, which are not shown.
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
    # Keys of elastic workers alone are in the table by their own path; the others stand there once for all roles.
    return f"{sections[0]}.{ROLE}.{name}" if len(sections) > 1 and path not in KEYS else path


def _shown(value: object) -> str:
    text = "none" if value is None else "there" if isinstance(value, BaseModel) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
