"""Sampling on a GPU, without waiting for it and without sorting.

The kept tokens are always a prefix of the ranking by probability. So two values define them: the least probability
kept, and the number of tokens kept among the ones of exactly this probability, lowest ids first. Probabilities are not
negative, so their bits order as integers, and the bound is found by bisecting them: 31 passes over a row that stays in
the cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from raydix.kernels.sample.reference import Controls, ranks_of
from raydix.kernels.sample.triton_noise import arrivals, first_arrivals, logarithm
from raydix.kernels.sample.types import LogitBias, Penalties, SampleOutput, TokenMask

MAX_BLOCK = 4096
ENTRIES = 256
# Tokens that a program draws from at once, so few that their noise stays in registers, and how often it does so.
DRAWN, PART_BLOCKS = 1024, 8


@triton.jit
def _widen_kernel(logits_ptr, z_ptr, stride_logits_row, vocabulary, BLOCK: tl.constexpr):
    """z = logits in float32, NaN as -inf.

    logits: [batch, vocabulary], rows strided; z: [batch, vocabulary] float32 contiguous.

    One program handles BLOCK logits of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocabulary
    z = tl.load(logits_ptr + row * stride_logits_row + ids, mask=mask, other=0.0).to(tl.float32)
    tl.store(z_ptr + row * vocabulary + ids, tl.where(z == z, z, float("-inf")), mask=mask)


