"""Model families, and the description of a decoder from a Hugging Face `config.json`, of transformers 4 or 5.

One decoder covers every family; the families differ in data alone: a `ModelConfig`. Those of one line of descent share
a file here. Of a model that also takes images or sound (`Gemma3ForConditionalGeneration`) the text part is served,
which `text_config` describes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import STORED_BITS, JsonObject, ModelConfig, read_json, unsupported
from raydix.engine.model.families.cohere import COHERE, COHERE2
from raydix.engine.model.families.corrected import DOTS1, ERNIE4_5_MOE, GLM4_MOE, MINIMAX_M2
from raydix.engine.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED
from raydix.engine.model.families.gpt_oss import GPT_OSS
from raydix.engine.model.families.granite import BAMBA, GRANITE, GRANITE_HYBRID, GRANITE_MOE
from raydix.engine.model.families.layer_norms import GPT_NEOX, PHI, STABLELM, STARCODER2
from raydix.engine.model.families.lfm import LFM2, LFM2_MOE
from raydix.engine.model.families.llama import ERNIE4_5, EXAONE4, GLM, GLM4, HELIUM, LLAMA, PHI3, SEED_OSS, SMOLLM3
from raydix.engine.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from raydix.engine.model.families.nemotron import NEMOTRON_H
from raydix.engine.model.families.olmo import OLMO2, OLMO3, OLMOE
from raydix.engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from raydix.engine.model.families.refused import missing_for
from raydix.engine.model.packed_weights import MXFP4_BITS, packing_of

_ALL = (
    *(LLAMA, MISTRAL, MINISTRAL),
    *(QWEN2, QWEN3, QWEN3_5, GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED),
    *(PHI3, SMOLLM3, GLM, GLM4, HELIUM, ERNIE4_5, SEED_OSS),
    *(COHERE, COHERE2, STABLELM, PHI, STARCODER2, GPT_NEOX),
    *(GRANITE, OLMO2, OLMO3, EXAONE4, MINISTRAL3),
    *(LFM2, LFM2_MOE, GRANITE_HYBRID, BAMBA, NEMOTRON_H),
    *(QWEN2_MOE, QWEN3_NEXT, QWEN3_5_MOE),
    *(QWEN3_MOE, MIXTRAL, OLMOE, GRANITE_MOE, GPT_OSS),
    *(GLM4_MOE, ERNIE4_5_MOE, DOTS1, MINIMAX_M2),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE),
)
FAMILIES = {family.model_type: family for family in _ALL}  # supported families by model type


def read_config(folder: Path) -> ModelConfig:
    """Describe the decoder of a model folder by its `config.json`; raises `StartupError` as `config_of` does."""
    return config_of(read_json(folder / "config.json"))


def config_of(config: JsonObject) -> ModelConfig:
    """Describe the decoder of a Hugging Face configuration.

    Raises `StartupError` for a family, or a variation of one, that the decoder does not cover.
    """
    stated, config = config, _text_part(config)
    family = _family(config)
    quantized = stated.get("quantization_config")
    packing = None
    if quantized and quantized.get("quant_method") not in family.reads_quantized:
        packing = packing_of(quantized)

    try:
        described = family.describe(Settings(family.architecture, config, family.defaults))
        # The cache is made of blocks of keys and values, of which such a model has none.
        if not described.attention_layers:
            raise StartupError(f"{family.architecture} has no layer with attention here, which is not supported")
        bits = stated.get(STORED_BITS) if packing is None else packing.bits_in_memory()
        if bits is None and described.experts is not None and described.experts.stored == "mxfp4":
            bits = MXFP4_BITS
        return replace(described, stored_bits=None if bits is None else float(bits), packing=packing)
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
    by_name = {name: family for family in FAMILIES.values() for name in (family.architecture, *family.also)}
    names = config.get("architectures") or []
    for name in names:
        if name in by_name:
            return by_name[name]
    if names:
        raise _refusal(
            f"the model architecture {names[0]}", names[0], [each.architecture for each in FAMILIES.values()]
        )

    model_type = str(config.get("model_type", "unknown")).removesuffix("_text").replace("_", "").lower()
    if (family := FAMILIES.get(model_type) or by_name.get(model_type)) is None:
        raise _refusal(f"the model type {config.get('model_type')!r}", model_type, FAMILIES)
    return family


def _refusal(what: str, name: str, supported: Iterable[str]) -> StartupError:
    """Name what is missing for a model that does not run, or where that is not known the families that do."""
    if (missing := missing_for(name)) is not None:
        return StartupError(f"{what} is not supported: raydix lacks {missing}; `raydix models` lists what runs")
    return unsupported(what, supported)
