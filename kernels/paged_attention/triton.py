"""Attention over paged KV on a GPU: one kernel that walks the items of a list, one that merges their partial results.

`raydix.kernels.paged_attention.plan` makes the lists. A program takes a tile of queries of one sequence, all heads that
share one KV head packed into its rows, and walks a range of KV positions in tiles of BLOCK_N, at multiples of BLOCK_N.
Either the range is all that the tile sees, and the program writes the result, or it leaves partial results (maximum,
sum, weighted values) for the second kernel to add up, in the order of their positions.

Running maxima are rounded up to integers. In base 2 every rescaling is then by a power of two and exact, so that it
makes no difference when it happens: partial results added up by another kernel give the bits they give in registers.

Two modes. In the deterministic one a row's bits depend on its query, its KV, and nothing else: each segment of the
positions is added up by itself, and then the segments, in whichever kernel that is. A row stands anywhere in its tile
(matrix instructions treat rows alike), and tiles that hold nothing it may see add zeros. No multiplication is fused
with an addition unless written so. In the fast mode the last bits may depend on how the batch was cut.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from raydix.kernels.paged_attention.plan import AttentionPlan, AttentionPlanner, Heads, Launch
from raydix.kernels.paged_attention.work import Sequences

BLOCK_PARTS = 64
UNROLL = 8
MERGING = 4  # programs that merge, for each one that attends
LOG2_E = 1.4426950408889634
NO_WINDOW = 2**31 - 1


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
    full_begin,
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
    """(m, total, acc) of KV positions low:high; every row sees those of full_begin:full_end, multiples of BLOCK_N."""
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    # In ascending order, whichever tiles need a mask: the order of additions is that of positions.
    head = low
    if HAS_WINDOW:
        head = tl.minimum(tl.maximum(low, full_begin), high)
        for start in range(low, head, BLOCK_N):
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
    middle = tl.minimum(tl.maximum(head, full_end), high)
    for start in range(head, middle, BLOCK_N):
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
@triton.jit
def _attend_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    counts_ptr,
    items_ptr,
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
    own_line,
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
    SEGMENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SEGMENTED: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """out[t, h] = sum over visible n of softmax(cap(scale * query[t, h] . key[n])) value[n]; lse as in the reference.

    query, out: [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]; key_cache, value_cache: [num_blocks, NUM_KV_HEADS,
    BLOCK_SIZE, HEAD_DIM]; block_tables: int32, each table somewhere in it; counts: [1] int32, items; items: [items, 7]
    int32 as in `WorkList`; lse: [num_tokens, num_heads] float32; part_acc: [num_lines, HEAD_DIM] float32; part_max,
    part_sum: [num_lines] float32, where the line of a query's head is slot * num_heads + head, and each program has
    BLOCK_M lines of its own from own_line on.

    One program handles every num_programs-th pair of an item and a KV head, each with BLOCK_M // GROUP consecutive
    queries of one sequence and the GROUP heads of the KV head. With IS_SEGMENTED positions are added up for each
    SEGMENT by itself, then segment by segment: as `_merge_kernel` does, or in the program's own lines.
    """
    FIELDS: tl.constexpr = 7
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    num_pairs = tl.load(counts_ptr) * NUM_KV_HEADS
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        item_ptr = items_ptr + pair // NUM_KV_HEADS * FIELDS
        kv_head = pair % NUM_KV_HEADS
        first_token = tl.load(item_ptr)
        num_queries = tl.load(item_ptr + 1)
        first_position = tl.load(item_ptr + 2)
        table_ptr = block_tables_ptr + tl.load(item_ptr + 3)
        begin = tl.load(item_ptr + 4)
        end = tl.load(item_ptr + 5)
        slot = tl.load(item_ptr + 6)

        queries = rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        row_mask = queries < num_queries
        tokens = (first_token + queries).to(tl.int64)
        positions = first_position + queries
        element_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        query_ptrs = query_ptr + (tokens * stride_query_token + heads * stride_query_head)[:, None] + dims[None, :]
        q = tl.load(query_ptrs, mask=element_mask, other=0.0)

        key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_key_head
        value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_value_head
        # The last query sees positions from full_begin on, the first one those before full_end.
        full_begin = (tl.maximum(first_position + num_queries - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full_end = (first_position + 1) // BLOCK_N * BLOCK_N

        is_whole = slot < 0
        aligned_begin = begin // BLOCK_N * BLOCK_N
        span = end  # one piece, that begins at 0
        if IS_SEGMENTED:
            span = SEGMENT
        first_piece = begin // span * span
        for piece in range(first_piece, end, span):
            m, total, acc = _attend_range(
                q,
                tl.maximum(piece, aligned_begin),
                full_begin,
                full_end,
                tl.minimum(piece + span, end),
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
            # Read again: places that are kept over the loops above would spill.
            tokens = (tl.load(item_ptr) + queries).to(tl.int64)
            in_slot = tl.load(item_ptr + 6) + (piece - first_piece) // span * num_queries + queries
            lines = tl.where(is_whole, own_line + tl.program_id(0) * BLOCK_M + rows, in_slot * NUM_HEADS + heads)
            part_acc_ptrs = part_acc_ptr + lines[:, None] * HEAD_DIM + dims[None, :]
            if IS_SEGMENTED:  # noqa: SIM102, a constant: the rest is not compiled
                if is_whole & (piece > first_piece):
                    # What is before this piece was left in memory: held in registers beside this one, it would spill.
                    before_m = tl.load(part_max_ptr + lines, mask=row_mask, other=0.0)
                    before_total = tl.load(part_sum_ptr + lines, mask=row_mask, other=0.0)
                    before_acc = tl.load(part_acc_ptrs, mask=element_mask, other=0.0)
                    new_m = tl.maximum(before_m, m)
                    finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)
                    shrink, weight = _power_of_two(before_m - finite_m), _power_of_two(m - finite_m)
                    total = before_total * shrink + total * weight
                    acc = before_acc * shrink[:, None] + acc * weight[:, None]
                    m = new_m
            if is_whole & (piece + span >= end):
                out_ptrs = out_ptr + (tokens * stride_out_token + heads * stride_out_head)[:, None] + dims[None, :]
                tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=element_mask)
                if HAS_LSE:
                    lse_ptrs = lse_ptr + tokens * NUM_HEADS + heads
                    tl.store(lse_ptrs, (m + tl.log2(total)) * 0.6931471805599453, mask=row_mask)
            else:
                tl.store(part_acc_ptrs, acc, mask=element_mask)
                tl.store(part_max_ptr + lines, m, mask=row_mask)
                tl.store(part_sum_ptr + lines, total, mask=row_mask)
            if IS_SEGMENTED:
                # A thread may read there what others have written, and write where others have read.
                tl.debug_barrier()


@triton.jit
def _merge_kernel(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    counts_ptr,
    merges_ptr,
    out_ptr,
    lse_ptr,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """out = sum over parts i of 2^(max_i - max) acc_i / the same sum of sum_i, in ascending order of i.

    counts: [2] int32, items and merges; merges: [merges, 4] int32 as in `WorkList`; other tensors as in
    `_attend_kernel`. BLOCK_PARTS is a number of parts whose maxima are looked at together.

    One program handles every num_programs-th pair of a query and a head.
    """
    dims = tl.arange(0, BLOCK_D)
    num_pairs = tl.load(counts_ptr + 1) * NUM_HEADS
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        merge_ptr = merges_ptr + pair // NUM_HEADS * 4
        head = pair % NUM_HEADS
        token = tl.load(merge_ptr).to(tl.int64)
        first_line = tl.load(merge_ptr + 1) * NUM_HEADS + head
        stride_line = tl.load(merge_ptr + 2) * NUM_HEADS
        num_parts = tl.load(merge_ptr + 3)

        maxima = tl.full((BLOCK_PARTS,), float("-inf"), dtype=tl.float32)
        for start in range(0, num_parts, BLOCK_PARTS):
            parts = start + tl.arange(0, BLOCK_PARTS)
            part_ptrs = part_max_ptr + first_line + parts * stride_line
            maxima = tl.maximum(maxima, tl.load(part_ptrs, mask=parts < num_parts, other=float("-inf")))
        m = tl.max(maxima, axis=0)

        acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
        total = 0.0
        for block in range(0, num_parts, UNROLL):
            for offset in tl.static_range(UNROLL):
                inside = block + offset < num_parts
                line = first_line + (block + offset) * stride_line
                weight = _power_of_two(tl.load(part_max_ptr + line, mask=inside, other=float("-inf")) - m)
                total += weight * tl.load(part_sum_ptr + line, mask=inside, other=0.0)
                mask = dims < tl.where(inside, HEAD_DIM, 0)
                acc += weight * tl.load(part_acc_ptr + line * HEAD_DIM + dims, mask=mask, other=0.0)
        out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head + dims
        tl.store(out_ptrs, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
        if HAS_LSE:
            tl.store(lse_ptr + token * NUM_HEADS + head, (m + tl.log2(total)) * 0.6931471805599453)


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
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do what `paged_attention` does, on one device.

    With a `plan` nothing waits for the device, and `query_start` and `context_lens` are not read: the plan knows them,
    and where in the memory of `block_tables` each table begins. Without one the step is planned here, which waits for
    those two. Contents of the tensors are not checked, and tokens that belong to no sequence are left alone in `out`.
    """
    if sinks is not None:
        raise ValueError("attention with sinks runs on CPUs only")
    _check(query, key_cache, value_cache, block_tables, query_start, context_lens, scale, out)
    num_tokens, num_heads, head_dim = query.shape
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((num_tokens, num_heads), device=query.device) if return_lse else None
    if plan is None:
        block_tables = block_tables.contiguous()
        heads = Heads(num_heads, key_cache.shape[1], head_dim, query.dtype)
        sequences = _sequences(query_start, context_lens, block_tables.shape[1])
        longest = int(sequences.context_len.max(initial=0))
        planner = AttentionPlanner(heads, (sliding_window,), query.device, longest, deterministic=deterministic)
        plan = planner.plan(sequences)[sliding_window]
    elif not block_tables.is_contiguous():
        raise ValueError("where a plan says at which entries block tables begin, their memory must be contiguous")
    elif (plan.window, plan.deterministic) != (sliding_window, deterministic):
        raise ValueError(f"the plan is for another window or mode: {plan.window}, {plan.deterministic}")
    query = query if query.stride(2) == 1 else query.contiguous()
    for launch in plan.launches:
        _launch(plan, launch, query, key_cache, value_cache, block_tables, out, lse, scale=scale, soft_cap=soft_cap)
    return out if lse is None else (out, lse)


