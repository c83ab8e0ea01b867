"""llguidance as raydix uses it: its own bounds, grammars compiled by the worker's `Grammars`."""

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from raydix.engine.core.types import Grammar, GrammarKind
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.masks import Mask, num_words
from raydix.engine.model.matcher import Matcher
from raydix.engine.model.tokenizer import Tokenizer, forgo_torch


def load(options: dict[str, Any]) -> "LLGuidance":
    forgo_torch()
    return LLGuidance(Path(options["model"]), options["vocab_size"], options["end_ids"])


class LLGuidance:
    """One tokenizer, and grammars over it."""

    def __init__(self, model: Path, vocab_size: int, end_ids: list[int]) -> None:
        self.version = importlib.metadata.version("llguidance")
        self.settings: dict[str, Any] = {}
        loaded = Tokenizer(model)
        started = time.process_time()
        tokenizer = LLTokenizer(loaded.to_json(), n_vocab=vocab_size, eos_token=end_ids)
        self.tokenizer_s = time.process_time() - started
        self._grammars = Grammars(lambda: tokenizer, vocab_size)
        self._mask = np.zeros(num_words(vocab_size), np.int32)

    def compile(self, schema: str) -> LLMatcher:
        return self._grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, schema))

    def begin(self, compiled: LLMatcher) -> "Answer":
        return Answer(Matcher(compiled), self._mask)


class Answer:
    """A matcher, and the memory of its masks."""

    def __init__(self, matcher: Matcher, mask: Mask) -> None:
        self._matcher = matcher
        self._mask = mask

    def fill_mask(self) -> None:
        self._matcher.state.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def consume(self, token_id: int) -> bool:
        return self._matcher.consume([token_id]) == 1

    def is_complete(self) -> bool:
        return self._matcher.state.is_accepting()
