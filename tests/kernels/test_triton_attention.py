"""The Triton attention kernels: against the specification, and in deterministic mode bit for bit against itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raydix.kernels.paged_attention import plan as plans
from raydix.kernels.paged_attention import triton as kernels
from raydix.kernels.paged_attention.plan import AttentionPlanner, Heads
from raydix.kernels.paged_attention.reference import paged_attention_reference
from raydix.kernels.paged_attention.work import Sequences
from tests.kernels.kernel_cases import Chunk, PagedCase, assert_close, batch_of, paged_case
from tests.kernels.triton_cases import DEVICE, assert_relative, needs_gpu, on_device

# Called with options unpacked from dictionaries, which a type checker cannot follow.
paged_attention_triton: Any = kernels.paged_attention_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES: list[dict[str, Any]] = [{}, {"deterministic": True}]


def case_of(lengths: list[int], **shape: Any) -> PagedCase:
    """A paged case on the device under test, few heads unless told otherwise."""
    return on_device(paged_case(lengths, **({"num_heads": 2, "num_kv_heads": 1} | shape)))


def batch(case: PagedCase, chunks: list[Chunk]) -> Any:
    """The tensor arguments of the kernel, on the device under test."""
    return tuple(tensor.to(DEVICE) for tensor in batch_of(case, chunks))


def attend(case: PagedCase, chunks: list[Chunk], **options: Any) -> Tensor:
    """The kernel's output for some chunks, into a buffer full of NaN."""
    query, *rest = batch(case, chunks)
    out = torch.full_like(query, torch.nan)
    assert paged_attention_triton(query, *rest, scale=case.scale, out=out, **options) is out
    return out  # type: ignore[no-any-return]


def check(case: PagedCase, chunks: list[Chunk], mode: dict[str, Any] | None = None, **options: Any) -> None:
    query, *rest = batch(case, chunks)
    out = torch.full_like(query, torch.nan)
    actual, lse = paged_attention_triton(
        query, *rest, scale=case.scale, return_lse=True, out=out, **(mode or {}), **options
    )
    expected, expected_lse = paged_attention_reference(query, *rest, scale=case.scale, **options)
    assert actual is out
    assert_close(actual, expected)
    assert_relative(actual, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_matches_reference_for_head_dims(dtype: torch.dtype, head_dim: int, mode: dict[str, Any]) -> None:
    case = case_of([1, 75], head_dim=head_dim, dtype=dtype)
    check(case, [Chunk(0, 0, 1), Chunk(1, 40, 75)], mode)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("mode", MODES)
def test_matches_reference_at_block_and_tile_edges(block_size: int, mode: dict[str, Any]) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 64, 65, 129]
    case = case_of(lengths, num_heads=1, block_size=block_size)
    check(case, [Chunk(s, max(0, n - 1 - s % 3 * 16), n) for s, n in enumerate(lengths)], mode)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (2, 2), (9, 3), (8, 1), (14, 2), (40, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_matches_reference_for_head_groups(num_heads: int, num_kv_heads: int, mode: dict[str, Any]) -> None:
    case = case_of([50, 33], num_heads=num_heads, num_kv_heads=num_kv_heads)
    check(case, [Chunk(0, 49, 50), Chunk(1, 2, 33)], mode)


@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 1}, {"sliding_window": 40}, {"soft_cap": 2.0}, {"sliding_window": 9, "soft_cap": 5.0}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_matches_reference_with_window_and_cap(
    dtype: torch.dtype, options: dict[str, Any], mode: dict[str, Any]
) -> None:
    case = case_of([170, 64], dtype=dtype)
    check(case, [Chunk(0, 70, 170), Chunk(1, 63, 64)], mode, **options)


