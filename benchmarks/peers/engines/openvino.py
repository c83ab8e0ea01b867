"""OpenVINO GenAI's continuous batching on CPU, bfloat16 for weights, arithmetic and KV."""

import importlib.metadata
import itertools
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]


def load(options: dict[str, Any]) -> "OpenVINO":
    return OpenVINO(options)


class OpenVINO:
    """Options: `ir` (folder written by optimum-intel), `pool_gib`, `token_budget`, `max_requests`, `properties`."""

    caches_prefixes = True

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options["pool_gib"]
        scheduler.max_num_batched_tokens = options["token_budget"]
        scheduler.max_num_seqs = options["max_requests"]
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["ir"], scheduler, "CPU", options["properties"]
        )
        self.version = importlib.metadata.version("openvino-genai")
        names = ("pool_gib", "token_budget", "max_requests", "properties")
        self.settings = {name: options[name] for name in names}
        self._numbers = itertools.count()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.do_sample = False
        config.ignore_eos = True
        handles = [
            self.pipeline.add_request(next(self._numbers), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]
