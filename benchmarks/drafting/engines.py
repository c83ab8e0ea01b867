"""Engines on the same weights: with drafts and without, stepped in this process, which learn their costs as a worker's
do."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raydix.configs import load_config
from raydix.configs.settings import engine_settings
from raydix.engine.core.costs import CostFit
from raydix.engine.core.settings import GIB, DraftLimits, EngineSettings
from raydix.engine.core.types import Assignment, DraftSource, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.model.build import make_drafter, make_pool, make_runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine, StepResult
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.sizes import kv_block_bytes
from raydix.engine.model.sources import resolve_model

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_MODEL_LEN = 4096
POOL_GIB = 1.0
LEARN_S = 0.5  # seconds between two looks at the fit of the costs, as in a worker


def settings(model: str, sources: Sequence[DraftSource] | None = None) -> EngineSettings:
    """The engine of `cpu_mixed` with drafts as by default, of all sources or some."""
    chosen = {} if sources is None else {"sources": list(sources)}
    config = load_config("cpu_mixed", {"speculation": {"mode": "auto", **chosen}})
    assert config.workers.mixed is not None
    made = engine_settings(config, config.workers.mixed)
    return replace(made, source=model, max_model_len=MAX_MODEL_LEN, pool_gib=POOL_GIB)


class Workshop:
    """Makes engines that share one model's weights."""

    def __init__(self, model: str, sources: Sequence[DraftSource] | None = None) -> None:
        self.settings = settings(model, sources)
        self.folder: Path = resolve_model(model)
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        self.decoder = Decoder.from_folder(self.folder, dtype, "cpu", MAX_MODEL_LEN)
        self._load = cache(self._load_tokenizer)

    @property
    def num_blocks(self) -> int:
        """Blocks of a pool of `POOL_GIB`."""
        each = kv_block_bytes(self.decoder.config, self.settings.block_size, self.settings.dtype)
        return int(POOL_GIB * GIB) // each

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def draft_limits(self) -> DraftLimits:
        assert self.settings.drafts is not None, "drafts are on in `settings`"
        return self.settings.drafts

    def grammars(self) -> Grammars:
        return Grammars(self._load, self.vocab_size)

    def drafter(self, grammars: Grammars) -> Drafter:
        """A drafter as a worker has it. Raises RuntimeError where no drafts are made."""
        drafter = make_drafter(self.decoder, self.draft_limits, grammars)
        if drafter is None:
            raise RuntimeError("the bits of a row of this model here depend on the number of rows: there are no drafts")
        return drafter

    def engine(self, grammars: Grammars, drafter: Drafter | None) -> Engine:
        """An engine with a pool of its own."""
        gc.collect()  # pools of engines that are gone
        num_blocks, block_size, limits = self.num_blocks, self.settings.block_size, self.settings.limits
        store = make_pool(self.decoder.config, num_blocks, block_size, self.decoder.dtype, self.decoder.device)
        return Engine(
            runner=make_runner(self.decoder, store, limits, grammars),
            store=store,
            pool=BlockPool(num_blocks, block_size),
            limits=limits,
            max_model_len=min(MAX_MODEL_LEN, num_blocks * block_size),
            fingerprint="benchmark",
            grammars=grammars,
            drafter=drafter,
        )

    def _load_tokenizer(self) -> "LLTokenizer":
        from raydix.engine.model.grammar_tokenizer import load_tokenizer

        return load_tokenizer(self.folder, self.vocab_size)


@dataclass(slots=True)
class Timed:
    """One answer and its times, in seconds of `time.perf_counter`."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Ends of the steps with tokens of this answer."""

    @property
    def seconds(self) -> float:
        """Time from the first token to the last."""
        return self.times[-1] - self.times[0]


class SteppedWorker:
    """An engine that is stepped here, and its answers by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Timed] = {}
        self._costs = CostFit(engine.first_costs)
        self._learns_at = 0.0

    def submit(self, assignment: Assignment) -> None:
        self.answers[assignment.request_id] = Timed()
        self.engine.submit(assignment, time.monotonic())

    def step(self) -> list[TokenEvent]:
        """Run a step; returns the ends of requests.

        Raises:
            RuntimeError: a request failed, or no request can go on.
        """
        started = time.perf_counter()
        failed = self.engine.hear_of_grammars(time.monotonic())
        step = self.engine.step(time.monotonic())
        ended = time.perf_counter()
        if step is None and not failed and self.engine.grammars is not None:
            self.engine.grammars.compiler.settle()
            return []
        if failed or step is None or step.failures:
            raise RuntimeError(f"requests failed: {[*failed, *(() if step is None else step.failures)]}")

        self.engine.pool.drain_journal()
        self._learn(step, ended - started, ended)
        self._take(step.events, ended)
        return [event for event in step.events if event.finish is not None]

    def _take(self, events: Sequence[TokenEvent], now: float) -> None:
        for event in events:
            if event.token_id is not None:
                answer = self.answers[event.request_id]
                answer.token_ids.append(event.token_id)
                if not answer.times or answer.times[-1] != now:
                    answer.times.append(now)

    def _learn(self, step: StepResult, step_s: float, now: float) -> None:
        if step.is_typical:
            self._costs.step(step.shape, step_s)
        if now >= self._learns_at:
            self._costs.fade()
            self.engine.scheduler.learn_costs(self._costs.costs())
            self._learns_at = now + LEARN_S