@pytest.mark.parametrize("mode", MODES)
def test_keys_before_the_window_may_be_gone(mode: dict[str, Any]) -> None:
    case = case_of([300])
    chunk = [Chunk(0, 299, 300)]
    expected = attend(case, chunk, sliding_window=20, **mode)
    for index in range(280 // 16):
        case.pool[case.block_tables[0, index]] = torch.nan
        case.block_tables[0, index] = -1
    assert torch.equal(attend(case, chunk, sliding_window=20, **mode), expected)


@pytest.mark.parametrize("mode", MODES)
def test_no_queries(mode: dict[str, Any]) -> None:
    case = case_of([20])
    assert attend(case, [], **mode).shape == (0, 2, 64)
    both = attend(case, [Chunk(0, 20, 20), Chunk(0, 19, 20)], **mode)
    assert torch.equal(both, attend(case, [Chunk(0, 19, 20)], **mode))
    assert_close(both, paged_attention_reference(*batch(case, [Chunk(0, 19, 20)]), scale=case.scale)[0])


def test_tokens_of_no_sequence_are_left_alone() -> None:
    case = case_of([20, 30])
    query, *rest = batch(case, [Chunk(0, 19, 20), Chunk(1, 29, 30)])
    padded = torch.cat((query, query))
    out = torch.full_like(padded, 7.0)
    paged_attention_triton(padded, *rest, scale=case.scale, out=out)
    assert_close(out[:2], paged_attention_reference(query, *rest, scale=case.scale)[0])
    assert (out[2:] == 7.0).all()


@pytest.fixture(params=[1, 1000])
def device_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Launches as on a device of one multiprocessor, which walks splits in turn, or of many, which splits all."""
    size: int = request.param
    monkeypatch.setattr(plans, "multiprocessors", lambda device: size)
    monkeypatch.setattr(plans, "SEGMENT", 128)
    monkeypatch.setattr(plans, "DETERMINISTIC_SEGMENT", 128)
    monkeypatch.setattr(kernels, "UNROLL", 2)
    return size


@pytest.fixture(params=[False, True], ids=["any", "hopper"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches as on any GPU, or as on one of the Hopper generation."""
    monkeypatch.setattr(plans, "is_hopper", lambda device: request.param)


@pytest.mark.usefixtures("device_size", "generation")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100, "soft_cap": 5.0}])
def test_matches_reference_over_many_splits(mode: dict[str, Any], options: dict[str, Any]) -> None:
    case = case_of([700, 65, 300])
    check(case, [Chunk(0, 670, 700), Chunk(1, 64, 65), Chunk(2, 298, 300)], mode, **options)


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.float16, {"sliding_window": 50, "soft_cap": 5.0})],
)
def test_bits_do_not_depend_on_chunks_or_splits_in_deterministic_mode(
    dtype: torch.dtype, options: dict[str, Any], device_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 140
    case = case_of([length, 70], num_heads=1, dtype=dtype)
    options = options | {"deterministic": True}
    whole = attend(case, [Chunk(0, 0, length)], **options)
    chunks = [Chunk(0, begin, min(begin + 33, length)) for begin in range(0, length, 33)]
    assert torch.equal(attend(case, chunks, **options), whole)
    for position in (0, 64, length - 1):
        beside = [Chunk(1, 60, 70), Chunk(0, position, position + 1)]
        assert torch.equal(attend(case, beside, **options)[-1], whole[position])
    if device_size > 1:
        monkeypatch.setattr(plans, "multiprocessors", lambda device: 1)
        assert torch.equal(attend(case, [Chunk(0, 0, length)], **options), whole)


@pytest.mark.parametrize("mode", MODES)
def test_partial_results_are_bounded(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where parallel splits would take too much memory there are fewer, or they are walked in turn."""
    monkeypatch.setattr(plans, "multiprocessors", lambda device: 1000)
    monkeypatch.setattr(plans, "SEGMENT", 64)
    monkeypatch.setattr(plans, "DETERMINISTIC_SEGMENT", 128)
    made: list[int] = []

    def remember(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        made.append(tensor.nbytes)
        return tensor

    case = case_of([700, 65])
    chunks = [Chunk(0, 600, 700), Chunk(1, 64, 65)]
    unbounded = attend(case, chunks, **mode)
    monkeypatch.setattr(plans, "MAX_PARTIAL_BYTES", 150_000)
    empty = torch.empty
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", remember)
        bounded = attend(case, chunks, **mode)
    assert max(made) <= 150_000
    assert_close(bounded, unbounded)
    if mode.get("deterministic"):
        assert torch.equal(bounded, unbounded)


DRAFTED = [(1, 70), (4, 65), (9, 140), (2, 2), (6, 64), (3, 33)]
"""Queries and context of each sequence: decodes, most of them with a draft behind, some across a block's edge."""


@pytest.mark.usefixtures("device_size")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 50, "soft_cap": 5.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_for_decodes_with_drafts(
    dtype: torch.dtype, options: dict[str, Any], mode: dict[str, Any]
) -> None:
    case = case_of([context for _, context in DRAFTED], num_heads=6, num_kv_heads=2, dtype=dtype)
    chunks = [Chunk(index, context - count, context) for index, (count, context) in enumerate(DRAFTED)]
    check(case, chunks, mode, **options)


@pytest.mark.usefixtures("device_size", "generation")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 50, "soft_cap": 5.0}])
def test_a_query_of_a_draft_has_the_bits_of_a_decode(options: dict[str, Any]) -> None:
    """As a chunk of 1 + k queries, or each in a row of its own as in a graph: in deterministic mode no bit differs."""
    case = case_of([context for _, context in DRAFTED], num_heads=3, num_kv_heads=1, dtype=torch.bfloat16)
    options = options | {"deterministic": True}
    chunks = [Chunk(index, context - count, context) for index, (count, context) in enumerate(DRAFTED)]
    rows = [Chunk(each.sequence, end - 1, end) for each in chunks for end in range(each.begin + 1, each.end + 1)]
    together = attend(case, chunks, **options)
    assert torch.equal(attend(case, rows, **options), together)
    for row in (0, 3, 12, len(rows) - 1):
        assert torch.equal(attend(case, rows[row : row + 1], **options)[0], together[row])


