"""Attention over paged KV: against the specification, and bit for bit against itself."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.paged_attention import paged_attention
from raydix.kernels.paged_attention.reference import paged_attention_reference
from tests.kernels.kernel_cases import Chunk, PagedCase, assert_close, batch_of, paged_case
from tests.skips import NO_KERNELS

needs_cpp = pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)


def attend(case: PagedCase, chunks: list[Chunk], **options: Any) -> Tensor:
    """The kernel's output for some chunks, into a buffer full of NaN."""
    arguments = batch_of(case, chunks)
    out = torch.full_like(arguments[0], torch.nan)
    result: Tensor = paged_attention(*arguments, scale=case.scale, out=out, **options)
    assert result is out
    return out


def check_against_reference(case: PagedCase, chunks: list[Chunk], **options: Any) -> None:
    arguments = batch_of(case, chunks)
    out = torch.full_like(arguments[0], torch.nan)
    actual, lse = paged_attention(*arguments, scale=case.scale, return_lse=True, out=out, **options)
    expected, expected_lse = paged_attention_reference(*arguments, scale=case.scale, **options)
    assert actual is out
    assert_close(actual, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_matches_reference_for_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    case = paged_case([1, 131, 37], head_dim=head_dim, dtype=dtype)
    check_against_reference(case, [Chunk(0, 0, 1), Chunk(1, 100, 131), Chunk(2, 0, 37)])


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_at_block_and_tile_edges(dtype: torch.dtype, block_size: int) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 127, 128, 129, 257]
    case = paged_case(lengths, block_size=block_size, dtype=dtype)
    check_against_reference(case, [Chunk(s, max(0, n - 5), n) for s, n in enumerate(lengths)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (14, 2), (6, 3), (40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_for_head_groups(dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> None:
    case = paged_case([150, 33], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    check_against_reference(case, [Chunk(0, 149, 150), Chunk(1, 2, 33)])


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 40}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_with_window_and_cap(dtype: torch.dtype, options: dict[str, float]) -> None:
    case = paged_case([300, 64], dtype=dtype)
    check_against_reference(case, [Chunk(0, 120, 300), Chunk(1, 63, 64)], **options)


@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_with_sinks(dtype: torch.dtype, sliding_window: int | None) -> None:
    """Of no weight, of one like a key's, and so heavy that nothing else counts."""
    case = paged_case([300, 64], num_heads=8, num_kv_heads=2, dtype=dtype)
    sinks = torch.tensor([-200.0, -1.0, 0.0, 1.0, 2.0, 5.0, 9.0, 200.0])
    chunks = [Chunk(0, 120, 300), Chunk(1, 63, 64)]
    check_against_reference(case, chunks, sliding_window=sliding_window, sinks=sinks)
    out = attend(case, chunks, sinks=sinks)
    assert torch.equal(out[:, 0], attend(case, chunks)[:, 0])
    assert torch.equal(out[:, 7], torch.zeros_like(out[:, 7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_before_the_window_may_be_gone(dtype: torch.dtype) -> None:
    case = paged_case([300], dtype=dtype)
    expected = attend(case, [Chunk(0, 299, 300)], sliding_window=20)
    for index in range(280 // 16):
        case.key_cache[case.block_tables[0, index]] = torch.nan
        case.value_cache[case.block_tables[0, index]] = torch.nan
        case.block_tables[0, index] = -1
    assert torch.equal(attend(case, [Chunk(0, 299, 300)], sliding_window=20), expected)


def test_no_queries() -> None:
    case = paged_case([20])
    assert attend(case, []).shape == (0, 9, 64)
    both = attend(case, [Chunk(0, 20, 20), Chunk(0, 19, 20)])
    assert torch.equal(both, attend(case, [Chunk(0, 19, 20)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 100, "soft_cap": 5.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0] * 3)}]
)
@needs_cpp
def test_bits_do_not_depend_on_chunks(dtype: torch.dtype, options: dict[str, float]) -> None:
    length = 600
    case = paged_case([length], dtype=dtype)
    whole = attend(case, [Chunk(0, 0, length)], **options)
    for size in (1, 7, 16, 64, 512):
        chunks = [Chunk(0, begin, min(begin + size, length)) for begin in range(0, length, size)]
        apart = torch.cat([attend(case, [chunk], **options) for chunk in chunks])
        assert torch.equal(apart, whole), f"chunks of {size}"
        assert torch.equal(attend(case, chunks, **options), whole), f"one batch of chunks of {size}"


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 80), (14, 2, 64), (8, 1, 256), (32, 8, 128)]
)
@needs_cpp
def test_bits_do_not_depend_on_chunks_of_other_shapes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    case = paged_case([280], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    whole = attend(case, [Chunk(0, 0, 280)])
    for size in (1, 33):
        chunks = [Chunk(0, begin, min(begin + size, 280)) for begin in range(0, 280, size)]
        assert torch.equal(attend(case, chunks), whole)


@needs_cpp
def test_bits_do_not_depend_on_the_batch() -> None:
    lengths = [1, 5, 130, 513, 64, 1000, 17] * 4
    case = paged_case(lengths)
    chunks = [Chunk(s, n - (n > 100) * 40 - 1, n) for s, n in enumerate(lengths)]
    together = attend(case, chunks)
    alone = torch.cat([attend(case, [chunk]) for chunk in chunks])
    assert torch.equal(together, alone)
    assert torch.equal(attend(case, chunks[::-1]).flip(0)[:1], together[:1])


@pytest.mark.parametrize("block_size", [16, 24, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_cpp
def test_bits_do_not_depend_on_who_begins_alike(dtype: torch.dtype, block_size: int) -> None:
    """Forty sequences with some first blocks in common, a third of them many more, decoded at once and one by one."""
    case = paged_case([700 - n for n in range(40)] + [300, 127], block_size=block_size, dtype=dtype)
    tables = case.block_tables
    tables[1:, : 140 // block_size] = tables[0, : 140 // block_size]
    tables[1:40:3, : 500 // block_size] = tables[1, : 500 // block_size]
    tables[20:30, : 640 // block_size] = tables[20, : 640 // block_size]
    chunks = [Chunk(s, n - 1, n) for s, n in enumerate(case.context_lens)]
    chunks[5] = Chunk(5, 600, 690)
    alone = torch.cat([attend(case, [chunk]) for chunk in chunks])
    assert torch.equal(attend(case, chunks), alone)
    check_against_reference(case, chunks[:12])
    options = {"sliding_window": 200, "soft_cap": 3.0}
    alone = torch.cat([attend(case, [chunk], **options) for chunk in chunks])
    assert torch.equal(attend(case, chunks, **options), alone)


def branching(case: PagedCase, random: Random, block_size: int) -> None:
    """Lets most sequences begin with some of the whole blocks of an earlier one."""
    tables, lengths = case.block_tables, case.context_lens
    for sequence in range(1, len(lengths)):
        other = random.randrange(sequence)
        common = random.randint(0, min(lengths[sequence], lengths[other]) // block_size)
        if random.random() < 0.8:
            tables[sequence, :common] = tables[other, :common]


def few_queries(case: PagedCase, random: Random) -> list[Chunk]:
    """The newest queries of each sequence: one, some as behind a draft, or as many as a chunk of a prompt."""
    counts = [random.choice([1, 1, 1, 2, 5, 9, 16, 70]) for _ in case.context_lens]
    return [Chunk(s, max(0, n - count), n) for s, (n, count) in enumerate(zip(case.context_lens, counts, strict=True))]


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 80), (32, 8, 128), (4, 4, 16)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 200}, {"sliding_window": 384, "soft_cap": 3.0}])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.bfloat16), (24, torch.float32), (128, torch.bfloat16)])
@needs_cpp
def test_bits_do_not_depend_on_branches(
    heads: tuple[int, int, int], options: dict[str, Any], block_size: int, dtype: torch.dtype
) -> None:
    """Random trees of beginnings, drafts among the rows, windows, sinks: at once, in any order, and one by one."""
    random = Random(f"{heads} {options} {block_size}")
    num_heads, num_kv_heads, head_dim = heads
    lengths = [random.randint(1, 900) for _ in range(random.choice([2, 5, 14]))]
    case = paged_case(
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=len(lengths),
    )
    branching(case, random, block_size)
    sinks = torch.linspace(-2.0, 2.0, num_heads)
    chunks = few_queries(case, random)
    alone = [attend(case, [chunk], sinks=sinks, **options) for chunk in chunks]
    assert not any(rows.isnan().any() for rows in alone)
    assert torch.equal(attend(case, chunks, sinks=sinks, **options), torch.cat(alone))

    order = random.sample(range(len(chunks)), len(chunks))
    shuffled = attend(case, [chunks[i] for i in order], sinks=sinks, **options)
    assert torch.equal(shuffled, torch.cat([alone[i] for i in order]))
    check_against_reference(case, chunks, sinks=sinks, **options)


@pytest.mark.parametrize("sliding_window", [None, 300])
@needs_cpp
def test_bits_do_not_depend_on_threads_behind_a_common_beginning(sliding_window: int | None) -> None:
    """A few sequences of few heads are too few tasks for three threads, and many are enough."""
    before = torch.get_num_threads()
    try:
        for count in (2, 14):
            case = paged_case([700 - n for n in range(count)])
            case.block_tables[1:, : 640 // 16] = case.block_tables[0, : 640 // 16]
            chunks = [Chunk(s, n - 1 - s % 4, n) for s, n in enumerate(case.context_lens)]
            alone = torch.cat([attend(case, [chunk], sliding_window=sliding_window) for chunk in chunks])
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(attend(case, chunks, sliding_window=sliding_window), alone)
    finally:
        torch.set_num_threads(before)


@needs_cpp
def test_blocks_before_the_windows_may_be_gone_behind_a_common_beginning() -> None:
    case = paged_case([700 - n for n in range(6)])
    case.block_tables[1:, : 640 // 16] = case.block_tables[0, : 640 // 16]
    chunks = [Chunk(s, n - 1 - s % 2, n) for s, n in enumerate(case.context_lens)]
    expected = attend(case, chunks, sliding_window=300)
    for chunk in chunks:
        gone = (chunk.begin - 300 + 1) // 16
        case.block_tables[chunk.sequence, :gone] = -1
    oldest = min(chunk.begin for chunk in chunks) - 300 + 1
    for block in range(oldest // 16):
        case.key_cache[case.block_tables[0, block]] = torch.nan
    assert torch.equal(attend(case, chunks, sliding_window=300), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_cpp
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    case = paged_case([2000, 300], dtype=dtype)
    works = ([Chunk(0, 1999, 2000)], [Chunk(0, 1900, 2000), Chunk(1, 299, 300)], [Chunk(0, 0, 2000)])
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([attend(case, work) for work in works])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_cpp
def test_rejects_what_it_cannot_do() -> None:
    case = paged_case([20])
    query, keys, values, tables, starts, contexts = batch_of(case, [Chunk(0, 0, 20)])
    with pytest.raises(TypeError):
        paged_attention(query.float(), keys, values, tables, starts, contexts, scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(query.transpose(0, 1), keys, values, tables, starts, contexts, scale=1.0)
    with pytest.raises(ValueError, match="block outside"):
        paged_attention(query, keys, values, tables + 100, starts, contexts, scale=1.0)
    with pytest.raises(ValueError, match="context"):
        paged_attention(query, keys, values, tables, starts, contexts + 100, scale=1.0)
