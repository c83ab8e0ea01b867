"""Attention over paged KV on a GPU: one kernel that walks tiles of KV, one that adds up splits of it.

The KV of a sequence is cut into splits at fixed positions, multiples of the split size from position 0, and each split
into tiles of BLOCK_N positions. A program takes a tile of queries of one sequence, all heads that share one KV head
packed into its rows, and walks either all splits or one. In the latter case it leaves a partial result (maximum, sum,
weighted values) for the second kernel to add up.

Running maxima are rounded up to integers. In base 2 every rescaling is then by a power of two and exact, so that it
makes no difference when it happens: partial results added up by another kernel give the bits they give in registers.

Two modes. The fast one takes what suits the batch: sequences with few queries go to small tiles over parallel splits,
others to large tiles, split only where they would not fill the device; a row's last bits may depend on both. The
deterministic one uses one number of KV positions per tile and one split size for everything, and decides only what the
bits do not show, so that a row's bits depend on its query, its KV, and nothing else: whether splits run in parallel,
and on Hopper, whose matrix instruction takes 64 rows in tiles of any size, the rows of a tile. A row stands anywhere in
its tile (matrix instructions treat rows alike), and tiles that hold nothing it may see add zeros. No multiplication is
fused with an addition unless written so.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from raydix.kernels.gpu import is_hopper, multiprocessors, shared_memory

SPLIT = 512
DETERMINISTIC_SPLIT = 1024
BLOCK_SPLITS = 64
UNROLL = 8
LOG2_E = 1.4426950408889634
NO_WINDOW = 2**31 - 1
MAX_PARTIAL_BYTES = 256 * 2**20  # most memory of partial results between the two kernels


@dataclass(frozen=True, slots=True)
class Tiles:
    """The shape of a program's work: rows (queries times heads), KV positions per step, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the padded head dim: sequences with few queries, with many, and the deterministic mode. KV is found through the
# block table, whose load takes stages too: with three stages one tile of KV is in flight, with five two.
FEW = {64: Tiles(16, 128, 4, 5), 128: Tiles(16, 64, 4, 5), 256: Tiles(16, 32, 4, 5)}
MANY = {64: Tiles(128, 64, 8, 5), 128: Tiles(128, 64, 8, 5), 256: Tiles(128, 32, 8, 5)}
FIXED = {64: Tiles(64, 64, 4, 5), 128: Tiles(64, 32, 4, 5), 256: Tiles(64, 32, 8, 5)}
# The deterministic mode on Hopper: single queries, and chunks; both with the same number of KV positions.
LOW = {64: Tiles(64, 128, 4, 5), 128: Tiles(64, 64, 4, 5), 256: Tiles(64, 64, 4, 2)}
HIGH = {64: Tiles(128, 128, 8, 5), 128: Tiles(128, 64, 8, 5), 256: Tiles(128, 64, 8, 2)}
# Large tiles of head dim 256 where programs have less than AMPLE bytes of shared memory, as on compute capability 8.6,
# 8.9 and 12.0.
AMPLE, SCANT = 160_000, Tiles(64, 32, 8, 3)
# float32 runs without tensor cores, exactly: one shape for all.
FLOAT32 = {64: Tiles(32, 32, 4, 3), 128: Tiles(32, 32, 8, 3), 256: Tiles(16, 16, 4, 3)}


