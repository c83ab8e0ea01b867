"""llama.cpp through llama-cpp-python's C interface: several sequences in one context, greedy, weights in Q4_1."""

import ctypes
import os
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def load(options: dict[str, Any]) -> "LlamaCpp":
    return LlamaCpp(options)


class LlamaCpp:
    """Options: `gguf` file, `token_budget`, `max_requests`, `context` (tokens of all sequences together)."""

    caches_prefixes = False

    def __init__(self, options: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            options["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options["context"]
        params.n_batch = params.n_ubatch = self.budget = options["token_budget"]
        params.n_seq_max = options["max_requests"]
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.budget, 0, 1)
        self.version = llama_cpp.__version__
        self.settings = {name: options[name] for name in ("token_budget", "max_requests", "context")}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(self.memory, False)
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

    def _decode(self, work: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run (token, position, sequence, whether to sample) together; (sequence, next token) of those that sample."""
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
