"""The model's tokenizer as llguidance wants it."""

from pathlib import Path

from llguidance import LLTokenizer

from raydix.engine.core.errors import StartupError
from raydix.engine.model.grammar_source import GrammarError, first_words
from raydix.engine.model.tokenizer import Tokenizer


def load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """Load the tokenizer of a model of `vocab_size` tokens, which takes a second or more.

    Raises GrammarError if the tokenizer cannot be used for grammars.
    """
    try:
        tokenizer = Tokenizer(folder)
        if not tokenizer.eos_token_ids:
            raise GrammarError("this model has no token that ends a sequence, which grammars need")
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        return LLTokenizer(tokenizer.to_json(), n_vocab=num_tokens, eos_token=tokenizer.eos_token_ids)
    except (ValueError, StartupError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"this model's tokenizer cannot be used with grammars: {first_words(str(error))}") from error
