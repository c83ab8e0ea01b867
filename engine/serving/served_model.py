"""The model as clients see it, alone and with its adapters."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from raydix.engine.core.errors import ModelNotFoundError
from raydix.engine.core.tenants import Tenant, Tenants
from raydix.engine.core.types import Adapter, AdapterReport


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


class AdapterUse:
    """A request's hold on its adapter, from its preparation to its end."""

    def __init__(self, uses: Counter[bytes], digest: bytes) -> None:
        self._uses = uses
        self._digest = digest
        self._is_held = True
        uses[digest] += 1

    def release(self) -> None:
        """End the hold; nothing happens at a second call."""
        if self._is_held:
            self._is_held = False
            self._uses[self._digest] -= 1
            # Digests of adapters that are gone must not gather here.
            if not self._uses[self._digest]:
                del self._uses[self._digest]


class ServedModels:
    """The names that a request's `model` may have: the model's own, and those of its adapters, configured ones and
    those that were loaded at run time.

    An adapter that tenants own has a name for them and for administrators alone: towards all others it is a name like
    any that nobody has given.
    """

    def __init__(self, model: ServedModel, adapters: Iterable[Adapter] = (), tenants: Tenants | None = None) -> None:
        self.model = model
        self._configured = {adapter.name: adapter for adapter in adapters}
        self._loaded: dict[str, Adapter] = {}  # as the manager listed them last
        self._uses: Counter[bytes] = Counter()  # requests under way of each adapter, by its digest
        self._tenants = tenants or Tenants()

    @property
    def fixed_names(self) -> frozenset[str]:
        """Names that the configuration gives: the model's own, and those of its adapters there."""
        return frozenset((self.model.name, *self._configured))

    def take(self, loaded: Iterable[Adapter]) -> bool:
        """Know these adapters, and no others, as those that were loaded at run time; returns True if that is news."""
        listed = {adapter.name: adapter for adapter in loaded}
        is_news = listed != self._loaded
        self._loaded = listed
        return is_news

    def report(self) -> AdapterReport:
        """What the manager is told, which waits for replicas when it loads and unloads."""
        return AdapterReport(tuple(self._loaded.values()), frozenset(self._uses))

    @contextmanager
    def use(self, adapter: Adapter | None) -> Iterator[AdapterUse | None]:
        """Hold an adapter for a request under way; None: for the model alone nothing is held. The hold outlives the
        block, and ends by its `release`, unless the block raises."""
        held = None if adapter is None else AdapterUse(self._uses, adapter.digest)
        try:
            yield held
        except BaseException:
            if held is not None:
                held.release()
            raise

    def adapters(self, tenant: Tenant) -> list[Adapter]:
        """The adapters that a tenant's requests may name."""
        # What the configuration names goes first: it is the same at every replica of this configuration.
        loaded = [each for each in self._loaded.values() if each.name not in self.fixed_names]
        every = (*self._configured.values(), *loaded)
        return [each for each in every if self._tenants.may_use(tenant, each.name)]

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
        return None if name == self.model.name else self._configured.get(name) or self._loaded.get(name)


def require_model(name: str, names: tuple[str, ...]) -> None:
    """Raise ModelNotFoundError unless `name` is one of `names`, those of a tenant's requests, the model's first."""
    if name not in names:
        raise ModelNotFoundError(f"The model '{name}' does not exist; this server has '{names[0]}'.", param="model")