@triton.jit
def _power_of_two(exponent):
    """2^exponent, exactly, for integers up to 127 held as float32; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _attend_tile(
    q,
    m,
    total,
    acc,
    start,
    begin,
    end,
    positions,
    table_ptr,
    key_ptr,
    value_ptr,
    stride_key_block,
    stride_value_block,
    scale_log2,
    cap_log2,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds KV positions start:start + BLOCK_N to the running (maximum m, sum total, weighted values acc) of each row.

    MASKED: only begin:end may be read, and rows see no further than their own position. Scores are in base 2: with
    HAS_CAP scale_log2 is what the score is multiplied with inside the cap, and cap_log2 the cap.
    """
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if MASKED:
        present = (keys >= begin) & (keys < end)
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        mask = present[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        mask = (dims < HEAD_DIM)[None, :]
    within = (keys % BLOCK_SIZE) * HEAD_DIM
    key_ptrs = key_ptr + (blocks * stride_key_block + within)[:, None] + dims[None, :]
    value_ptrs = value_ptr + (blocks * stride_value_block + within)[:, None] + dims[None, :]
    if MASKED or BLOCK_D != HEAD_DIM:
        k = tl.load(key_ptrs, mask=mask, other=0.0)
        v = tl.load(value_ptrs, mask=mask, other=0.0)
    else:
        k = tl.load(key_ptrs)
        v = tl.load(value_ptrs)

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_CAP:
        # cap * tanh(x) = cap * (1 - 2 / (e^2x + 1)), e^2x in base 2.
        scores = cap_log2 * (1.0 - 2.0 / (tl.exp2(scores * scale_log2) + 1.0))
    if MASKED:
        visible = present[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    if not HAS_CAP:
        highest = highest * scale_log2
    new_m = tl.maximum(m, tl.ceil(highest))
    finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(scores - finite_m[:, None] if HAS_CAP else tl.fma(scores, scale_log2, -finite_m[:, None]))
    shrink = _power_of_two(m - finite_m)
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_m, total, acc


@triton.jit
def _attend_range(
    q,
    low,
    full_end,
    high,
    begin,
    end,
    positions,
    table_ptr,
    key_ptr,
    value_ptr,
    stride_key_block,
    stride_value_block,
    scale_log2,
    cap_log2,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(m, total, acc) of KV positions low:high; those before full_end, a multiple of BLOCK_N, are seen by every row."""
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    middle = tl.minimum(tl.maximum(low, full_end), high)
    for start in range(low, middle, BLOCK_N):
        m, total, acc = _attend_tile(
            q,
            m,
            total,
            acc,
            start,
            begin,
            end,
            positions,
            table_ptr,
            key_ptr,
            value_ptr,
            stride_key_block,
            stride_value_block,
            scale_log2,
            cap_log2,
            window,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            HAS_WINDOW,
            HAS_CAP,
            PRECISION,
            False,
        )
    for start in range(middle, high, BLOCK_N):
        m, total, acc = _attend_tile(
            q,
            m,
            total,
            acc,
            start,
            begin,
            end,
            positions,
            table_ptr,
            key_ptr,
            value_ptr,
            stride_key_block,
            stride_value_block,
            scale_log2,
            cap_log2,
            window,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            HAS_WINDOW,
            HAS_CAP,
            PRECISION,
            True,
        )
    return m, total, acc


# What differs from step to step specialises no kernel: a variant that a step needs first is compiled while it waits.
@triton.jit(
    do_not_specialize=[
        "stride_tables_sequence",
        "num_sequences",
        "num_tiles",
        "num_few",
        "num_splits",
        "split_size",
    ]
)
def _attend_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    stride_query_token,
    stride_query_head,
    stride_out_token,
    stride_out_head,
    stride_key_block,
    stride_key_head,
    stride_value_block,
    stride_value_head,
    stride_tables_sequence,
    num_sequences,
    num_tiles,
    num_few,
    num_splits,
    split_size,
    scale_log2,
    cap_log2,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_FEW: tl.constexpr,
    IS_PARALLEL: tl.constexpr,
    IS_FOLDED: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """out[t, h] = sum over visible n of softmax(cap(scale * query[t, h] . key[n])) value[n]; lse as in the reference.

    query, out: [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]; key_cache, value_cache: [num_blocks, NUM_KV_HEADS,
    BLOCK_SIZE, HEAD_DIM]; block_tables: [num_sequences, max_blocks] int32; query_start: [num_sequences + 1] int32;
    context_lens: [num_sequences] int32; lse: [num_tokens, num_heads] float32; part_acc: [rows, num_heads, num_splits,
    HEAD_DIM] float32, part_max, part_sum: [rows, num_heads, num_splits] float32, where a row is a token, or with IS_FEW
    query i of sequence s at row s * num_few + i.

    One program handles BLOCK_M // GROUP consecutive queries of one sequence, the GROUP heads of one KV head, and with
    IS_PARALLEL one split of the KV, else all of it: from the first visible position on in one go, or with IS_FOLDED
    split by split, added up as `_combine_kernel` does. With IS_FEW only sequences of up to num_few queries are handled
    (one program each), otherwise only those of more.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if IS_FEW:
        kv_head = tl.program_id(0)
        sequence = tl.program_id(1)
        first_tile = sequence
        tile = sequence
    else:
        # Later tiles see more keys: they start first.
        tile = num_tiles - 1 - tl.program_id(0)
        kv_head = tl.program_id(1)
        # Sequence s owns tiles from query_start[s] // BLOCK_Q + s on; the search ends at the last one that begins here.
        sequence = tl.full((), 0, tl.int32)
        above = num_sequences
        while above - sequence > 1:
            middle = (sequence + above) // 2
            if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= tile:
                sequence = middle
            else:
                above = middle
        first_tile = tl.load(query_start_ptr + sequence) // BLOCK_Q + sequence
    query_start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - query_start
    first = (tile - first_tile) * BLOCK_Q
    if first >= num_queries:
        return
    if IS_FEW:
        if num_queries > num_few:
            return
    else:
        if num_queries <= num_few:
            return

    context_len = tl.load(context_lens_ptr + sequence)
    first_position = context_len - num_queries + first
    begin = tl.maximum(first_position - window + 1, 0)
    end = context_len - num_queries + tl.minimum(first + BLOCK_Q, num_queries)
    first_split = begin // split_size
    if IS_PARALLEL:
        first_split = tl.program_id(2)
        if (first_split * split_size >= end) | ((first_split + 1) * split_size <= begin):
            return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    tokens = (query_start + queries).to(tl.int64)
    positions = context_len - num_queries + queries
    element_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptrs = query_ptr + (tokens * stride_query_token + heads * stride_query_head)[:, None] + dims[None, :]
    q = tl.load(query_ptrs, mask=element_mask, other=0.0)

    table_ptr = block_tables_ptr + sequence.to(tl.int64) * stride_tables_sequence
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_key_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_value_head
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        full_end = 0
    # Tiles begin at multiples of BLOCK_N, which divides split_size.
    aligned_begin = begin // BLOCK_N * BLOCK_N

    if IS_FOLDED:
        m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for split_begin in range(first_split * split_size, end, split_size):
            split_m, split_total, split_acc = _attend_range(
                q,
                tl.maximum(split_begin, aligned_begin),
                full_end,
                tl.minimum(split_begin + split_size, end),
                begin,
                end,
                positions,
                table_ptr,
                key_ptr,
                value_ptr,
                stride_key_block,
                stride_value_block,
                scale_log2,
                cap_log2,
                window,
                HEAD_DIM,
                BLOCK_SIZE,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                HAS_WINDOW,
                HAS_CAP,
                PRECISION,
            )
            new_m = tl.maximum(m, split_m)
            finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)
            shrink, weight = _power_of_two(m - finite_m), _power_of_two(split_m - finite_m)
            total = total * shrink + split_total * weight
            acc = acc * shrink[:, None] + split_acc * weight[:, None]
            m = new_m
    else:
        low, high = aligned_begin, end
        if IS_PARALLEL:
            low = tl.maximum(first_split * split_size, aligned_begin)
            high = tl.minimum((first_split + 1) * split_size, end)
        m, total, acc = _attend_range(
            q,
            low,
            full_end,
            high,
            begin,
            end,
            positions,
            table_ptr,
            key_ptr,
            value_ptr,
            stride_key_block,
            stride_value_block,
            scale_log2,
            cap_log2,
            window,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            HAS_WINDOW,
            HAS_CAP,
            PRECISION,
        )

    num_heads = NUM_KV_HEADS * GROUP
    if IS_PARALLEL:
        part_rows = tokens
        if IS_FEW:
            part_rows = sequence.to(tl.int64) * num_few + queries
        parts = (part_rows * num_heads + heads) * num_splits + first_split
        tl.store(part_acc_ptr + parts[:, None] * HEAD_DIM + dims[None, :], acc, mask=element_mask)
        tl.store(part_max_ptr + parts, m, mask=row_mask)
        tl.store(part_sum_ptr + parts, total, mask=row_mask)
    else:
        out_ptrs = out_ptr + (tokens * stride_out_token + heads * stride_out_head)[:, None] + dims[None, :]
        tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=element_mask)
        if HAS_LSE:
            tl.store(lse_ptr + tokens * num_heads + heads, (m + tl.log2(total)) * 0.6931471805599453, mask=row_mask)


@triton.jit(do_not_specialize=["num_sequences", "num_few", "num_splits", "split_size"])
def _combine_kernel(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    query_start_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    stride_out_token,
    stride_out_head,
    num_sequences,
    num_few,
    num_splits,
    split_size,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    IS_FEW: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """out = sum over splits i of 2^(max_i - max) acc_i / the same sum of sum_i, in ascending order of i.

    Tensors as in `_attend_kernel`; BLOCK_SPLITS is a number of splits whose maxima are looked at together.

    One program handles one query and one head.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    if IS_FEW:
        sequence = row // num_few
        token = tl.load(query_start_ptr + sequence) + row % num_few
    else:
        token = row
        sequence = tl.full((), 0, tl.int32)
        above = num_sequences
        while above - sequence > 1:
            middle = (sequence + above) // 2
            if tl.load(query_start_ptr + middle) <= token:
                sequence = middle
            else:
                above = middle
    next_start = tl.load(query_start_ptr + sequence + 1)
    num_queries = next_start - tl.load(query_start_ptr + sequence)
    if token >= next_start:
        return
    if IS_FEW:
        if num_queries > num_few:
            return
    else:
        if num_queries <= num_few:
            return

    position = tl.load(context_lens_ptr + sequence) - next_start + token
    first_split = tl.maximum(position - window + 1, 0) // split_size
    last_split = position // split_size
    parts = (row.to(tl.int64) * NUM_HEADS + head) * num_splits
    maxima = tl.full((BLOCK_SPLITS,), float("-inf"), dtype=tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        used = (splits >= first_split) & (splits <= last_split)
        maxima = tl.maximum(maxima, tl.load(part_max_ptr + parts + splits, mask=used, other=float("-inf")))
    m = tl.max(maxima, axis=0)

    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    total = 0.0
    for block in range(first_split, last_split + 1, UNROLL):
        for offset in tl.static_range(UNROLL):
            part = parts + block + offset
            inside = block + offset <= last_split
            weight = _power_of_two(tl.load(part_max_ptr + part, mask=inside, other=float("-inf")) - m)
            total += weight * tl.load(part_sum_ptr + part, mask=inside, other=0.0)
            mask = dims < tl.where(inside, HEAD_DIM, 0)
            acc += weight * tl.load(part_acc_ptr + part * HEAD_DIM + dims, mask=mask, other=0.0)
    out_ptrs = out_ptr + token.to(tl.int64) * stride_out_token + head * stride_out_head + dims
    tl.store(out_ptrs, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if HAS_LSE:
        tl.store(lse_ptr + token.to(tl.int64) * NUM_HEADS + head, (m + tl.log2(total)) * 0.6931471805599453)


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    deterministic: bool = False,
    max_query_len: int | None = None,
    max_context_len: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what `paged_attention` does, on one device and without waiting for it.

    `deterministic`: a row's bits depend only on its query and its KV, whatever the chunk and the batch. `max_query_len`
    and `max_context_len` are upper bounds known to the caller, which must hold; without them more programs are started
    that find nothing to do. Contents of `block_tables`, `query_start` and `context_lens` are not checked, and tokens
    that belong to no sequence are left alone in `out`.
    """
    if sinks is not None:
        raise ValueError("attention with sinks runs on CPUs only")
    _check(query, key_cache, value_cache, block_tables, query_start, context_lens, scale, out)
    num_tokens, num_heads = query.shape[:2]
    num_sequences, max_blocks = block_tables.shape
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((num_tokens, num_heads), device=query.device) if return_lse else None
    if num_tokens and num_sequences:
        batch = _Batch(
            query if query.stride(2) == 1 else query.contiguous(),
            key_cache,
            value_cache,
            block_tables if block_tables.stride(1) == 1 else block_tables.contiguous(),
            query_start.contiguous(),
            context_lens.contiguous(),
            out,
            lse,
            scale,
            sliding_window,
            soft_cap,
            min(max_query_len or num_tokens, num_tokens),
            min(max_context_len or max_blocks * key_cache.shape[2], max_blocks * key_cache.shape[2]),
        )
        (_run_deterministic if deterministic else _run_fast)(batch)
    return out if lse is None else (out, lse)


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor | None,
) -> None:
    num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    if query.shape[2] != head_dim or query.shape[1] % num_kv_heads or key_cache.shape != value_cache.shape:
        raise ValueError("query and caches must agree on head_dim, and the query's heads be a multiple of the KV's")
    if any(cache.stride()[2:] != (head_dim, 1) for cache in (key_cache, value_cache)):
        raise ValueError("the last two dims of the caches must be contiguous")
    if query_start.shape != (len(context_lens) + 1,) or len(block_tables) != len(context_lens):
        raise ValueError("block_tables, query_start and context_lens must agree on the number of sequences")
    if out is not None and (out.shape != query.shape or out.stride(2) != 1):
        raise ValueError("out must be shaped like query, with contiguous rows")
    if head_dim > 256 or scale <= 0:
        raise ValueError("head_dim must be at most 256 and scale positive")
    if not query.dtype == key_cache.dtype == value_cache.dtype or (out is not None and out.dtype != query.dtype):
        raise TypeError("query, caches and out must have one dtype")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Checked arguments of one call, and the bounds for its launches."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    out: Tensor
    lse: Tensor | None
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    max_query_len: int
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return self.query.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.block_tables.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[1]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.num_kv_heads

    def tiles(self, table: dict[int, Tiles]) -> Tiles:
        """The tile shape for this head dim, with at least one query per tile."""
        is_float32 = self.query.dtype == torch.float32
        tiles = (FLOAT32 if is_float32 else table)[self.block_d]
        if self.block_d == 256 and not is_float32 and table is not FEW and shared_memory(self.query.device) < AMPLE:
            tiles = SCANT
        block_m = max(tiles.block_m, triton.next_power_of_2(self.group))
        return Tiles(block_m, tiles.block_n, tiles.num_warps, tiles.num_stages)

    def partial_bytes(self, num_rows: int, split_size: int) -> int:
        """Memory of the partial results of so many rows: weighted values, maximum and sum, by head and split."""
        num_splits: int = triton.cdiv(self.max_context_len, split_size)
        return num_rows * self.query.shape[1] * num_splits * (self.query.shape[2] + 2) * 4

    @property
    def block_d(self) -> int:
        return max(64, int(triton.next_power_of_2(self.query.shape[2])))


def _run_deterministic(batch: _Batch) -> None:
    """One split size, and tiles of which the bits show only their KV positions; parallel splits where the tiles alone
    would not fill the device."""
    if batch.query.dtype == torch.float32 or not is_hopper(batch.query.device):
        _run_alike(batch, batch.tiles(FIXED), num_few=0, is_few=False)
        return
    has_chunks, has_more = batch.max_query_len > 1, batch.num_sequences > 1
    if has_more or not has_chunks:
        _run_alike(batch, batch.tiles(LOW), num_few=1, is_few=True)
    if has_chunks:
        _run_alike(batch, batch.tiles(HIGH), num_few=1 if has_more else 0, is_few=False)


def _run_alike(batch: _Batch, tiles: Tiles, *, num_few: int, is_few: bool) -> None:
    """The sequences of up to `num_few` queries (`is_few`), or those of more, with the same bits whether splits run in
    parallel or in turn."""
    num_tiles = batch.num_sequences if is_few else _num_tiles(batch, tiles)
    num_rows = batch.num_sequences * num_few if is_few else batch.num_tokens
    parallel = num_tiles * batch.num_kv_heads < 2 * multiprocessors(batch.query.device)
    parallel = parallel and batch.partial_bytes(num_rows, DETERMINISTIC_SPLIT) <= MAX_PARTIAL_BYTES
    _launch(
        batch,
        tiles,
        num_tiles,
        num_few,
        DETERMINISTIC_SPLIT,
        is_few=is_few,
        is_parallel=parallel,
        is_folded=not parallel,
    )


def _run_fast(batch: _Batch) -> None:
    """Small tiles over parallel splits for sequences of few queries, large tiles for those of many."""
    small, large = batch.tiles(FEW), batch.tiles(MANY)
    num_few = min(small.block_m // batch.group, batch.max_query_len)
    if batch.num_tokens <= batch.num_sequences:
        num_few = 1  # almost certainly one query each; room for more would only cost memory
    split_size = _bounded_split(batch, batch.num_sequences * num_few, SPLIT)
    _launch(batch, small, batch.num_sequences, num_few, split_size, is_few=True, is_parallel=True, is_folded=False)
    if batch.max_query_len <= num_few:
        return
    num_tiles = _num_tiles(batch, large)
    programs, wanted = num_tiles * batch.num_kv_heads, 2 * multiprocessors(batch.query.device)
    # Splits as many as fill the device, of at least SPLIT positions each.
    split_size = SPLIT * triton.cdiv(batch.max_context_len, SPLIT * max(wanted // programs, 1))
    split_size = _bounded_split(batch, batch.num_tokens, split_size)
    parallel = split_size < batch.max_context_len and batch.num_tokens > batch.num_sequences
    _launch(batch, large, num_tiles, num_few, split_size, is_few=False, is_parallel=parallel, is_folded=False)


def _bounded_split(batch: _Batch, num_rows: int, split_size: int) -> int:
    """`split_size`, doubled until the partial results of so many rows fit, or one split holds everything."""
    while split_size < batch.max_context_len and batch.partial_bytes(num_rows, split_size) > MAX_PARTIAL_BYTES:
        split_size *= 2
    return split_size


def _num_tiles(batch: _Batch, tiles: Tiles) -> int:
    """An upper bound on the tiles that a batch's chunks fill, each chunk beginning a tile."""
    return batch.num_tokens // (tiles.block_m // batch.group) + batch.num_sequences


def _launch(
    batch: _Batch,
    tiles: Tiles,
    num_tiles: int,
    num_few: int,
    split_size: int,
    *,
    is_few: bool,
    is_parallel: bool,
    is_folded: bool,
) -> None:
    """Runs the attention kernel over `num_tiles` tiles, and the combining one after it where splits run in parallel."""
    query, out = batch.query, batch.out
    num_heads, head_dim = query.shape[1:]
    num_rows = batch.num_sequences * num_few if is_few else batch.num_tokens
    num_splits = triton.cdiv(batch.max_context_len, split_size) if is_parallel else 1
    shape = (num_rows, num_heads, num_splits) if is_parallel else (0, 0, 0)
    part_acc = torch.empty((*shape, head_dim), device=query.device)
    # Each in memory of its own: the second half of one tensor begins at no multiple of 16 bytes with some numbers of
    # rows, for which Triton compiles another variant.
    part_max, part_sum = (torch.empty(shape, device=query.device) for _ in range(2))
    lse = part_sum if batch.lse is None else batch.lse
    scale, cap = batch.scale * LOG2_E, 0.0
    if batch.soft_cap is not None:
        scale, cap = 2 * scale / batch.soft_cap, batch.soft_cap * LOG2_E
    grid = (batch.num_kv_heads, num_tiles, num_splits) if is_few else (num_tiles, batch.num_kv_heads, num_splits)
    _attend_kernel[grid](
        query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        out,
        lse,
        part_acc,
        part_max,
        part_sum,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        batch.key_cache.stride(0),
        batch.key_cache.stride(1),
        batch.value_cache.stride(0),
        batch.value_cache.stride(1),
        batch.block_tables.stride(0),
        batch.num_sequences,
        num_tiles,
        num_few,
        num_splits,
        split_size,
        scale,
        cap,
        batch.sliding_window or NO_WINDOW,
        NUM_KV_HEADS=batch.num_kv_heads,
        GROUP=batch.group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=batch.key_cache.shape[2],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=batch.block_d,
        HAS_WINDOW=batch.sliding_window is not None,
        HAS_CAP=batch.soft_cap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        IS_FEW=is_few,
        IS_PARALLEL=is_parallel,
        IS_FOLDED=is_folded,
        HAS_LSE=batch.lse is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    if is_parallel:
        _combine_kernel[(num_rows, num_heads)](
            part_acc,
            part_max,
            part_sum,
            batch.query_start,
            batch.context_lens,
            out,
            lse,
            out.stride(0),
            out.stride(1),
            batch.num_sequences,
            num_few,
            num_splits,
            split_size,
            batch.sliding_window or NO_WINDOW,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=batch.block_d,
            BLOCK_SPLITS=BLOCK_SPLITS,
            UNROLL=UNROLL,
            IS_FEW=is_few,
            HAS_LSE=batch.lse is not None,
            num_warps=1 if batch.block_d <= 128 else 2,
            enable_fp_fusion=False,
        )
