"""The model as clients see it, alone and with its adapters."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from raydix.engine.core.errors import ModelNotFoundError
from raydix.engine.core.tenants import Tenant, Tenants
from raydix.engine.core.types import Adapter


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name and sizes of the model."""

    name: str
    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    """Values of a hidden state, and so of an embedding."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch."""


class ServedModels:
    """The names that a request's `model` may have: the model's own, and those of its adapters.

    An adapter that tenants own has a name for them and for administrators alone: towards all others it is a name like
    any that nobody has given.
    """

    def __init__(self, model: ServedModel, adapters: Iterable[Adapter] = (), tenants: Tenants | None = None) -> None:
        self.model = model
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._tenants = tenants or Tenants()

    def adapters(self, tenant: Tenant) -> list[Adapter]:
        """The adapters that a tenant's requests may name."""
        return [each for each in self._adapters.values() if self._tenants.may_use(tenant, each.name)]

    def names(self, tenant: Tenant) -> tuple[str, ...]:
        """All names that a tenant's requests may have, the model's first."""
        return self.model.name, *(adapter.name for adapter in self.adapters(tenant))

    def adapter(self, name: str | None, tenant: Tenant) -> Adapter | None:
        """The adapter of a tenant's request that names this model; None for the model alone, also without a name.

        Raises:
            ModelNotFoundError: the tenant has no such model.
        """
        if name is None:
            return None
        require_model(name, self.names(tenant))
        return self._adapters.get(name)


def require_model(name: str, names: tuple[str, ...]) -> None:
    """Raise ModelNotFoundError unless `name` is one of `names`, those of a tenant's requests, the model's first."""
    if name not in names:
        raise ModelNotFoundError(f"The model '{name}' does not exist; this server has '{names[0]}'.", param="model")
