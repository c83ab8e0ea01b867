"""raydix's own engine as in a worker process, stepped without Ray."""

import importlib.metadata
import itertools
import os
import time
from dataclasses import replace
from typing import Any

from raydix.engine.core.settings import EngineSettings, SchedulerLimits
from raydix.engine.core.types import Assignment, SamplingParams, Stage
from raydix.engine.model.build import build_engine


def load(options: dict[str, Any]) -> "Raydix":
    return Raydix(options)


class Raydix:
    """Options: `model` folder, `pool_gib`, `token_budget`, `max_requests`, and maybe `quantization`."""

    caches_prefixes = True

    def __init__(self, options: dict[str, Any]) -> None:
        limits = SchedulerLimits(options["token_budget"], options["max_requests"])
        settings = EngineSettings(
            source=options["model"],
            dtype="bfloat16",
            device="cpu",
            max_model_len=None,
            block_size=16,
            num_blocks=None,
            pool_gib=options["pool_gib"],
            limits=limits,
        )
        self.engine = build_engine(replace(settings, quantization=options.get("quantization")))
        self.version = importlib.metadata.version("raydix")
        names = [name for name in options if name != "model"]
        waiting = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
        self.settings = {name: options[name] for name in names} | waiting
        self._numbers = itertools.count()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        outputs: dict[str, list[int]] = {str(next(self._numbers)): [] for _ in prompts}
        for name, prompt in zip(outputs, prompts, strict=True):
            assignment = Assignment(
                request_id=name,
                attempt=0,
                stage=Stage.WHOLE,
                token_ids=tuple(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                reply_to="",
            )
            self.engine.submit(assignment, time.monotonic())
        while (result := self.engine.step(time.monotonic())) is not None:
            for event in result.events:
                if event.token_id is not None:
                    outputs[event.request_id].append(event.token_id)
        return list(outputs.values())
