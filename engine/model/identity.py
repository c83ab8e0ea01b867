"""Identity of a model, for processes that compute and others: its folder, its lengths, the fingerprint of its KV.

Read from the model's files without torch, so that processes that compute nothing need not load torch; the number of its
token ids without transformers, too, since processes that compute read that at every start, beside those that tokenize.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import KVDtype, Quantization
from raydix.engine.model.config import ModelConfig, read_json
from raydix.engine.model.families import read_config
from raydix.engine.model.sources import SCRIPTED, computes_nothing, resolve_model
from raydix.engine.model.stored_tensors import StoredTensor, read_headers

_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model and the kind of KV computed with it."""

    folder: Path
    config: ModelConfig
    max_model_len: int
    """Tokens of the longest request."""
    vocab_size: int
    """Token ids of requests and answers: of the model's those that the tokenizer knows."""
    fingerprint: str
    """Equal in all processes whose KV has the same meaning. Workers append the name of their
    arithmetic."""


def identify(
    source: str,
    *,
    dtype: str,
    block_size: int,
    max_model_len: int | None = None,
    quantization: Quantization | None = None,
    kv_dtype: KVDtype | None = None,
    deterministic: bool = True,
) -> ModelIdentity:
    """Identify the model named by `source` (`resolve_model`).

    Raises:
        StartupError: the model does not exist, cannot be used, or has a context shorter than `max_model_len`.
    """
    folder = resolve_model(source, quantization=quantization)
    config = read_config(folder)
    if quantization == "stored" and config.stored_bits is None and not computes_nothing(source):
        raise StartupError(
            f"model.quantization is stored, but {source} has no weights in 4 to 8 bits that could be kept: "
            "name a GGUF file or a checkpoint that has such, or leave the key out"
        )

    # Without a model no products are computed, so none are named.
    products = f"{quantization or 'computed'}{'' if deterministic else '-fast'}"
    made_by = "" if computes_nothing(source) else products
    of_model = fingerprint(folder, dtype, has_weights=not source.startswith(SCRIPTED))
    max_len = model_len(config, max_model_len)
    if kv_dtype is not None:
        made_by += f"-kv-{kv_dtype}"
    if any(rope is not None and rope.is_long(max_len) for rope in config.rope_of_layer):
        made_by += "-longrope"
    return ModelIdentity(
        folder=folder,
        config=config,
        max_model_len=max_len,
        vocab_size=min(config.vocab_size, num_token_ids(folder) or config.vocab_size),
        fingerprint=f"{of_model}/{block_size}/{made_by}/{version('raydix')}",
    )


def model_len(config: ModelConfig, wanted: int | None) -> int:
    """The longest request in tokens: the model's context, or less if so configured.

    Raises:
        StartupError: more is wanted than the model can do.
    """
    if wanted is not None and wanted > config.max_position:
        raise StartupError(f"model.max_model_len is {wanted}, but the model's context has {config.max_position} tokens")
    return wanted or config.max_position


def fingerprint(folder: Path, dtype: str, *, has_weights: bool = True) -> str:
    """Digest everything that a KV cache computed with this model depends on: 32 hexadecimal digits.

    Two folders with the same model have the same fingerprint, wherever and whenever they were written. The fingerprint
    covers the decoder's description, its dtype, each tensor's name, shape and dtype, and of each tensor's bytes the
    first, middle and last 4 KiB. Training, even of a few projections merged into their base, changes numbers all over
    the trained tensors, so samples tell checkpoints apart without reading gigabytes at each start; an edit by hand of a
    few bytes elsewhere is not seen.
    """
    digest = hashlib.blake2b(digest_size=16)
    description = asdict(read_config(folder))
    digest.update(json.dumps([description, dtype], sort_keys=True, default=repr).encode())
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    stored = read_headers(folder) if has_weights else {}
    for name in sorted(stored):
        by_file.setdefault(stored[name].file, []).append((name, stored[name]))

    samples: dict[str, bytes] = {}
    for path, tensors in by_file.items():
        with path.open("rb") as file:
            for name, tensor in tensors:
                samples[name] = b"".join(_sample(file, tensor.begin, tensor.end))

    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {len(samples[name])}\n".encode())
        digest.update(samples[name])

    return digest.hexdigest()


def _sample(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    middle = (begin + end) // 2
    for start in sorted({begin, max(begin, middle), max(begin, end - _SAMPLE_BYTES)}):
        file.seek(start)
        yield file.read(min(_SAMPLE_BYTES, end - start))


# Files of tokenizers in other formats than `tokenizers`'s own, which only transformers reads.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def num_token_ids(folder: Path) -> int | None:
    """Return the highest token id that has text, plus one; None if the folder has no tokenizer.

    Raises:
        StartupError: the tokenizer's files cannot be read.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return max(_ids(folder, read_json(path)), default=-1) + 1
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StartupError(f"cannot read {path}: {type(error).__name__}: {error}") from error

    if any((folder / name).is_file() for name in OTHER_TOKENIZERS):
        from raydix.engine.model.tokenizer import Tokenizer  # transformers comes with it

        return Tokenizer(folder).vocab_size
    return None


def _ids(folder: Path, tokenizer: dict[str, Any]) -> Iterator[int]:
    """The ids of the vocabulary, then those that are added in each of the places in which transformers looks."""
    vocabulary = tokenizer["model"]["vocab"]
    # A Unigram vocabulary is a list of tokens with their scores, every other one a mapping to ids.
    yield from range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    yield from (int(token["id"]) for token in tokenizer.get("added_tokens") or ())

    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        yield from map(int, read_json(settings).get("added_tokens_decoder") or ())
    added = folder / "added_tokens.json"
    if added.is_file():
        yield from map(int, json.loads(added.read_text(encoding="utf-8")).values())