def _sequences(query_start: Tensor, context_lens: Tensor, table_size: int) -> Sequences:
    """What a plan must know of the sequences, from the device."""
    starts = query_start.cpu().numpy().astype(np.int64)
    contexts = context_lens.cpu().numpy().astype(np.int64)
    return Sequences(starts[:-1], np.diff(starts), contexts, np.arange(len(contexts)) * table_size)


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


def _launch(
    plan: AttentionPlan,
    launch: Launch,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Run the attention kernel over a list, and the merging one behind it where there may be something to merge."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[1]
    block_d = max(64, triton.next_power_of_2(head_dim))
    partials, tiles = plan.partials, launch.tiles
    scale, cap = scale * LOG2_E, 0.0
    if soft_cap is not None:
        scale, cap = 2 * scale / soft_cap, soft_cap * LOG2_E
    # Never more programs than pairs there may be: none has nothing to do where the list's length is known.
    _attend_kernel[(min(launch.max_items * num_kv_heads, plan.num_programs),)](
        query,
        key_cache,
        value_cache,
        block_tables,
        launch.counts,
        launch.items,
        out,
        partials.sums if lse is None else lse,
        partials.values,
        partials.maxima,
        partials.sums,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        partials.num_slots * num_heads,
        scale,
        cap,
        NO_WINDOW if plan.window is None else plan.window,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        SEGMENT=plan.segment,
        HAS_WINDOW=plan.window is not None,
        HAS_CAP=soft_cap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        IS_SEGMENTED=plan.deterministic,
        HAS_LSE=lse is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    if launch.max_merges:
        _merge_kernel[(min(launch.max_merges * num_heads, MERGING * plan.num_programs),)](
            partials.values,
            partials.maxima,
            partials.sums,
            launch.counts,
            launch.merges,
            out,
            partials.sums if lse is None else lse,
            out.stride(0),
            out.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_PARTS=BLOCK_PARTS,
            UNROLL=UNROLL,
            HAS_LSE=lse is not None,
            num_warps=1 if block_d <= 128 else 2,
            enable_fp_fusion=False,
        )
