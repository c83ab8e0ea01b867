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

    def load(self, adapter: Adapter) -> None:
        """Have an adapter in memory. Raises `StartupError` if its folder cannot be used, or has other weights."""
        if adapter.digest in self._loras:
            return
        found = identify_adapter(adapter.name, adapter.folder, self._decoder.config)
        if found.digest != adapter.digest:
            raise StartupError(f"adapter {adapter.name}: {adapter.folder} has other weights than it had")
        try:
            self._loras[adapter.digest] = self._decoder.load_lora(Path(adapter.folder))
        except StartupError as error:
            raise StartupError(f"adapter {adapter.name}: {error}") from None

    def require(self, adapter: Adapter) -> None:
        """Raise `LookupError` unless the adapter is in memory."""
        if adapter.digest not in self._loras:
            raise LookupError(f"adapter {adapter.name} is not loaded on this worker")
