"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from raydix.engine.api.known import UnlessFalse
from raydix.engine.api.validation import StrictModel, parse_body

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}$")]
FolderPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class LoadAdapterRequest(StrictModel):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: Name = Field(description="Name that the `model` of requests gives the adapter from now on.")
    lora_path: FolderPath = Field(
        description="Its folder, an absolute path below one of the configured `model.adapter_folders`."
    )
    load_inplace: bool = Field(
        default=False, description="Whether it may take the place of a loaded adapter of this name."
    )
    is_3d_lora_weight: UnlessFalse = None


class UnloadAdapterRequest(StrictModel):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: Name = Field(description="Name of an adapter that was loaded at run time.")
    lora_int_id: Any = Field(default=None, description="Taken, without effect: adapters are known by their weights.")


def parse_load(body: bytes) -> LoadAdapterRequest:
    """A body of `/v1/load_lora_adapter`. Raises RequestError naming the field at fault."""
    return parse_body(LoadAdapterRequest, body)


def parse_unload(body: bytes) -> UnloadAdapterRequest:
    """A body of `/v1/unload_lora_adapter`. Raises RequestError naming the field at fault."""
    return parse_body(UnloadAdapterRequest, body)
