"""`cache.prefix_caching: false`: nothing is named, kept or told of but for hand-overs, and answers stay the same."""

from typing import Any

import pytest
from pydantic import ValidationError

from raydix.configs import Config
from raydix.configs.settings import engine_settings
from raydix.engine.core import hashing
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.tenants import salt_of
from raydix.engine.core.types import AdmitRequest, CacheHints, Role, Salt, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from tests.unit.builders import FINGERPRINT, ROOT, FakeModel, answer_to, hashes_of, make_assignment, tokens_of

PROMPT = tuple(index % 4 for index in range(22))
"""Five blocks and a half."""


def make_engine(num_blocks: int = 32) -> Engine:
    pool = BlockPool(num_blocks, 4, keeps_blocks=False)
    model = FakeModel(pool)
    return Engine(model, model, pool, SchedulerLimits(8, 8), num_blocks * 4, FINGERPRINT)


def run(engine: Engine) -> tuple[list[TokenEvent], list[ExportedSegment]]:
    events: list[TokenEvent] = []
    segments: list[ExportedSegment] = []
    while (step := engine.step(0.0)) is not None:
        events += step.events
        segments += step.segments
        engine.scheduler.check_integrity()
    return events, segments


def test_a_whole_request_is_neither_hashed_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("hashed")

    engine = make_engine()
    for name in ("hash_blocks", "hash_block", "salted"):
        monkeypatch.setattr(hashing, name, fail)
    for _ in range(2):
        engine.submit(make_assignment(prompt=PROMPT, prompt_logprobs=1, max_tokens=9), 0.0)
        events, _ = run(engine)
        assert events[0].cached_tokens == 0
        assert engine.pool.num_cached == 0 and engine.pool.drain_journal() == ([], [])
    monkeypatch.undo()
    assert tokens_of(events) == answer_to(make_assignment(prompt=PROMPT, max_tokens=9))


def test_a_hand_over_works_and_leaves_nothing_behind() -> None:
    prefill, decode = make_engine(), make_engine()
    hashes = hashes_of(PROMPT)
    decode.submit(make_assignment(prompt=PROMPT, stage=Stage.DECODE, awaited=hashes, max_tokens=6), 0.0)
    assert decode.step(0.0) is None, "it waits"
    prefill.submit(make_assignment(prompt=PROMPT, stage=Stage.PREFILL, max_tokens=6), 0.0)
    [first], segments = run(prefill)
    assert [name for segment in segments for name in segment.header.full_hashes] == hashes
    for segment in segments:
        assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    step = decode.step(0.0)
    assert step is not None and step.shape.num_prefill_tokens == 0, "nothing of the prompt is computed again"
    rest, _ = run(decode)
    assert tokens_of([first, *step.events, *rest]) == answer_to(make_assignment(prompt=PROMPT, max_tokens=6))
    for engine in (prefill, decode):
        assert engine.pool.hashes() == [] and engine.pool.num_cached == 0
        assert engine.pool.drain_journal() == ([], [])


@pytest.mark.parametrize("is_early", [False, True])
def test_imports_of_an_aborted_request_are_forgotten(is_early: bool) -> None:
    """Whether they came before the request or after it, full blocks and the partial one."""
    prefill, decode = make_engine(), make_engine()
    prefill.submit(make_assignment(prompt=PROMPT, stage=Stage.PREFILL, max_tokens=6), 0.0)
    _, segments = run(prefill)
    waiting = make_assignment(prompt=PROMPT, stage=Stage.DECODE, awaited=hashes_of(PROMPT), max_tokens=6)
    if not is_early:
        decode.submit(waiting, 0.0)
    for segment in segments:
        assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    if is_early:
        decode.submit(waiting, 0.0)
    assert len(decode.pool.hashes()) >= len(PROMPT) // 4
    decode.abort([waiting.request_id], 0.0)
    assert decode.pool.hashes() == [] and decode.pool.num_cached == 0
    assert decode.pool.num_available == decode.pool.num_blocks
    decode.scheduler.check_integrity()


