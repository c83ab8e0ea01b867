"""Model families, and the description of a decoder from a Hugging Face `config.json`, of transformers 4 or 5.

One decoder covers every family; the families differ in data alone: a `ModelConfig`. Each has a file here. Of a model
that also takes images or sound (`Gemma3ForConditionalGeneration`) the text part is served, which `text_config`
describes.
"""

from collections.abc import Mapping
from pathlib import Path

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import JsonObject, ModelConfig, read_json, unsupported
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.gemma import GEMMA
from raydix.engine.model.families.gemma2 import GEMMA2
from raydix.engine.model.families.gemma3 import GEMMA3
from raydix.engine.model.families.llama import LLAMA
from raydix.engine.model.families.mistral import MISTRAL
from raydix.engine.model.families.qwen2 import QWEN2
from raydix.engine.model.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3)}
"""Supported families by model type."""


def read_config(folder: Path) -> ModelConfig:
    """Describe the decoder of a model folder by its `config.json`; raises `StartupError` as `config_of` does."""
    return config_of(read_json(folder / "config.json"))


def config_of(config: JsonObject) -> ModelConfig:
    """Describe the decoder of a Hugging Face configuration.

    Raises `StartupError` for a family, or a variation of one, that the decoder does not cover.
    """
    if config.get("quantization_config"):
        raise StartupError(
            f"the model's weights are quantised ({config['quantization_config'].get('quant_method', 'unknown')}); "
            "raydix reads bfloat16, float16 and float32 weights: use an unquantised checkpoint or a GGUF file"
        )
    config = _text_part(config)
    family = _family(config)

    try:
        return family.describe(Settings(family.architecture, config, family.defaults))
    except KeyError as error:
        raise StartupError(f"config.json of {family.architecture} lacks the key {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise StartupError(f"config.json of {family.architecture} has an unusable value: {error}") from error


def _text_part(config: JsonObject) -> JsonObject:
    """The configuration of the text part of a model of several parts; of any other model its own."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        return config
    # The head is the whole model's, so what the whole says of it goes before what the part says. Some wrappers name
    # their own architecture in the part, too: the part's model type decides.
    tied = config.get("tie_word_embeddings")
    head = {} if tied is None else {"tie_word_embeddings": tied}
    return {**part, **head, "architectures": None}


def _family(config: JsonObject) -> Family:
    """Find the family by its architecture, or in a configuration without architectures by its model type."""
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    names = config.get("architectures") or []
    for name in names:
        if name in by_architecture:
            return by_architecture[name]
    if names:
        raise unsupported(f"the model architecture {names[0]}", by_architecture)

    model_type = str(config.get("model_type", "unknown")).removesuffix("_text").replace("_", "").lower()
    if model_type not in FAMILIES:
        raise unsupported(f"the model type {config.get('model_type')!r}", FAMILIES)
    return FAMILIES[model_type]
