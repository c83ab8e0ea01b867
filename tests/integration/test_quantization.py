"""A server with int8 weights: ingress and workers agree on whose KV it is, and the answers are the engine's own."""

import time
from pathlib import Path

from raydix.engine.core.settings import EngineSettings, Quantization, SchedulerLimits
from raydix.engine.core.types import Assignment, Sampling, Stage
from raydix.engine.model.build import build_engine
from tests.integration.cluster import Cluster
from tests.integration.conftest import random_prompt
from tests.integration.thin_model import write_thin_model

PROMPT, ANSWER_TOKENS = random_prompt(950, 300), 24


def logprobs_of_an_engine(model: str, quantization: Quantization | None) -> list[float]:
    settings = EngineSettings(
        model, "bfloat16", "cpu", 2048, 16, 200, 0, SchedulerLimits(512, 8), quantization=quantization
    )
    engine = build_engine(settings)
    sampling = Sampling(ANSWER_TOKENS, temperature=0.0, logprobs=0)
    engine.submit(Assignment("r", 0, Stage.WHOLE, tuple(PROMPT), len(PROMPT), sampling, ""), time.monotonic())
    values: list[float] = []
    while (step := engine.step(time.monotonic())) is not None:
        values += [event.logprobs.chosen for event in step.events if event.logprobs is not None]
    return values


def test_the_server_answers_with_int8_weights(cluster: Cluster, tmp_path: Path) -> None:
    source = str(write_thin_model(tmp_path))
    workers = {"prefill": {"token_budget": 128, "max_requests": 8}, "decode": {"token_budget": 128, "max_requests": 8}}
    model = {"source": source, "max_model_len": 2048, "quantization": "int8"}
    cache = {"num_blocks": 200, "segment_gib": 0.25}
    running = cluster.serve({"model": model, "cache": cache, "workers": workers}).server
    answers = [running.complete(PROMPT, max_tokens=ANSWER_TOKENS, logprobs=0) for _ in range(2)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0 and cached[1] >= len(PROMPT) // 16 * 16
    logprobs = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]
    assert logprobs[0] == logprobs[1] == logprobs_of_an_engine(source, "int8") != logprobs_of_an_engine(source, None)
