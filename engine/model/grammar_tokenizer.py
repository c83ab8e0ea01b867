"""The model's tokenizer as llguidance wants it."""

from pathlib import Path
from typing import NamedTuple

from llguidance import LLTokenizer
from tokenizers import Tokenizer as Backend

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import read_json
from raydix.engine.model.grammar_source import GrammarError, first_words
from raydix.engine.model.tokenizer import Tokenizer, eos_token_ids

# Class of tokenizers of which transformers changes nothing that the folder's `tokenizer.json` says.
SAVED_WHOLE = "TokenizersBackend"

# Keys of a folder's `tokenizer_config.json` whose tokens transformers adds.
_ADDING = {"added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"}


class _Parts(NamedTuple):
    """Parts of a tokenizer that llguidance needs."""

    text: str
    """A `tokenizer.json`."""
    eos_token_ids: list[int]
    size: int


def load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """Load the tokenizer of a model of `vocab_size` tokens. That takes half a second of processor time or, where
    transformers has to be loaded for it, three; llguidance holds the interpreter's lock for 0.2 s of it or more.

    Raises GrammarError if the tokenizer cannot be used for grammars.
    """
    try:
        parts = _saved(folder) or _built(folder)
        if not parts.eos_token_ids:
            raise GrammarError("this model has no token that ends a sequence, which grammars need")
        size = max(vocab_size, parts.size)
        whole = LLTokenizer(parts.text, n_vocab=size, eos_token=parts.eos_token_ids, slices=[])
        # Each call holds the interpreter's lock, so that a step of the engine goes between the two: the slices, which
        # masks are looked up in, are a third of the work.
        return whole.with_slices(LLTokenizer.general_slices())
    except (ValueError, StartupError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"this model's tokenizer cannot be used with grammars: {first_words(str(error))}") from error


def _saved(folder: Path) -> _Parts | None:
    """Read a tokenizer that the folder has whole, without transformers; None if it may have less than the whole."""
    path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.is_file() or not config_path.is_file():
        return None
    config = read_json(config_path)
    if config.get("tokenizer_class") != SAVED_WHOLE or _ADDING & config.keys():
        return None
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library has no kind of its own
        raise StartupError(str(error)) from error
    named = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    if any(backend.token_to_id(name) is None for name in named):
        return None
    backend.no_truncation()
    backend.no_padding()
    eos = config.get("eos_token")
    eos_id = backend.token_to_id(eos) if isinstance(eos, str) else None
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return _Parts(backend.to_str(), eos_token_ids(folder, eos_id), size)


def _built(folder: Path) -> _Parts:
    """Have transformers build a tokenizer."""
    tokenizer = Tokenizer(folder)
    return _Parts(tokenizer.to_json(), tokenizer.eos_token_ids, tokenizer.vocab_size)
