"""xgrammar with its defaults, but for two: properties and items beyond those that a schema mentions are allowed, as the
schema says; and one thread compiles, as in raydix's workers."""

import importlib.metadata
import time
from typing import Any

import xgrammar  # type: ignore[import-not-found]
from transformers import AutoTokenizer


def load(options: dict[str, Any]) -> "XGrammar":
    return XGrammar(options["model"], options["vocab_size"], options["end_ids"])


class XGrammar:
    """One tokenizer, and grammars over it."""

    def __init__(self, model: str, vocab_size: int, end_ids: list[int]) -> None:
        self.version = importlib.metadata.version("xgrammar")
        self.settings = {"max_threads": 1, "strict_mode": False}
        loaded = AutoTokenizer.from_pretrained(model)
        started = time.process_time()
        tokenizer = xgrammar.TokenizerInfo.from_huggingface(loaded, vocab_size=vocab_size, stop_token_ids=end_ids)
        self.tokenizer_s = time.process_time() - started
        self._compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=self.settings["max_threads"])
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._end_id = end_ids[0]

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, strict_mode=self.settings["strict_mode"])

    def begin(self, compiled: Any) -> "Answer":
        return Answer(xgrammar.GrammarMatcher(compiled), self._mask, self._end_id)


class Answer:
    """A matcher, and the memory of its masks."""

    def __init__(self, matcher: Any, mask: Any, end_id: int) -> None:
        self._matcher = matcher
        self._mask = mask
        self._end_id = end_id

    def fill_mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)

    def consume(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def is_complete(self) -> bool:
        return bool(self._matcher.accept_token(self._end_id))
