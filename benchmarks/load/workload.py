"""Contents of requests: prompts of token ids of exact length, and conversations in plain words. All from a seed.

Each prompt depends only on (seed, kind, index), never on the order of sending, so two runs with one seed send the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks.load.words import WORDS

Prompt = npt.NDArray[np.int64]
Message = dict[str, str]

# Ids below are special tokens in most vocabularies; the smallest vocabulary allowed leaves enough above them.
LOWEST_TOKEN = 100
SMALLEST_VOCAB = 2 * LOWEST_TOKEN

UNIQUE, SHARED, WARMUP = range(3)


def unique_prompt(seed: int, index: int, num_tokens: int, vocab: int, kind: int = UNIQUE) -> Prompt:
    """`num_tokens` random ids; already the first differs between neighbours, so no cached block can match."""
    prompt = np.random.default_rng((seed, kind, index)).integers(LOWEST_TOKEN, vocab, num_tokens)
    if num_tokens:
        prompt[0] = LOWEST_TOKEN + (seed + index) % (vocab - LOWEST_TOKEN)
    return prompt


def shared_prompt(seed: int, index: int, num_shared: int, num_unique: int, vocab: int, prefixes: int = 1) -> Prompt:
    """One of `prefixes` common beginnings of `num_shared` ids, taken in turn, then `num_unique` of its own."""
    prefix = unique_prompt(seed, index % prefixes, num_shared, vocab, SHARED)
    return np.concatenate((prefix, unique_prompt(seed, index, num_unique, vocab)))


def user_text(seed: int, user: int, turn: int, num_words: int) -> str:
    """Message of `user` at `turn`: seeded words, one to two tokens each in most vocabularies."""
    words = random.Random(f"{seed} {user} {turn}").choices(WORDS, k=num_words)
    return " ".join(words).capitalize() + "."


def open_conversation(seed: int, num_words: int) -> list[Message]:
    """A system message common to all users, or none where `num_words` is 0."""
    return [{"role": "system", "content": user_text(seed, -1, 0, num_words)}] if num_words else []


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Values common to all requests of a run."""

    model: str
    output_tokens: int
    extra: dict[str, Any]

    def completion_body(self, prompt: Prompt) -> bytes:
        """A request to /v1/completions."""
        return self._body({"prompt": prompt})

    def chat_body(self, messages: list[Message]) -> bytes:
        """A request to /v1/chat/completions."""
        return self._body({"messages": messages})

    def _body(self, content: dict[str, Any]) -> bytes:
        common = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return orjson.dumps(common | content | self.extra, option=orjson.OPT_SERIALIZE_NUMPY)