def test_imports_that_another_request_holds_stay() -> None:
    prefill, decode = make_engine(), make_engine()
    prefill.submit(make_assignment(prompt=PROMPT, stage=Stage.PREFILL, max_tokens=6), 0.0)
    _, segments = run(prefill)
    for name in ("aborted", "other"):
        decode.submit(make_assignment(name, PROMPT, stage=Stage.DECODE, awaited=hashes_of(PROMPT)), 0.0)
    for segment in segments:
        assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    decode.abort(["aborted"], 0.0)
    assert set(hashes_of(PROMPT)) <= set(decode.pool.hashes())
    decode.abort(["other"], 0.0)
    assert decode.pool.num_cached == 0


def test_a_segment_goes_with_its_request() -> None:
    directory = Directory(CostModel(block_size=4, piggyback_tokens=0), 1 << 20, keeps_segments=False)
    directory.register("p", Role.PREFILL, 1, 32, ())
    directory.register("d", Role.DECODE, 1, 32, ())
    prefill = make_engine()
    for request_id in ("a", "b"):
        salt = salt_of("", request_id)
        names = hashing.BlockChain(ROOT, salt, 4).hashes(PROMPT)
        admission, _ = directory.admit(
            AdmitRequest(request_id, 0, tuple(names), len(PROMPT), None, "ingress", CacheHints(), PROMPT[:4]), 0.0
        )
        assert (admission.prefill, admission.decode, admission.prefill_awaited) == ("p", "d", ())
        prefill.submit(make_assignment(request_id, PROMPT, stage=Stage.PREFILL, salt=salt), 0.0)
        for segment in run(prefill)[1]:
            assert directory.segment_exported("p", 1, segment.header, "ref", 0.0), "it is delivered"
        directory.check_integrity()
        [decision] = directory.decisions.of(request_id)[request_id]
        assert decision.as_json()["note"] == "cache.prefix_caching is false: nothing is kept for later requests"
        directory.end_request(request_id, 0.0)
        directory.check_integrity()
        assert (len(directory.stock.segments), directory.stock.segments.store_bytes, len(directory.stock.blocks)) == (
            0,
            0,
            0,
        )


def test_a_request_without_names_is_placed_like_any_other() -> None:
    directory = Directory(CostModel(block_size=4, piggyback_tokens=0), 0, keeps_segments=False)
    directory.register("m", Role.MIXED, 1, 32, ())
    admission, instructions = directory.admit(AdmitRequest("a", 0, (), 100, None, "ingress", CacheHints(), ()), 0.0)
    assert (admission.prefill, admission.decode, instructions) == ("m", "m", [])
    assert len(directory.stock.blocks) == 0
    directory.end_request("a", 0.0)
    directory.check_integrity()


@pytest.mark.parametrize(
    ("cache", "tenant", "named"),
    [
        ({"disk_gib": 1}, {}, "disk_gib"),
        ({"public_prefixes": ["You are"]}, {}, "public_prefixes"),
        ({}, {"cache_min": 0.1}, "cache_min"),
        ({}, {"cache_max": 0.5}, "cache_max"),
    ],
)
def test_what_is_for_kv_that_is_kept_is_refused_by_name(
    cache: dict[str, Any], tenant: dict[str, Any], named: str
) -> None:
    values: dict[str, Any] = {"workers": {"mixed": {}}, "tenants": [{"name": "acme", **tenant}]}
    with pytest.raises(ValidationError, match=named):
        Config.model_validate({**values, "cache": {"prefix_caching": False, **cache}})
    Config.model_validate({**values, "cache": {"prefix_caching": True, **cache}})


def test_engines_are_told() -> None:
    config = Config.model_validate({"workers": {"mixed": {}}, "cache": {"prefix_caching": False}})
    assert config.workers.mixed is not None
    assert not engine_settings(config, config.workers.mixed).prefix_caching
    assert Salt() != salt_of("", "a") != salt_of("", "b")