@pytest.mark.usefixtures("generation")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 200])
def test_a_list_with_room_is_walked_to_its_count(
    mode: dict[str, Any], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a graph: one memory for the lists of steps of up to 8 rows, some of them drafts, and wider block tables;
    padding is left alone."""
    monkeypatch.setattr(plans, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(plans, "SEGMENT", 128)
    monkeypatch.setattr(plans, "DETERMINISTIC_SEGMENT", 128)
    case = case_of([700, 65, 400], num_heads=2, num_kv_heads=2)
    heads = Heads(2, 2, 64, torch.bfloat16)
    planner = AttentionPlanner(heads, (window,), DEVICE, 700, deterministic=bool(mode))
    places = planner.places(8, begin=0)
    memory = np.zeros(places[-1].end, np.int32)
    for ends, counts in (([700, 60, 399], [5, 1, 1]), ([300], [1]), ([3, 64], [2, 6])):
        chunks = [Chunk(index, ends[index] - count, ends[index]) for index, count in enumerate(counts)]
        query, keys, values, tables, starts, contexts = batch(case, chunks)
        queries = np.array(counts)
        first = np.cumsum(queries) - queries
        wide = torch.zeros((8, 64), dtype=torch.int32, device=DEVICE)
        wide[torch.from_numpy(first), : tables.shape[1]] = tables
        planner.write(Sequences(first, queries, np.array(ends), 64 * first), places, memory)
        plan = planner.plans(places, torch.from_numpy(memory).to(DEVICE))[window]
        rows = torch.cat((query, query.new_zeros((8 - len(query), 2, 64))))
        out = torch.full_like(rows, 7.0)
        unread = torch.zeros(9, dtype=torch.int32, device=DEVICE)
        options = {"scale": case.scale, "sliding_window": window, **mode}
        paged_attention_triton(rows, keys, values, wide, unread, unread[:8], out=out, plan=plan, **options)
        expected, _ = paged_attention_reference(
            query, keys, values, tables, starts, contexts, scale=case.scale, sliding_window=window
        )
        assert_relative(out[: len(query)], expected)
        assert (out[len(query) :] == 7.0).all()


def exact(case: PagedCase, chunks: list[Chunk], window: int | None, soft_cap: float | None) -> Tensor:
    """Attention in float64, query by query, over the sequences' own keys and values."""
    rows: list[Tensor] = []
    for chunk in chunks:
        blocks = case.block_tables[chunk.sequence, : -(-chunk.end // 16)].long()
        keys, values = (
            cache[blocks].transpose(1, 2).flatten(0, 1).double() for cache in (case.key_cache, case.value_cache)
        )
        for position in range(chunk.begin, chunk.end):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            query = case.queries[chunk.sequence][position].double()
            group = len(query) // keys.shape[1]
            heads = torch.arange(len(query), device=query.device) // group
            scores = torch.einsum("hd,nhd->hn", query, keys[seen][:, heads]) * case.scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            rows.append(torch.einsum("hn,nhd->hd", scores.softmax(1), values[seen][:, heads]))
    return torch.stack(rows)


@pytest.mark.parametrize(("deterministic", "hopper"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap"),
    [(torch.float32, None, None), (torch.bfloat16, 70, None), (torch.bfloat16, 200, 5.0)],
)
def test_close_to_float64_in_a_mixed_step(
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    deterministic: bool,
    hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes, drafts and chunks of one to five segments on a device of a few programs, some tiles cut and some not."""
    monkeypatch.setattr(plans, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(plans, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(plans, "SEGMENT", 128)
    monkeypatch.setattr(plans, "DETERMINISTIC_SEGMENT", 128)
    case = case_of([1, 128, 129, 300, 600, 200], num_heads=4, num_kv_heads=2, dtype=dtype)
    chunks = [Chunk(0, 0, 1), Chunk(1, 127, 128), Chunk(2, 128, 129), Chunk(3, 296, 300), Chunk(4, 599, 600)]
    chunks.append(Chunk(5, 180, 200))
    actual = attend(case, chunks, sliding_window=window, soft_cap=soft_cap, deterministic=deterministic)
    assert_relative(actual, exact(case, chunks, window, soft_cap).to(dtype))


def test_a_plan_is_for_one_window_and_mode() -> None:
    case = case_of([20])
    arguments = batch(case, [Chunk(0, 19, 20)])
    planner = AttentionPlanner(Heads(2, 1, 64, torch.bfloat16), (None,), DEVICE, 20, deterministic=False)
    one = np.ones(1, np.int64)
    plan = planner.plan(Sequences(0 * one, one, 20 * one, 0 * one))[None]
    paged_attention_triton(*arguments, scale=1.0, plan=plan)
    for options in ({"sliding_window": 3}, {"deterministic": True}):
        with pytest.raises(ValueError, match="another window or mode"):
            paged_attention_triton(*arguments, scale=1.0, plan=plan, **options)
    query, keys, values, tables, *rest = arguments
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention_triton(query, keys, values, tables.repeat(1, 2)[:, ::2], *rest, scale=1.0, plan=plan)


def test_rejects_what_it_cannot_do() -> None:
    case = case_of([20])
    query, keys, *rest = batch(case, [Chunk(0, 0, 20)])
    with pytest.raises(TypeError):
        paged_attention_triton(query.float(), keys, *rest, scale=1.0)
    with pytest.raises(ValueError, match="positive"):
        paged_attention_triton(query, keys, *rest, scale=-1.0)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention_triton(query, keys.transpose(2, 3).contiguous().transpose(2, 3), *rest, scale=1.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 1000, "soft_cap": 30.0}])
@pytest.mark.parametrize("mode", MODES)
def test_large_mixed_batches(dtype: torch.dtype, head_dim: int, options: dict[str, Any], mode: dict[str, Any]) -> None:
    lengths = [6001, 1, 4096, 4097, 513, 2049, 3000]
    case = case_of(lengths, num_heads=16, num_kv_heads=4, head_dim=head_dim, dtype=dtype, seed=head_dim)
    chunks = [
        Chunk(0, 5000, 6001),
        Chunk(1, 0, 1),
        Chunk(2, 4095, 4096),
        Chunk(3, 4000, 4097),
        Chunk(4, 0, 513),
        Chunk(5, 2046, 2049),
        Chunk(6, 2999, 3000),
    ]
    query, *rest = batch(case, chunks)
    out = torch.full_like(query, torch.nan)
    actual, lse = paged_attention_triton(query, *rest, scale=case.scale, return_lse=True, out=out, **mode, **options)
    expected, expected_lse = paged_attention_reference(query, *rest, scale=case.scale, **options)
    assert_relative(actual, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (8, 1, 256)])
def test_large_batches_are_deterministic(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    case = case_of([4000, 700], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    whole = attend(case, [Chunk(0, 0, 4000)], deterministic=True)
    for size in (1, 100, 512, 1111):
        firsts = range(0, 4000, size if size > 1 else 37)
        chunks = [Chunk(0, begin, min(begin + size, 4000)) for begin in firsts]
        expected = torch.cat([whole[chunk.begin : chunk.end] for chunk in chunks])
        assert torch.equal(attend(case, chunks, deterministic=True), expected), f"one batch of chunks of {size}"
        alone = attend(case, chunks[-1:], deterministic=True)
        assert torch.equal(alone, whole[chunks[-1].begin :][: len(alone)]), f"a chunk of {size} alone"
        mixed = attend(case, [Chunk(1, 1, 700), chunks[len(chunks) // 2]], deterministic=True)[699:]
        assert torch.equal(mixed, whole[chunks[len(chunks) // 2].begin :][: len(mixed)])
