"""llama.cpp through llama-cpp-python's C interface: several sequences in one context, greedy, weights in Q4_1."""

import ctypes
import os
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def load(options: dict[str, Any]) -> "LlamaCpp":
    return LlamaCpp(options)


class LlamaCpp:
    """Options: `gguf` file, `token_budget`.

    A context is made for each number of sequences, so that each sequence has its own part of the KV memory: in a shared
    part, every token attends to the cells of all sequences, and 64 streams take three times as long.
    """

    caches_prefixes = False

    def __init__(self, options: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            options["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.budget = options["token_budget"]
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.budget, 0, 1)
        self.context: Any = None
        self.version = llama_cpp.__version__
        self.settings = {"token_budget": self.budget}
        self._contexts: dict[int, tuple[int, Any]] = {}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        self._use_context(len(prompts), max(map(len, prompts)) + max_tokens)
        tokens: list[list[int]] = [[] for _ in prompts]
        work = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]

        for produced in range(max_tokens):
            for start in range(0, len(work), self.budget):
                for sequence, token in self._decode(work[start : start + self.budget]):
                    tokens[sequence].append(token)
            work = [
                (tokens[sequence][-1], len(prompt) + produced, sequence, True)
                for sequence, prompt in enumerate(prompts)
            ]

        return tokens

    def _use_context(self, count: int, length: int) -> None:
        """Go on with an empty context for `count` sequences of up to `length` tokens."""
        capacity, self.context = self._contexts.get(count, (0, None))
        if capacity < length:
            if self.context is not None:
                llama_cpp.llama_free(self.context)
            capacity = -(-length // 256) * 256
            self.context = self._new_context(count, capacity)
            self._contexts[count] = capacity, self.context
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def _new_context(self, count: int, capacity: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = count * capacity
        params.n_seq_max = count
        params.kv_unified = False
        params.n_batch = params.n_ubatch = self.budget
        params.n_threads = params.n_threads_batch = os.cpu_count()
        context = llama_cpp.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("llama.cpp could not make a context")
        return context

    def _decode(self, work: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run (token, position, sequence, whether to sample) together; (sequence, next token) of each sampling one."""
        batch = self.batch
        batch.n_tokens = len(work)
        for row, (token, position, sequence, samples) in enumerate(work):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = samples
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        sampled = [(row, sequence) for row, (_, _, sequence, samples) in enumerate(work) if samples]
        return [(sequence, self._argmax(row)) for row, sequence in sampled]

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocab_size)).contents
        return int(np.frombuffer(array, dtype=np.float32).argmax())
