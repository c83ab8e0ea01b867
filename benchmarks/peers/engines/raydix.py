"""raydix's own engine as in a worker process, stepped without Ray."""

import importlib.metadata
import itertools
import os
import time
from dataclasses import replace
from typing import Any

from raydix.engine.core.costs import CostFit, WorkerCosts
from raydix.engine.core.settings import DraftLimits, EngineSettings, SchedulerLimits
from raydix.engine.core.types import Assignment, SamplingParams, Stage
from raydix.engine.model.build import build_engine
from raydix.engine.model.engine import StepResult

LEARN_S = 0.5
"""Seconds between two looks at the costs, as in a worker."""


def load(options: dict[str, Any]) -> "Raydix":
    return Raydix(options)


class Raydix:
    """Options: `model` folder, `pool_gib`, `token_budget`, `max_requests`, and maybe `quantization` and `drafts`. With
    drafts the engine learns its costs, as in a worker."""

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
            drafts=DraftLimits() if options.get("drafts") else None,
        )
        self.engine = build_engine(replace(settings, quantization=options.get("quantization")))
        self._costs = CostFit(WorkerCosts())
        self._learns_at = 0.0
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
        while (result := self._step()) is not None:
            for event in result.events:
                if event.token_id is not None:
                    outputs[event.request_id].append(event.token_id)
        return list(outputs.values())

    def _step(self) -> StepResult | None:
        started = time.perf_counter()
        result = self.engine.step(time.monotonic())
        ended = time.perf_counter()
        if self.engine.drafter is not None and result is not None and result.is_typical:
            self._costs.step(result.shape, ended - started)
            if ended >= self._learns_at:
                self.engine.scheduler.learn_costs(self._costs.costs())
                self._learns_at = ended + LEARN_S
        return result
