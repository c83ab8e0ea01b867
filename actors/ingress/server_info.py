"""Report of a server's settings and versions for its operators."""

import os
import platform
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from raydix.configs.schema import Config
from raydix.engine.api.responses import Json

PACKAGES = ("raydix", "ray", "torch", "transformers", "tokenizers", "pydantic")


def server_info(config: Config, model: Mapping[str, object]) -> Json:
    """The report. `model` is the model's object of `/v1/models`."""
    return {
        "object": "server.info",
        "model": dict(model),
        "raydix_config": settings(config),
        "system_env": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def settings(section: BaseModel) -> Json:
    """The numbers, switches and fixed words of a section and its own sections.

    Texts are left out, whatever they mean: names of files, keys' hashes, prompts, and those of fields yet to come. So
    are lists and mappings.
    """
    shown: Json = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            shown[name] = settings(value)
        elif isinstance(value, bool | int | float | Enum | None) or _is_word(field.annotation):
            shown[name] = value.value if isinstance(value, Enum) else value
    return shown


def _is_word(annotation: object) -> bool:
    """True for a field that takes fixed words only."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    return any(get_origin(kind) is Literal for kind in kinds) and str not in kinds


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
