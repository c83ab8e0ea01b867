"""Two engines that send each other KV, with a model whose KV says what it is of (`builders.FakeModel`)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.costs import StepShape
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import (
    CacheHints,
    CacheMark,
    FinishReason,
    Handover,
    Retention,
    Salt,
    SegmentHeader,
    Stage,
    TokenEvent,
)
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.segments import checksum
from tests.unit.builders import FINGERPRINT, FakeModel, answer_to, hashes_of, make_assignment, tokens_of

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3, 2, 0)
"""Two blocks and a half."""


def make_engine(num_blocks: int = 16, token_budget: int = 8, fingerprint: str = FINGERPRINT) -> Engine:
    pool = BlockPool(num_blocks, 4)
    model = FakeModel(pool)
    return Engine(model, model, pool, SchedulerLimits(token_budget, 8), num_blocks * 4, fingerprint)


def run(engine: Engine, now: float = 0.0) -> tuple[list[TokenEvent], list[ExportedSegment]]:
    """Step until nothing moves."""
    events: list[TokenEvent] = []
    segments: list[ExportedSegment] = []
    while (result := engine.step(now)) is not None:
        events += result.events
        segments += result.segments
    engine.scheduler.check_integrity()
    return events, segments


def prefill(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6) -> tuple[list[TokenEvent], list[ExportedSegment]]:
    engine = make_engine()
    engine.submit(make_assignment(prompt=prompt, stage=Stage.PREFILL, max_tokens=max_tokens), 0.0)
    return run(engine)


def awaiting_engine(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6) -> Engine:
    engine = make_engine()
    assignment = make_assignment(
        prompt=prompt, stage=Stage.DECODE, awaited=hashes_of(prompt), max_tokens=max_tokens, await_timeout_s=5.0
    )
    engine.submit(assignment, 0.0)
    assert engine.step(0.0) is None
    return engine


def test_a_step_reports_what_it_did() -> None:
    engine = make_engine()
    engine.submit(make_assignment("a", (1, 2, 3), max_tokens=2), 0.0)
    engine.submit(make_assignment("b", (3, 2, 1, 0), max_tokens=1), 0.0)
    result = engine.step(0.0)
    assert result is not None
    assert result.shape.num_prefill_tokens == 7
    assert [event.request_id for event in result.events] == ["a", "b"]
    assert [request.request_id for request in result.finished] == ["b"]
    result = engine.step(0.0)
    assert result is not None and (result.shape.num_prefill_tokens, result.shape.num_decodes) == (0, 1)
    assert engine.step(0.0) is None


def test_the_model_is_warm_before_a_step_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(token_budget=8)
    warmed: list[tuple[int, int]] = []

    def warm_up(num_tokens: int) -> None:
        warmed.append((num_tokens, engine.scheduler.limits.token_budget))
        if num_tokens > 16:
            raise MemoryError("too large")

    monkeypatch.setattr(engine.runner, "warm_up", warm_up)
    engine.change_limits(SchedulerLimits(16, 4), ())
    assert warmed == [(16, 8)] and engine.scheduler.limits == SchedulerLimits(16, 4)
    with pytest.raises(MemoryError):
        engine.change_limits(SchedulerLimits(32, 4), ())
    assert engine.scheduler.limits == SchedulerLimits(16, 4)


def test_tenants_are_kept_apart() -> None:
    engine = make_engine()
    for salt in (Salt(), Salt(b"one"), Salt(b"two")):
        engine.submit(make_assignment("a", PROMPT, max_tokens=1, salt=salt), 0.0)
        events, _ = run(engine)
        assert events[-1].cached_tokens == 0
    engine.submit(make_assignment("a", PROMPT, max_tokens=1, salt=Salt(b"one")), 0.0)
    assert run(engine)[0][-1].cached_tokens == 8


@pytest.mark.parametrize("length", [1, 3, 4, 8, 9, 10])
def test_prefill_here_decode_there(length: int) -> None:
    prompt = PROMPT[:length]
    [first], segments = prefill(prompt)
    engine = awaiting_engine(prompt)
    for segment in segments:
        assert segment.payload.nbytes == segment.header.num_bytes == len(segment.header.hashes) * 32
        assert engine.exchange.import_segment(segment.header, segment.payload, 0.0)
    result = engine.step(0.0)
    assert result is not None
    assert result.shape == StepShape(0, 1, len(prompt) + 1), "nothing of the prompt is computed again"
    rest, _ = run(engine)
    assert tokens_of([first, *result.events, *rest]) == answer_to(make_assignment(prompt=prompt, max_tokens=6))
    assert [event.position for event in [first, *result.events, *rest]] == list(range(6))


def test_a_read_only_payload_is_taken() -> None:
    """Payloads are views of shared memory."""
    _, segments = prefill()
    engine = awaiting_engine()
    for segment in segments:
        segment.payload.flags.writeable = False
        assert engine.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert tokens_of(run(engine)[0]) == answer_to(make_assignment(prompt=PROMPT, max_tokens=6))[1:]


def damaged(segment: ExportedSegment) -> tuple[SegmentHeader, np.ndarray]:
    payload = segment.payload.copy()
    payload[5] ^= 1
    return segment.header, payload


def shortened(segment: ExportedSegment) -> tuple[SegmentHeader, np.ndarray]:
    payload = segment.payload[:-32].copy()
    return replace(segment.header, checksum=checksum(payload)), payload


def of_another_model(segment: ExportedSegment) -> tuple[SegmentHeader, np.ndarray]:
    return replace(segment.header, fingerprint="another"), segment.payload


@pytest.mark.parametrize("spoil", [damaged, shortened, of_another_model])
def test_what_is_not_what_it_says_is_refused_and_computed(
    spoil: Callable[[ExportedSegment], tuple[SegmentHeader, np.ndarray]], caplog: pytest.LogCaptureFixture
) -> None:
    _, [first, second] = prefill()
    engine = awaiting_engine()
    header, payload = spoil(first)
    with caplog.at_level(logging.WARNING):
        assert not engine.exchange.import_segment(header, payload, 0.0)
    assert "refused" in caplog.text
    assert engine.pool.hashes() == []
    assert engine.exchange.import_segment(second.header, second.payload, 0.0)
    assert tokens_of(run(engine)[0]) == answer_to(make_assignment(prompt=PROMPT, max_tokens=6))[1:]


def test_what_could_not_be_fetched_is_computed() -> None:
    _, segments = prefill()
    engine = awaiting_engine()
    for segment in segments:
        assert not engine.exchange.import_segment(segment.header, None, 0.0)
    assert tokens_of(run(engine)[0]) == answer_to(make_assignment(prompt=PROMPT, max_tokens=6))[1:]


def test_a_bare_handover_needs_no_payload() -> None:
    engine = awaiting_engine(PROMPT[:1])
    answer = answer_to(make_assignment(prompt=PROMPT[:1], max_tokens=6))
    header = SegmentHeader(FINGERPRINT, (), 0, 0, Handover("a", 0, answer[0], None))
    assert engine.exchange.import_segment(header, None, 0.0)
    assert tokens_of(run(engine)[0]) == answer[1:]


@pytest.mark.parametrize("length", [3, 10])
def test_a_tail_without_its_request_is_not_kept(length: int) -> None:
    """Nobody else can use it."""
    _, segments = prefill(PROMPT[:length])
    engine = make_engine()
    for segment in segments:
        assert engine.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert engine.pool.hashes() == hashes_of(PROMPT[:length])


def test_only_what_is_missing_is_imported_and_only_as_much_as_fits() -> None:
    engine = make_engine(num_blocks=6)
    engine.submit(make_assignment("first", PROMPT[:8], max_tokens=1), 0.0)
    run(engine)
    source = make_engine()
    long = (*PROMPT[:8], *[3] * 24)
    source.submit(make_assignment("s", long, max_tokens=1), 0.0)
    run(source)
    [segment], missing = source.exchange.export([*hashes_of(long), b"absent"], 0.0)
    assert missing == (b"absent",)
    held = engine.pool.match(hashes_of(PROMPT[:8]))
    engine.pool.acquire(held)
    assert engine.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert engine.pool.match(hashes_of(long)[:6])[:2] == held
    assert len(engine.pool.match(hashes_of(long))) == 6
    engine.pool.release(held, 0.0)
    engine.submit(make_assignment("long", long[:23], max_tokens=1), 0.0)
    events, _ = run(engine)
    assert tokens_of(events) == answer_to(make_assignment(prompt=long[:23], max_tokens=1))
    assert events[0].cached_tokens == 20


def test_a_full_pool_takes_nothing() -> None:
    _, segments = prefill()
    engine = make_engine(num_blocks=2)
    held = engine.pool.allocate(2, 0.0)
    for segment in segments:
        assert engine.exchange.import_segment(segment.header, segment.payload, 0.0)
    engine.scheduler.check_integrity(held)


def test_blocks_that_cannot_be_copied_in_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    _, segments = prefill()
    engine = make_engine()

    def fail(payload: object, block_ids: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.store, "import_blocks", fail)
    awaited = [block_hash for segment in segments for block_hash in segment.header.full_hashes]
    engine.submit(make_assignment(prompt=PROMPT, awaited=awaited), 0.0)
    for segment in segments:
        assert engine.exchange.import_segment(segment.header, segment.payload, 0.0), "the segment itself is sound"
    engine.scheduler.check_integrity()
    events, _ = run(engine)
    assert tokens_of(events) == answer_to(make_assignment(prompt=PROMPT))


def test_a_pool_that_cannot_evict_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, segments = prefill()
    engine = awaiting_engine()

    def fail(count: int) -> list[int]:
        raise RuntimeError("nothing can be evicted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "allocate", fail)
        for segment in segments:
            engine.exchange.import_segment(segment.header, segment.payload, 0.0)
    engine.scheduler.check_integrity()
    assert not engine.pool.hashes()
    events, _ = run(engine)
    assert tokens_of(events) == answer_to(make_assignment(prompt=PROMPT, max_tokens=6))[1:], (
        "the first came with the handover"
    )


def test_segments_say_what_is_wished_for_their_blocks() -> None:
    engine = make_engine(num_blocks=32)
    hints = CacheHints("t", 2, ttl_s=60.0)
    engine.submit(make_assignment("p", PROMPT, stage=Stage.PREFILL, cache=hints), 5.0)
    _, segments = run(engine, now=5.0)
    assert {segment.header_outside(1e9 - 5.0).retention for segment in segments} == {Retention("t", 2, 1e9 + 60)}
    other = (9, 9, 9, 9)
    engine.submit(make_assignment("q", other, max_tokens=1, cache=CacheHints("u")), 15.0)
    run(engine, now=15.0)
    exported, _ = engine.exchange.export([*hashes_of(PROMPT), *hashes_of(other)], 15.0)
    headers = [segment.header_outside(1e9 - 15.0) for segment in exported]
    assert [(header.hashes, header.retention) for header in headers] == [
        (tuple(hashes_of(PROMPT)), Retention("t", 2, 1e9 + 50)),
        (tuple(hashes_of(other)), Retention("u")),
    ]


def test_a_segment_that_a_mark_divides_is_kept_as_long_as_its_blocks() -> None:
    engine = make_engine(num_blocks=32)
    hints = CacheHints("t", marks=(CacheMark(1, 1, 300.0), CacheMark(2, 1, 60.0)))
    engine.submit(make_assignment("p", PROMPT, max_tokens=1, stage=Stage.PREFILL, cache=hints), 5.0)
    _, segments = run(engine, now=5.0)
    retentions = [segment.header_outside(0.0).retention for segment in segments]
    assert retentions[0] in (Retention("t", 1), Retention("t", 1, 305.0))
    exported, _ = engine.exchange.export(hashes_of(PROMPT), 6.0)
    found = {block_hash: each.header.retention for each in exported for block_hash in each.header.hashes}
    first, second, *others = [found[block_hash] for block_hash in hashes_of(PROMPT)]
    assert (first, second) == (Retention("t", 1, 305.0), Retention("t", 1, 305.0))
    assert set(others) <= {Retention("t")}


def test_what_a_running_request_wishes_goes_with_its_blocks() -> None:
    engine = make_engine()
    engine.submit(make_assignment("r", PROMPT, max_tokens=20, cache=CacheHints("t")), 0.0)
    while not engine.pool.hashes():
        engine.step(0.0)
    [segment], _ = engine.exchange.export(engine.pool.hashes(), 0.0)
    assert segment.header.retention == Retention("t")
    engine.abort(["r"], 0.0)


def test_blocks_in_any_order_share_a_segment_that_expires_with_the_last() -> None:
    """Otherwise those of requests that run at the same time, or have a time to live, would be a segment each."""
    engine = make_engine(num_blocks=32)
    prompts = [(number,) * 4 for number in range(1, 7)]
    for number, prompt in enumerate(prompts):
        hints = CacheHints("tu"[number % 2], ttl_s=60.0 if number % 2 else None)
        engine.submit(make_assignment(f"{number}", prompt, max_tokens=1, cache=hints), float(number))
        run(engine, now=float(number))
    exported, _ = engine.exchange.export([block_hash for prompt in prompts for block_hash in hashes_of(prompt)], 5.0)
    headers = [segment.header_outside(1e9 - 5.0) for segment in exported]
    assert [(header.retention, len(header.hashes)) for header in headers] == [
        (Retention("t"), 3),
        (Retention("u", 0, 1e9 + 60), 3),
    ]


def test_export_of_what_is_not_here() -> None:
    engine = make_engine()
    assert engine.exchange.export([b"absent"], 0.0) == ([], (b"absent",))
    assert engine.exchange.export([], 0.0) == ([], ())


def test_blocks_that_cannot_be_copied_out_are_not_sent_but_the_handover_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(token_budget=64)

    def fail(block_ids: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.store, "export_blocks", fail)
    engine.submit(make_assignment(prompt=PROMPT, stage=Stage.PREFILL), 0.0)
    events, segments = run(engine)
    assert tokens_of(events) == answer_to(make_assignment(prompt=PROMPT))[:1]
    assert [(s.header.hashes, s.header.num_bytes, s.payload.nbytes) for s in segments] == [((), 0, 0)]
    handover = segments[0].header.handover
    assert handover is not None and handover.token_id == events[0].token_id
    with pytest.raises(MemoryError):
        engine.exchange.export(hashes_of(PROMPT), 0.0)
    engine.scheduler.check_integrity()


def test_fail_all_ends_every_request_once() -> None:
    engine = awaiting_engine()
    for request_id in ("b", "c"):
        engine.submit(make_assignment(request_id, (1, 2, 3), max_tokens=5), 0.0)
    engine.step(0.0)
    events = engine.fail_all(ValueError("why"), 0.0)
    assert [(event.request_id, event.position) for event in events] == [("a", 0), ("b", 1), ("c", 1)]
    assert all(event.finish is FinishReason.ERROR and event.token_id is None for event in events)
    assert {event.detail for event in events} == {"ValueError: why"}
    assert engine.fail_all(ValueError("again"), 0.0) == []
    assert engine.pool.num_available == engine.pool.num_blocks
    engine.scheduler.check_integrity()


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14).map(tuple),
    fates=st.lists(st.sampled_from(["taken", "damaged", "lost", "never"]), min_size=8, max_size=8),
    order=st.randoms(use_true_random=False),
    warm=st.integers(0, 14),
)
def test_whatever_becomes_of_the_segments_the_answer_is_the_same(
    prompt: tuple[int, ...], fates: list[str], order: Random, warm: int
) -> None:
    source = make_engine(token_budget=4)
    source.submit(make_assignment(prompt=prompt, stage=Stage.PREFILL, max_tokens=6), 0.0)
    [first], segments = run(source)
    engine = awaiting_engine(prompt)
    if warm:
        engine.submit(make_assignment("warm", prompt[:warm], max_tokens=1), 0.0)
        run(engine)
    order.shuffle(segments)
    events = []
    for segment, fate in zip(segments, fates, strict=False):
        if fate == "taken":
            engine.exchange.import_segment(segment.header, segment.payload, 0.0)
        elif fate == "damaged" and segment.payload.size:
            engine.exchange.import_segment(*damaged(segment), 0.0)
        elif fate != "never":
            engine.exchange.import_segment(segment.header, None, 0.0)
        events += run(engine)[0]
    events += run(engine, now=5.0)[0]
    answer = answer_to(make_assignment(prompt=prompt, max_tokens=6))
    assert tokens_of(events) in (answer, answer[1:])
    assert first.token_id == answer[0]
    assert [event.position for event in events] == list(range(6))[-len(events) :]


def test_a_segment_may_arrive_after_its_blocks_were_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(token_budget=64)
    copy_out = engine.store.export_blocks

    def start_export(blocks: Sequence[int]) -> Callable[[], np.ndarray]:
        payload = copy_out(blocks).copy()
        return lambda: payload

    monkeypatch.setattr(engine.store, "start_export", start_export)
    engine.submit(make_assignment(prompt=PROMPT, stage=Stage.PREFILL, max_tokens=6), 0.0)
    [first], segments = run(engine)
    assert engine.pool.num_available == engine.pool.num_blocks
    engine.pool.reset()
    engine.submit(make_assignment("other", tuple(reversed(PROMPT)), max_tokens=6), 0.0)
    run(engine)

    decode = awaiting_engine()
    for segment in segments:
        assert segment.payload.nbytes == segment.header.checksum == 0
        assert segment.header.num_bytes == len(segment.header.hashes) * 32
        complete = segment.arrived()
        assert complete.arrived() is complete
        assert decode.exchange.import_segment(complete.header, complete.payload, 0.0)
    assert tokens_of([first, *run(decode)[0]]) == answer_to(make_assignment(prompt=PROMPT, max_tokens=6))
