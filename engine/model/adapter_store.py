"""The adapters that a worker has in memory."""

from pathlib import Path

from raydix.engine.core.errors import StartupError
from raydix.engine.core.types import Adapter
from raydix.engine.model.adapters import identify_adapter
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.lora import Lora


class AdapterStore:
    """Adapters of one decoder, by the digests of their weights. Any thread may load one while others compute."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._loras: dict[bytes, Lora] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._loras

    def __getitem__(self, digest: bytes) -> Lora:
        return self._loras[digest]

    def load(self, name: str, folder: str) -> Adapter:
        """Have the adapter in a folder in memory; returns it, with the digest of the weights that were there. Raises
        `StartupError` if the folder cannot be used."""
        adapter = identify_adapter(name, folder, self._decoder.config)
        if adapter.digest not in self._loras:
            try:
                self._loras[adapter.digest] = self._decoder.load_lora(Path(adapter.folder))
            except StartupError as error:
                raise StartupError(f"adapter {name}: {error}") from None
        return adapter

    def require(self, adapter: Adapter) -> None:
        """Raise `LookupError` unless the adapter is in memory."""
        if adapter.digest not in self._loras:
            raise LookupError(f"adapter {adapter.name} is not loaded on this worker")