@triton.jit
def _penalise_kernel(
    z_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    offsets_ptr,
    token_ids_ptr,
    output_counts_ptr,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """z = (z > 0 ? z / repetition : z * repetition) - frequency * count - presence * (count > 0) at a row's entries.

    z: [batch, vocabulary] float32, changed in place; presence, frequency, repetition: [batch] float32; offsets:
    [batch + 1] int64; token_ids: [num_entries] int64, distinct in a row; output_counts: [num_entries] int32.

    One program handles one row.
    """
    row = tl.program_id(0).to(tl.int64)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    for start in range(begin, end, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        mask = entries < end
        z_ptrs = z_ptr + row * vocabulary + tl.load(token_ids_ptr + entries, mask=mask, other=0)
        z = tl.load(z_ptrs, mask=mask, other=0.0)
        counts = tl.load(output_counts_ptr + entries, mask=mask, other=0).to(tl.float32)
        z = tl.where(z > 0, z / repetition, z * repetition)
        tl.store(z_ptrs, z - frequency * counts - tl.where(counts > 0, presence, 0.0), mask=mask)


@triton.jit
def _bias_kernel(z_ptr, offsets_ptr, token_ids_ptr, values_ptr, vocabulary, BLOCK: tl.constexpr):
    """z += value at a row's entries; tensors as in `_penalise_kernel`, values: [num_entries] float32.

    One program handles one row.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    for start in range(begin, end, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        mask = entries < end
        z_ptrs = z_ptr + row * vocabulary + tl.load(token_ids_ptr + entries, mask=mask, other=0)
        z = tl.load(z_ptrs, mask=mask, other=0.0)
        tl.store(z_ptrs, z + tl.load(values_ptr + entries, mask=mask, other=0.0), mask=mask)


@triton.jit
def _mask_kernel(z_ptr, rows_ptr, bits_ptr, vocabulary, num_words, BLOCK: tl.constexpr):
    """z = -inf where a row's mask has no bit; rows without a mask stay.

    z: [batch, vocabulary] float32, changed in place; rows: [batch] int32, -1 for none; bits: [num_masks, num_words]
    int32.

    One program handles BLOCK logits of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(rows_ptr + row).to(tl.int64)
    if mask_row < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    words = tl.load(bits_ptr + mask_row * num_words + ids // 32, mask=inside, other=0)
    banned = ((words >> (ids % 32)) & 1) == 0
    tl.store(z_ptr + row * vocabulary + ids, float("-inf"), mask=inside & banned)


@triton.jit
def _load_bits(p_ptr, ids, vocabulary):
    """The bits of some probabilities, ordered like them; NaN counts as 0, positions past the end as -1."""
    mask = ids < vocabulary
    p = tl.load(p_ptr + ids, mask=mask, other=0.0)
    return tl.where(mask, tl.where(p == p, p, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit
def _count_above(p_ptr, vocabulary, bound, BLOCK: tl.constexpr):
    """Number of probabilities with bits of more than `bound`."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        bits = _load_bits(p_ptr, start + tl.arange(0, BLOCK), vocabulary)
        count += (bits > bound).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass_above(p_ptr, vocabulary, bound, BLOCK: tl.constexpr):
    """The sum, in float64, of the probabilities with bits of more than `bound`."""
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, vocabulary, BLOCK):
        bits = _load_bits(p_ptr, start + tl.arange(0, BLOCK), vocabulary)
        mass += tl.where(bits > bound, bits.to(tl.float32, bitcast=True), 0.0).to(tl.float64)
    return tl.sum(mass, axis=0)


@triton.jit
def _kept(p_ptr, top_k, top_p, min_p, vocabulary, BLOCK: tl.constexpr):
    """The least bits of a kept probability, and how many of the tokens with these bits are kept, lowest ids first."""
    highest = tl.full((BLOCK,), -1, dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        highest = tl.maximum(highest, _load_bits(p_ptr, start + tl.arange(0, BLOCK), vocabulary))
    top = tl.max(highest, axis=0)

    # Kept so far: bits above `bound`, and `quota` of those with bits equal to it. First min-p.
    least = min_p * top.to(tl.float32, bitcast=True)
    bound = tl.minimum(tl.maximum(least, 0.0).to(tl.int32, bitcast=True), top)
    quota = tl.full((), 0, tl.int32) + vocabulary

    # Top-k: the highest bound that keeps at least k.
    if (top_k > 0) & (top_k < vocabulary):
        low = tl.full((), 0, tl.int32)
        high = top
        while low < high:
            middle = low + (high - low + 1) // 2
            if _count_above(p_ptr, vocabulary, middle - 1, BLOCK) >= top_k:
                low = middle
            else:
                high = middle - 1
        if low >= bound:
            bound = low
            quota = top_k - _count_above(p_ptr, vocabulary, low, BLOCK)

    # Top-p: the lowest bound with less than the wanted mass above it, at least that of the most probable token.
    if top_p < 1:
        above = _mass_above(p_ptr, vocabulary, bound, BLOCK)
        at_bound = _count_above(p_ptr, vocabulary, bound - 1, BLOCK) - _count_above(p_ptr, vocabulary, bound, BLOCK)
        at_bound = tl.minimum(at_bound, quota)
        level = bound.to(tl.float32, bitcast=True).to(tl.float64)
        wanted = top_p.to(tl.float64) * (above + at_bound.to(tl.float64) * level)
        low = bound
        high = top
        while low < high:
            middle = low + (high - low) // 2
            if _mass_above(p_ptr, vocabulary, middle, BLOCK) < wanted:
                high = middle
            else:
                low = middle + 1
        level = low.to(tl.float32, bitcast=True).to(tl.float64)
        missing = (wanted - _mass_above(p_ptr, vocabulary, low, BLOCK)) / tl.maximum(level, 1e-300)
        needed = tl.minimum(tl.ceil(tl.maximum(missing, 1.0)), 2147483647.0).to(tl.int32)
        quota = tl.where(low > bound, needed, tl.minimum(quota, needed))
        bound = low
    return bound, quota


@triton.jit
def _last_tie(p_ptr, bound, quota, vocabulary, BLOCK: tl.constexpr):
    """The id of the last kept token with bits equal to `bound`, -1 for none."""
    last = tl.full((), -1, tl.int32)
    ties = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_tie = (_load_bits(p_ptr, ids, vocabulary) == bound).to(tl.int32)
        kept = (is_tie == 1) & (ties + tl.cumsum(is_tie, axis=0) <= quota)
        last = tl.maximum(last, tl.max(tl.where(kept, ids, -1), axis=0))
        ties += tl.sum(is_tie, axis=0)
    return last


@triton.jit
def _bound_kernel(
    p_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bounds_ptr,
    last_ties_ptr,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """The least bits of a row's kept probabilities, and the last kept id among those with exactly these bits.

    p: [batch, vocabulary] float32; top_p, min_p: [batch] float32; top_k, bounds, last_ties: [batch] int32.

    One program handles one row.
    """
    row = tl.program_id(0).to(tl.int64)
    p_ptr += row * vocabulary
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    bound, quota = _kept(p_ptr, top_k, top_p, min_p, vocabulary, BLOCK)
    last_tie = tl.full((), 2147483647, tl.int32)
    if quota < vocabulary:
        last_tie = _last_tie(p_ptr, bound, quota, vocabulary, BLOCK)
    tl.store(bounds_ptr + row, bound)
    tl.store(last_ties_ptr + row, last_tie)


@triton.jit
def _draw_kernel(
    z_ptr,
    p_ptr,
    bounds_ptr,
    last_ties_ptr,
    greedy_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    scores_ptr,
    tokens_ptr,
    vocabulary,
    num_parts,
    HAS_CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART_BLOCKS: tl.constexpr,
):
    """The largest (z - largest z) / temperature + noise of the kept tokens of a part of a row, and its lowest id.

    z, p: [batch, vocabulary] float32; bounds, last_ties: [batch] int32 of `_bound_kernel`; greedy: [batch] int64, the
    first largest z; temperature: [batch] float32; seed, position: [batch] int64; scores float32, tokens int32: [batch,
    num_parts]. Without HAS_CUTS every token is kept, and p, bounds and last_ties are not read.

    One program handles PART_BLOCKS blocks of BLOCK tokens of one row, none where the row draws nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    z_ptr += row * vocabulary
    p_ptr += row * vocabulary
    temperature = tl.load(temperature_ptr + row)
    origin = tl.load(z_ptr + tl.load(greedy_ptr + row))
    if (temperature == 0) | (tl.abs(origin) == float("inf")):
        return

    if HAS_CUTS:
        bound, last_tie = tl.load(bounds_ptr + row), tl.load(last_ties_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 2147483647, tl.int32)
    NUM_GROUPS: tl.constexpr = BLOCK // 16
    first = part * PART_BLOCKS * NUM_GROUPS
    end = tl.minimum(first + PART_BLOCKS * NUM_GROUPS, tl.cdiv(vocabulary, 256) * 16)
    for start in range(first, end, NUM_GROUPS):
        groups = start + tl.arange(0, NUM_GROUPS)
        ids = (groups // 16 * 256 + groups % 16)[:, None] + 16 * tl.arange(0, 16)[None, :]
        kept = ids < vocabulary
        if HAS_CUTS:
            bits = _load_bits(p_ptr, ids, vocabulary)
            kept = (bits > bound) | ((bits == bound) & (ids <= last_tie))
        z = tl.load(z_ptr + ids, mask=kept, other=float("-inf"))
        distances = tl.div_rn(z - origin, temperature)
        members, times = first_arrivals(seed, position, groups)

        # No member of a group has more noise than the first to arrive, but for rounding.
        reach = tl.max(distances, axis=1) - logarithm(times) + 1e-3
        if tl.max(reach, axis=0) >= best:
            scores = distances - logarithm(arrivals(seed, position, groups, members, times, NUM_GROUPS))
            highest = tl.max(tl.max(scores, axis=1), axis=0)
            lowest_id = tl.min(tl.min(tl.where(scores == highest, ids, 2147483647), axis=1), axis=0)
            better = (highest > best) | ((highest == best) & (lowest_id < token))
            best = tl.where(better, highest, best)
            token = tl.where(better, lowest_id, token)
    tl.store(scores_ptr + row * num_parts + part, best)
    tl.store(tokens_ptr + row * num_parts + part, token)


@triton.jit
def _choose_kernel(
    z_ptr,
    greedy_ptr,
    temperature_ptr,
    scores_ptr,
    tokens_ptr,
    token_ids_ptr,
    vocabulary,
    num_parts,
    BLOCK: tl.constexpr,
):
    """The token of the part with the largest score, lowest id on ties; the greedy one where temperature is 0 or its z
    is not finite.

    Tensors as in `_draw_kernel`; token_ids: [batch] int64; BLOCK: num_parts rounded up to a power of two.

    One program handles one row.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(greedy_ptr + row)
    origin = tl.load(z_ptr + row * vocabulary + token)
    if (tl.load(temperature_ptr + row) != 0) & (tl.abs(origin) != float("inf")):
        parts = tl.arange(0, BLOCK)
        inside = parts < num_parts
        scores = tl.load(scores_ptr + row * num_parts + parts, mask=inside, other=float("-inf"))
        tokens = tl.load(tokens_ptr + row * num_parts + parts, mask=inside, other=2147483647)
        highest = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == highest, tokens, 2147483647), axis=0).to(tl.int64)
    tl.store(token_ids_ptr + row, token)


@triton.jit(do_not_specialize=["widest"])
def _top_kernel(logprobs_ptr, wanted_ptr, top_ids_ptr, top_logprobs_ptr, vocabulary, widest, BLOCK: tl.constexpr):
    """The wanted[row] largest entries of a row, largest first, ties by id; NaN counts as -inf. The rest is zero.

    logprobs: [batch, vocabulary] float32; wanted: [batch] int64; top_ids int64, top_logprobs float32: [batch, widest].

    One program handles one row.
    """
    row = tl.program_id(0).to(tl.int64)
    logprobs_ptr += row * vocabulary
    wanted = tl.load(wanted_ptr + row).to(tl.int32)
    last_value = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for rank in range(widest):
        if rank < wanted:
            best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
            best_ids = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
            for start in range(0, vocabulary, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                value = tl.load(logprobs_ptr + ids, mask=ids < vocabulary, other=float("-inf"))
                value = tl.where(value == value, value, float("-inf"))
                later = (value < last_value) | ((value == last_value) & (ids > last_id))
                better = later & (ids < vocabulary) & ((value > best) | (best_ids == 2147483647))
                best = tl.where(better, value, best)
                best_ids = tl.where(better, ids, best_ids)
            last_value = tl.max(best, axis=0)
            last_id = tl.min(tl.where(best == last_value, best_ids, 2147483647), axis=0)
            tl.store(top_ids_ptr + row * widest + rank, last_id.to(tl.int64))
            tl.store(top_logprobs_ptr + row * widest + rank, tl.load(logprobs_ptr + last_id))


def sample_triton(
    logits: Tensor,
    controls: Controls,
    *,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    mask: TokenMask | None = None,
    wanted: Sequence[int] = (),
    given: Tensor | None = None,
    cuts: bool = True,
) -> SampleOutput:
    """Do what `sample` does, on one device, without waiting; `wanted[b]` is `num_logprobs[b]`, or -1 for neither."""
    batch, vocabulary = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device) if given is None else given
    widest = max(wanted, default=-1)
    logprobs = ranks = None
    if batch:
        z = _adjusted(logits, penalties, bias)
        ranks = None if given is None else ranks_of(z, given)
        normalised = torch.log_softmax(z, -1) if widest >= 0 else z  # before tokens are banned
    if batch and given is None:
        if mask is not None:
            _ban(z, mask)
        _draw(z, controls, tokens, cuts)
    if widest < 0:
        return SampleOutput(token_ids=tokens, logprobs=None, top_ids=None, top_logprobs=None, ranks=ranks)
    top_ids = torch.zeros((batch, widest), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.zeros((batch, widest), device=logits.device)
    logprobs = torch.zeros(batch, device=logits.device)
    if batch:
        counts = _to_device(wanted, logits.device)
        chosen = normalised.gather(1, tokens[:, None])[:, 0]
        logprobs = torch.where(counts >= 0, chosen, logprobs)
        if widest:
            _top_kernel[(batch,)](
                normalised,
                counts,
                top_ids,
                top_logprobs,
                vocabulary,
                widest,
                BLOCK=_block(vocabulary),
                num_warps=_warps(vocabulary),
                enable_fp_fusion=False,
            )
    return SampleOutput(token_ids=tokens, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs, ranks=ranks)


def _draw(z: Tensor, controls: Controls, tokens: Tensor, cuts: bool) -> None:
    """Writes the token that each row of `z` draws to `tokens` [batch]; with `cuts` some rows have a top-k, top-p or
    min-p."""
    batch, vocabulary = z.shape
    greedy, temperature = z.argmax(-1), controls.temperature
    p = bounds = last_ties = z  # not read where nothing is cut
    if cuts:
        p = torch.softmax(z / torch.where(temperature == 0, 1.0, temperature)[:, None], -1)
        # Each begins at a multiple of 16 bytes, so that the number of rows makes no other variant of the kernels.
        bounds, last_ties = (torch.empty(batch, dtype=torch.int32, device=z.device) for _ in range(2))
        _bound_kernel[(batch,)](
            p,
            controls.top_k,
            controls.top_p,
            controls.min_p,
            bounds,
            last_ties,
            vocabulary,
            BLOCK=_block(vocabulary),
            num_warps=_warps(vocabulary),
            enable_fp_fusion=False,
        )

    # Several programs a row: few rows would leave most of the GPU idle.
    block = min(_block(vocabulary), DRAWN)
    num_parts = triton.cdiv(vocabulary, block * PART_BLOCKS)
    scores = torch.empty((batch, num_parts), device=z.device)
    parts = torch.empty((batch, num_parts), dtype=torch.int32, device=z.device)
    _draw_kernel[(batch, num_parts)](
        z,
        p,
        bounds,
        last_ties,
        greedy,
        temperature,
        controls.seed,
        controls.position,
        scores,
        parts,
        vocabulary,
        num_parts,
        HAS_CUTS=cuts,
        BLOCK=block,
        PART_BLOCKS=PART_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _choose_kernel[(batch,)](
        z,
        greedy,
        temperature,
        scores,
        parts,
        tokens,
        vocabulary,
        num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
        enable_fp_fusion=False,
    )


def _adjusted(logits: Tensor, penalties: Penalties | None, bias: LogitBias | None) -> Tensor:
    """Float32 logits after penalties and bias."""
    batch, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    z = torch.empty((batch, vocabulary), device=logits.device)
    block = _block(vocabulary)
    _widen_kernel[(batch, triton.cdiv(vocabulary, block))](
        logits, z, logits.stride(0), vocabulary, BLOCK=block, enable_fp_fusion=False
    )
    if penalties is not None:
        _penalise_kernel[(batch,)](
            z,
            penalties.presence,
            penalties.frequency,
            penalties.repetition,
            penalties.offsets,
            penalties.token_ids,
            penalties.output_counts,
            vocabulary,
            BLOCK=ENTRIES,
            enable_fp_fusion=False,
        )
    if bias is not None:
        _bias_kernel[(batch,)](
            z, bias.offsets, bias.token_ids, bias.values, vocabulary, BLOCK=ENTRIES, enable_fp_fusion=False
        )
    return z


def _ban(z: Tensor, mask: TokenMask) -> None:
    """Set the logits of tokens that a row may not choose to -inf, in place."""
    batch, vocabulary = z.shape
    block = _block(vocabulary)
    grid = batch, triton.cdiv(vocabulary, block)
    _mask_kernel[grid](z, mask.rows, mask.bits, vocabulary, mask.bits.shape[1], BLOCK=block, enable_fp_fusion=False)


def _block(vocabulary: int) -> int:
    """Tokens that a program handles at once; at least sixteen groups of noise."""
    return min(max(int(triton.next_power_of_2(vocabulary)), 256), MAX_BLOCK)


def _warps(vocabulary: int) -> int:
    return max(min(_block(vocabulary) // 256, 16), 1)


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """`values` as an int64 tensor, without waiting for the work queued on `device`."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
