"""Makes a `Config` of a YAML file, with errors that a person can act on."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from raydix.configs.schema import Config
from raydix.engine.core.errors import StartupError

CONFIG_FOLDER = Path(__file__).parent
# Keys that configurations of earlier versions may have, each with what to do in its place.
GONE: Mapping[str, str] = {
    **dict.fromkeys(
        ("logging.stimuli", "logging.stimuli_mib"),
        "no longer a key: logging.recording records requests, prompts included, for raydix replay",
    ),
    **dict.fromkeys(
        ("speculation.draft_model", "speculation.draft_pool_mib"),
        "no longer a key: there are no drafts of a smaller model, and speculation.sources has the others; "
        "leave the key out, answers are the same",
    ),
}


def load_config(
    name: str | Path,
    overrides: Mapping[str, Any] | None = None,
    files: Sequence[str | Path] = (),
    base: str | None = None,
) -> Config:
    """Read the configuration `name`: a path, or the name of a file in `configs/` with or without its ending.

    Each of `files`, found in the same way, is merged over those before it, then `overrides`: mappings key by key, of
    anything else the later value stands. So a file that only some may read keeps the tenants apart from the rest. Every
    command and the Serve application merge several files here. `base`: one of raydix's own configurations, over which
    all are laid.

    Raises:
        StartupError: a file does not exist, is not YAML, or has an invalid value; names the key and the reason.
    """
    paths = [_find(each) for each in (name, *files)]
    content = merged(paths if base is None else [_find(base), *paths])
    return of_values(merge(content, overrides or {}), f"config {' + '.join(map(str, paths))}")


def of_values(values: Mapping[str, Any], where: str = "options") -> Config:
    """The configuration of these values; raises StartupError, which names `where` they come from."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise StartupError(f"{where}: {'; '.join(explain(error))}") from None


def merged(names: Sequence[str | Path]) -> dict[str, Any]:
    """The content of several files, each merged over those before it. Raises StartupError."""
    content: dict[str, Any] = {}
    for path in map(_find, names):
        content = merge(content, read_yaml(path))
    return content


def is_shipped(name: str | Path) -> bool:
    """True if a name means one of raydix's own configurations. Raises StartupError if it means nothing."""
    return _find(name).resolve().parent == CONFIG_FOLDER.resolve()


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections in a file. Raises StartupError that names the file and what is wrong."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartupError(f"config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise StartupError(f"config {path}: expected a mapping of sections")
    return content


def _find(name: str | Path) -> Path:
    path = Path(name)
    candidates = [path]
    if str(path.parent) in (".", CONFIG_FOLDER.name):
        candidates += [CONFIG_FOLDER / path.name, CONFIG_FOLDER / f"{path.name}.yaml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    available = ", ".join(sorted(shipped.stem for shipped in CONFIG_FOLDER.glob("*.yaml") if shipped.stem != "serve"))
    raise StartupError(f"config {name}: no such file; raydix comes with {available}")


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings key by key, mappings in them, too; of anything else the value of `extra` stands."""
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def explain(error: ValidationError, kind: type[BaseModel] = Config) -> list[str]:
    """Explain each problem in a sentence, with the key's path in `kind` and, for an unknown key, what became of it, or
    the nearest valid one."""
    problems = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden" and path in GONE:
            problems.append(f"{path} is {GONE[path]}")
        elif problem["type"] == "extra_forbidden":
            valid = _keys_at(problem["loc"][:-1], kind)
            near = difflib.get_close_matches(str(problem["loc"][-1]), valid, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
            problems.append(f"unknown key {path!r}, {hint}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{path}: {message}" if path else message)
    return problems


def _keys_at(path: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    section = kind
    for part in path:
        if isinstance(part, int):  # of a list, whose items all have the same keys
            continue
        annotation = section.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        section = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return list(section.model_fields)
