"""The adapters that a worker has in memory."""

from pathlib import Path

from raydix.engine.core.errors import StartupError
from raydix.engine.core.types import Adapter
from raydix.engine.model.adapters import identify_adapter
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.lora import Lora


class AdapterStore:
    """Adapters of one decoder, by the digests of their weights. Any thread may load one while others compute; only the
    engine's drops one."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._loras: dict[bytes, Lora] = {}
        self._kept: set[bytes] = set()  # digests of the configured adapters, which are never dropped

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._loras

    def __getitem__(self, digest: bytes) -> Lora:
        return self._loras[digest]

    def load(self, name: str, folder: str) -> Adapter:
        """Have the adapter in a folder in memory for good; returns it, with the digest of the weights that were there.
        Raises `StartupError` if the folder cannot be used."""
        adapter = identify_adapter(name, folder, self._decoder.config)
        self._load(adapter)
        self._kept.add(adapter.digest)
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Have an adapter in memory until it is dropped. Raises `StartupError` if its folder cannot be used here, or
        has other weights than those of its digest."""
        if adapter.digest in self._loras:
            return
        if identify_adapter(adapter.name, adapter.folder, self._decoder.config).digest != adapter.digest:
            raise StartupError(f"adapter {adapter.name}: {adapter.folder} has other weights here than elsewhere")
        self._load(adapter)

    def drop(self, digest: bytes) -> None:
        """Free the memory of an adapter, unless it is configured. No request of it is left."""
        if digest not in self._kept:
            self._loras.pop(digest, None)

    def _load(self, adapter: Adapter) -> None:
        if adapter.digest not in self._loras:
            try:
                self._loras[adapter.digest] = self._decoder.load_lora(Path(adapter.folder))
            except StartupError as error:
                raise StartupError(f"adapter {adapter.name}: {error}") from None

    def require(self, adapter: Adapter) -> None:
        """Raise `LookupError` unless the adapter is in memory."""
        if adapter.digest not in self._loras:
            raise LookupError(f"adapter {adapter.name} is not loaded on this worker")
