"""raydix's own engine as in a worker process, stepped without Ray."""

import importlib.metadata
import itertools
import os
import time
from typing import Any

from benchmarks.stepping import make_engine, whole


def load(options: dict[str, Any]) -> "Raydix":
    return Raydix(options)


class Raydix:
    """Options: `model` folder, `pool_gib`, `token_budget`, `max_requests`, and maybe `quantization`."""

    caches_prefixes = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.engine = make_engine(
            options["model"],
            token_budget=options["token_budget"],
            max_requests=options["max_requests"],
            pool_gib=options["pool_gib"],
            quantization=options.get("quantization"),
        )
        self.version = importlib.metadata.version("raydix")
        names = [name for name in options if name != "model"]
        waiting = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
        self.settings = {name: options[name] for name in names} | waiting
        self._numbers = itertools.count()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs: dict[str, list[int]] = {str(next(self._numbers)): [] for _ in prompts}
        for name, prompt in zip(outputs, prompts, strict=True):
            self.engine.submit(whole(name, prompt, max_tokens), time.monotonic())
        while (result := self.engine.step(time.monotonic())) is not None:
            for event in result.events:
                if event.token_id is not None:
                    outputs[event.request_id].append(event.token_id)
        return list(outputs.values())
