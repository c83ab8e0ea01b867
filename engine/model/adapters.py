"""Reads low-rank adapters (LoRA, arXiv 2106.09685) in the folders that PEFT writes, without torch.

A folder has `adapter_config.json`, which says how the two factors of each projection are scaled, and
`adapter_model.safetensors`. The tensors' names decide which projections are adapted: `target_modules` may be a regular
expression over modules of the training code, and says nothing more. What would change an answer and is not computed
here is refused by its name: a folder is used as PEFT would use it, or not at all.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydix.engine.core.errors import StartupError
from raydix.engine.core.types import Adapter
from raydix.engine.model.config import ModelConfig, read_json
from raydix.engine.model.sizes import expected_shapes
from raydix.engine.model.stored_tensors import StoredTensor, read_tensors, text_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

FILES = (CONFIG, WEIGHTS)  # files of an adapter's folder
DIGEST_BYTES = 16

_PREFIX = "base_model.model."  # stands before the model's own name of each module
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_PROJECTION = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")

_READ = {
    "alora_invocation_tokens",
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "bias",
    "init_lora_weights",
}
# Settings of training, or said by the tensors' names and shapes as well.
_WITHOUT_EFFECT = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "ensure_weight_tying",
}
_KNOWN = _READ | _WITHOUT_EFFECT
# Ways to begin training that take a part out of the model's own weights, as loading the adapter does again.
_CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of one projection's addition, in a file."""

    down: StoredTensor
    """[rank, in_features]."""
    up: StoredTensor
    """[out_features, rank]."""
    scale: float
    """The factor on their product."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]


def read_adapter(folder: Path, config: ModelConfig) -> dict[str, Factors]:
    """The factors of an adapter of a model, by the model's names of the projections (`model.layers.0.mlp.up_proj`).

    Reads settings, names and shapes alone. Raises `StartupError` naming what cannot be used.
    """
    if not (folder / CONFIG).is_file():
        raise StartupError(f"{folder} is not an adapter's folder: it has no {CONFIG}")
    settings = read_json(folder / CONFIG)
    _check_settings(settings, folder)
    _invocation(settings, folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise StartupError(f"{folder} has no {WEIGHTS}, the one form of an adapter's weights that is read")

    stored = read_tensors(folder / WEIGHTS)
    names = text_names(name.removeprefix(_PREFIX) for name in stored)
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        factor = _FACTOR.fullmatch(names.get(name.removeprefix(_PREFIX), ""))
        if factor is None:
            raise StartupError(f"{folder / WEIGHTS}: {name} is no factor of a projection of the model")
        found.setdefault(factor[1], {})[factor[2]] = tensor
    if not found:
        raise StartupError(f"{folder / WEIGHTS} has no tensors")

    shapes = expected_shapes(config)
    return {module: _factors(module, found[module], settings, shapes, folder / WEIGHTS) for module in sorted(found)}


def identify_adapter(name: str, folder: str, config: ModelConfig) -> Adapter:
    """The adapter in a folder, with the digest of its weights: equal wherever and whenever the same numbers were
    written. Reads the whole file. Raises `StartupError` as `read_adapter`, naming the adapter."""
    path = Path(folder).expanduser()
    try:
        factors = read_adapter(path, config)
        invocation = _invocation(read_json(path / CONFIG), path / CONFIG)
        digest = _digest(factors, invocation)
    except StartupError as error:
        raise StartupError(f"adapter {name}: {error}") from None
    return Adapter(name, str(path), digest, invocation)


def identify_adapters(folders: Mapping[str, str], config: ModelConfig) -> tuple[Adapter, ...]:
    """The adapters in these folders, by name; raises `StartupError` as `identify_adapter`."""
    return tuple(identify_adapter(name, folder, config) for name, folder in folders.items())


def _invocation(settings: Mapping[str, Any], at: Path) -> tuple[int, ...]:
    """The tokens from which on an activated adapter is computed (PEFT's `alora_invocation_tokens`)."""
    found = settings.get("alora_invocation_tokens") or []
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < 1 << 31 for each in found):
        raise StartupError(f"{at}: alora_invocation_tokens must be a list of token ids")
    return tuple(found)


def _digest(factors: Mapping[str, Factors], invocation: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, key=b"raydix adapter")
    if invocation:
        digest.update(f"{list(invocation)}\n".encode())
    for module, pair in sorted(factors.items()):
        for tensor in (pair.down, pair.up):
            digest.update(f"{module} {tensor.dtype} {tensor.shape} {pair.scale.hex()}\n".encode())
            try:
                with tensor.file.open("rb") as file:
                    file.seek(tensor.begin)
                    digest.update(file.read(tensor.end - tensor.begin))
            except OSError as error:
                raise StartupError(f"cannot read {tensor.file}: {error}") from error
    return digest.digest()


def _check_settings(settings: Mapping[str, Any], folder: Path) -> None:
    """Raise `StartupError` for settings whose effect is not computed here."""
    at = folder / CONFIG
    if settings.get("peft_type") != "LORA":
        raise StartupError(f"{at}: peft_type is {settings.get('peft_type')!r}, and only LORA is supported")
    if settings.get("bias", "none") != "none":
        raise StartupError(f"{at}: bias {settings['bias']!r} is not supported, biases are the model's own")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_THE_MODEL):
        raise StartupError(
            f"{at}: init_lora_weights {begun!r} changes the model's own weights: convert the adapter to a plain one"
        )
    # A setting that is off, or that this release of PEFT does not know, has no effect; one that is on might have.
    for name, value in settings.items():
        if name not in _KNOWN and value not in (None, False, [], {}):
            raise StartupError(f"{at}: {name} is not supported")
    alphas = [settings.get("lora_alpha"), *_alphas(settings, at).values()]
    if not all(isinstance(alpha, int | float) and math.isfinite(alpha) for alpha in alphas):
        raise StartupError(f"{at}: lora_alpha and the values of alpha_pattern must be numbers")


def _alphas(settings: Mapping[str, Any], at: Path) -> dict[str, Any]:
    """The exceptions from `lora_alpha`, by ends of modules' names."""
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise StartupError(f"{at}: alpha_pattern must be an object")
    return patterns


def _factors(
    module: str,
    found: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    file: Path,
) -> Factors:
    """The factors of one module, checked against the model's shapes."""
    shape = shapes.get(f"{module}.weight")
    if shape is None or _PROJECTION.fullmatch(module) is None:
        raise StartupError(f"{file}: {module} is not supported: only projections of attention and of dense MLPs are")
    if set(found) != {"A", "B"}:
        raise StartupError(f"{file}: {module} has only one of lora_A and lora_B")
    down, up = found["A"], found["B"]
    rank = down.shape[0] if len(down.shape) == 2 else 0
    if rank == 0 or down.shape != (rank, shape[1]) or up.shape != (shape[0], rank):
        raise StartupError(
            f"{file}: {module} has factors of shapes {list(down.shape)} and {list(up.shape)}, and the model's weight "
            f"has {list(shape)}"
        )
    # Patterns are of the names in the training code.
    own_name = down.name.removeprefix(_PREFIX).partition(".lora_A.")[0]
    alpha = settings["lora_alpha"]
    for pattern, of_pattern in _alphas(settings, file).items():
        # As PEFT reads it: the first pattern that the name of the module ends with.
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", own_name):
                alpha = of_pattern
                break
        except re.error as error:
            raise StartupError(f"{file.parent / CONFIG}: alpha_pattern {pattern!r}: {error}") from None
    return Factors(down, up, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
