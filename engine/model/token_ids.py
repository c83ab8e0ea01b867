"""Number of token ids of a model folder's tokenizer, from its files alone: neither torch nor transformers is loaded.

Processes that compute read this number at every start, beside those that tokenize.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import read_json

OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers in other formats than `tokenizers`'s own, which only transformers reads."""


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
