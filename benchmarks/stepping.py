"""Parts of benchmarks that step one engine in their own process, without Ray and HTTP."""

from collections.abc import Sequence
from typing import Any

from raydix.engine.core.settings import EngineSettings, SchedulerLimits
from raydix.engine.core.types import Assignment, Sampling, Stage
from raydix.engine.model.build import build_engine
from raydix.engine.model.engine import Engine
from raydix.engine.model.sources import DEFAULT_MODEL


def make_engine(source: str = DEFAULT_MODEL, *, token_budget: int = 512, max_requests: int, **settings: Any) -> Engine:
    """An engine in bfloat16 with blocks of 16 tokens. `settings`: others of `EngineSettings`, which go before these."""
    usual = {"dtype": "bfloat16", "device": "cpu", "max_model_len": None, "block_size": 16, "num_blocks": None}
    limits = SchedulerLimits(token_budget, max_requests)
    return build_engine(EngineSettings(source=source, limits=limits, **{**usual, **settings}))


def whole(request_id: str, prompt: Sequence[int], sampling: Sampling | int) -> Assignment:
    """A request that this engine computes alone. `sampling`: a number stands for so many greedy tokens."""
    if isinstance(sampling, int):
        sampling = Sampling(max_tokens=sampling, temperature=0.0)
    return Assignment(
        request_id=request_id,
        attempt=0,
        stage=Stage.WHOLE,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        reply_to="",
    )
