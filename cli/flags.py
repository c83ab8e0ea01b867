"""Options of `raydix serve` for the commonest keys, named as vLLM names them where vLLM has them.

Sentence, type and bounds of each are the ones of its field in the schema.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from raydix.configs.pools import WorkerSection
from raydix.configs.schema import Config
from raydix.engine.core.errors import StartupError
from raydix.engine.core.tenants import key_hash

# Keys by their options; `*` stands for each role of workers.
FLAGS: Mapping[str, str] = {
    "--max-model-len": "model.max_model_len",
    "--dtype": "model.dtype",
    "--quantization": "model.quantization",
    "--served-model-name": "model.name",
    "--kv-cache-gib": "cache.pool_gib",
    "--kv-cache-dtype": "cache.dtype",
    "--max-num-seqs": "workers.*.max_requests",
    "--token-budget": "workers.*.token_budget",
    "--workers": "workers.*.replicas",
}
# Roles of workers by the values of `--role`.
ROLES: Mapping[str, tuple[str, ...]] = {
    "mixed": ("mixed",),
    "prefill-decode": ("prefill", "decode"),
    "elastic": ("elastic",),
}
ONE_TENANT = "default"  # the tenant of `--api-key`


def add_flags(command: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for flag, key in FLAGS.items():
        field = _field(key)
        command.add_argument(flag, type=_reader(field), metavar=_metavar(field), help=_help(key, field))
    command.add_argument(
        "--role", choices=tuple(ROLES), help="which workers there are (default: what suits the machine)"
    )
    command.add_argument(
        "--api-key", help="the one key of clients; as every word of a command, other users of the machine can see it"
    )


def given(options: argparse.Namespace) -> list[str]:
    """The words of the options that were given, for another process."""
    names = [*FLAGS, "--role", "--api-key"]
    values = {name: getattr(options, _attribute(name), None) for name in names}
    return [str(word) for name, value in values.items() if value is not None for word in (name, value)]


def roles_of(options: argparse.Namespace) -> tuple[str, ...] | None:
    """The roles that `--role` asks for; None without it."""
    role = getattr(options, "role", None)
    return None if role is None else ROLES[role]


def values_of(options: argparse.Namespace, roles: Collection[str], *, has_tenants: bool) -> dict[str, Any]:
    """What the options say, as sections of a configuration whose workers have these roles.

    Raises:
        StartupError: `--api-key` beside tenants, who have keys of their own.
    """
    content: dict[str, Any] = {}
    for flag, key in FLAGS.items():
        value = getattr(options, _attribute(flag), None)
        if value is None:
            continue
        paths = [key.replace("*", role) for role in roles] if "*" in key else [key]
        for path in paths:
            *sections, name = path.split(".")
            inner = content
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    key_given = getattr(options, "api_key", None)
    if key_given is not None:
        if has_tenants:
            raise StartupError("--api-key is for a server without tenants, and the configuration has tenants with keys")
        content["tenants"] = [{"name": ONE_TENANT, "admin": True, "key_hashes": [key_hash(key_given)]}]
    return content


def _field(key: str) -> FieldInfo:
    section, *rest = key.split(".")
    kind: Any = WorkerSection if section == "workers" else Config.model_fields[section].annotation
    field: FieldInfo = kind.model_fields[rest[-1]]
    return field


def _reader(field: FieldInfo) -> Callable[[str], Any]:
    """Reads a value, and holds it against the field's type and bounds."""
    annotated: Any = field.annotation
    for bound in field.metadata:
        annotated = Annotated[annotated, bound]
    checked: TypeAdapter[Any] = TypeAdapter(annotated)
    is_number = _is_number(field)

    def read(text: str) -> Any:
        value = yaml.safe_load(text) if is_number else text
        try:
            checked.validate_python(value)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error.errors()[0]['msg']}") from None
        return value

    return read


def _is_number(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return int in kinds or float in kinds


def _metavar(field: FieldInfo) -> str:
    return "N" if _is_number(field) else "NAME"


def _help(key: str, field: FieldInfo) -> str:
    return f"{key}: {field.description}".replace("%", "%%")


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
