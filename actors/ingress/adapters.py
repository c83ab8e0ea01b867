"""Loading and unloading of adapters while the server runs, for administrators."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from raydix.actors.ingress.manager_link import ManagerLink
from raydix.engine.api.adapters import LoadAdapterRequest
from raydix.engine.core.errors import NotFoundError, PermissionDeniedError, RequestError, StartupError
from raydix.engine.core.types import Adapter
from raydix.engine.model.adapters import FILES
from raydix.engine.serving.served_model import ServedModels

LOAD_S = 600.0  # longest wait until every worker has an adapter
UNLOAD_S = 3600.0  # longest wait for the requests of an adapter that is unloaded; it goes on without anybody who waits


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What may be loaded at run time."""

    folders: tuple[str, ...] = ()
    """Folders below which adapters lie."""
    max_loaded: int = 16


class AdapterOperations:
    """Asks the manager to load and unload. `identify` reads an adapter's folder, whole, and may raise StartupError."""

    def __init__(
        self,
        manager: ManagerLink,
        models: ServedModels,
        limits: AdapterLimits,
        identify: Callable[[str, str], Adapter],
    ) -> None:
        self._manager = manager
        self._models = models
        self._limits = limits
        self._identify = identify

    async def load(self, request: LoadAdapterRequest) -> str:
        """Load an adapter into every worker; returns a sentence that says so.

        Raises:
            PermissionDeniedError: the configuration has no folders for this.
            RequestError: the name is another one's, or the folder is none of an adapter, or not below those folders.
            ServiceError: the manager is out of reach, or the workers did not load in time.
        """
        name = request.lora_name
        if not self._limits.folders:
            raise PermissionDeniedError("No adapters are loaded at run time: 'model.adapter_folders' names no folder.")
        if name in self._models.fixed_names:
            raise RequestError(f"'{name}' is a name of the configuration.", param="lora_name")
        try:
            folder = await asyncio.to_thread(resolved, request.lora_path, self._limits.folders)
            adapter = await asyncio.to_thread(self._identify, name, folder)
        except StartupError as error:
            raise RequestError(str(error), param="lora_path") from None
        in_place, limit = request.load_inplace, self._limits.max_loaded
        refusal = await self._manager.ask(
            lambda manager: manager.loaded_adapters.load_adapter(adapter, limit, in_place=in_place), timeout_s=LOAD_S
        )
        if refusal is not None:
            raise RequestError(refusal, param="lora_name")
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, name: str) -> str:
        """Unload an adapter; returns a sentence that says so when its requests have ended.

        Raises:
            RequestError: the adapter is one of the configuration.
            NotFoundError: no adapter has this name.
            ServiceError: the manager is out of reach, or the requests took too long.
        """
        if name in self._models.fixed_names:
            raise RequestError(
                f"'{name}' is a name of the configuration, which alone can take it away.", param="lora_name"
            )
        if not await self._manager.ask(
            lambda manager: manager.loaded_adapters.unload_adapter(name), timeout_s=UNLOAD_S
        ):
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        return f"Success: LoRA adapter '{name}' removed successfully."


def resolved(path: str, folders: Sequence[str]) -> str:
    """The folder of an adapter, without links in its path. Raises StartupError for one that is not below `folders`, as
    its files must be, too."""
    # A link could lead out of the folders, so places are compared where they really are.
    roots = [Path(folder).expanduser().resolve() for folder in folders]
    folder = Path(path)
    if not folder.is_absolute():
        raise StartupError(f"{path} is not an absolute path")
    try:
        real = folder.resolve()
        files = [(real / name).resolve() for name in FILES]
    except (OSError, RuntimeError, ValueError):  # a null byte, or links in a circle
        raise StartupError(f"{path!r} is not the path of a folder") from None
    for each in (real, *files):
        if not any(root in each.parents for root in roots):
            raise StartupError(f"{path} is not below a folder of model.adapter_folders")
    return str(real)
