"""Cases of `benchmarks.kernels`: every operation at the shapes of a Llama-3-8B, with its check and its peers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_peers import AttentionInputs, Peer, attention_peers
from raydix.kernels.batch_invariant_matmul import batch_invariant_matmul
from raydix.kernels.batch_invariant_matmul.reference import batch_invariant_matmul_reference
from raydix.kernels.kv_pack import kv_pack
from raydix.kernels.kv_pack.reference import kv_pack_reference
from raydix.kernels.kv_unpack import kv_unpack
from raydix.kernels.paged_attention.plan import AttentionPlanner, Heads
from raydix.kernels.paged_attention.reference import paged_attention_reference
from raydix.kernels.paged_attention.triton import paged_attention_triton
from raydix.kernels.paged_attention.work import Sequences
from raydix.kernels.rms_norm import rms_norm
from raydix.kernels.rms_norm.reference import add_rms_norm_reference
from raydix.kernels.rotary import rotary_tables
from raydix.kernels.rotary_kv_store import rotary_kv_store
from raydix.kernels.rotary_kv_store.reference import rotary_kv_store_reference
from raydix.kernels.sample import Controls, sample
from raydix.kernels.sample.reference import adjusted_row, sample_row
from raydix.kernels.silu_and_mul import silu_and_mul
from raydix.kernels.silu_and_mul.reference import silu_and_mul_reference

NUM_HEADS, NUM_KV_HEADS, HIDDEN, INTERMEDIATE, VOCABULARY = 32, 8, 4096, 14336, 128256
BLOCK_SIZE = 16
# Relative norm of the difference to the float32 reference in bfloat16.
LIMIT = 6e-3
CHECKED_QUERIES = 64


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One operation at one shape.

    `run` is timed; `error` gives the relative error of its result, at most `limit`. `flops` or `num_bytes`, whichever
    bounds the operation, is its least need. `returns_when_done`: `run` waits for the device itself and is timed from
    outside, else as the replay of a CUDA graph.
    """

    operation: str
    shape: str
    run: Callable[[], Any]
    error: Callable[[Any], float]
    limit: float = LIMIT
    flops: float = 0.0
    num_bytes: float = 0.0
    peers: dict[str, Callable[[], Peer]] = field(default_factory=dict)
    returns_when_done: bool = False


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of `expected`, both in float32; infinite where `actual` holds a NaN."""
    if actual.shape != expected.shape or bool(actual.isnan().any()):
        return float("inf")
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def all_cases(quick: bool) -> Iterator[KernelCase]:
    """Yield every case, one at a time, so that only one's tensors need to fit."""
    chunk = 2048
    contexts = [8192] if quick else [8192, 16384, 32768]
    for context in contexts:
        yield from attention_cases(1, chunk, context, 128, with_flex=not quick)

    yield from attention_cases(1, 8192, 8192, 128, with_flex=not quick)
    if not quick:
        yield from attention_cases(1, chunk, 8192, 64, with_flex=True)
        yield from attention_cases(1, chunk, 8192, 256, with_flex=False)
        yield from attention_cases(1, 64, 32768, 128, with_flex=False)

    for batch, context in [(16, 4096)] if quick else [(1, 4096), (16, 4096), (64, 4096), (1, 32768), (16, 32768)]:
        yield from attention_cases(batch, 1, context, 128, with_flex=False)

    yield from row_cases(512 if quick else 8192)
    yield from copy_cases(64 if quick else 512)
    for rows in [16, 2048] if quick else [1, 16, 64, 512, 4096]:
        yield from matmul_cases(rows)

    yield from sample_cases(64)


def attention_inputs(batch: int, num_queries: int, context_len: int, head_dim: int) -> AttentionInputs:
    """Random KV at shuffled blocks of the second of two layers, and queries."""
    blocks = -(-context_len // BLOCK_SIZE)
    pool = torch.randn(
        (batch * blocks + 1, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim), dtype=torch.bfloat16, device="cuda"
    )
    order = torch.randperm(batch * blocks, device="cuda", dtype=torch.int32) + 1
    query = torch.randn((batch * num_queries, NUM_HEADS, head_dim), dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * num_queries
    contexts = torch.full((batch,), context_len, dtype=torch.int32, device="cuda")
    return AttentionInputs(
        query=query,
        keys=pool[:, 1, 0],
        values=pool[:, 1, 1],
        block_tables=order.view(batch, blocks),
        query_start=starts,
        context_lens=contexts,
        num_queries=num_queries,
        context_len=context_len,
        scale=head_dim**-0.5,
    )


def attention_cases(
    batch: int, num_queries: int, context_len: int, head_dim: int, *, with_flex: bool
) -> Iterator[KernelCase]:
    """The fast mode beside its peers, and the deterministic mode."""
    inputs = attention_inputs(batch, num_queries, context_len, head_dim)
    visible = num_queries * (context_len - num_queries) + num_queries * (num_queries + 1) / 2
    flops = 4.0 * batch * NUM_HEADS * head_dim * visible
    num_bytes = 2.0 * 2 * batch * context_len * NUM_KV_HEADS * head_dim + 2.0 * 2 * inputs.query.numel()
    checked = min(num_queries, CHECKED_QUERIES)

    def error(out: Tensor) -> float:
        # The last queries of the first sequence, and NaN anywhere.
        expected, _ = paged_attention_reference(
            inputs.query[num_queries - checked : num_queries],
            inputs.keys,
            inputs.values,
            inputs.block_tables[:1],
            torch.tensor([0, checked], dtype=torch.int32, device="cuda"),
            inputs.context_lens[:1],
            scale=inputs.scale,
        )
        return (
            float("inf")
            if bool(out.isnan().any())
            else relative_error(out[num_queries - checked : num_queries], expected)
        )

    # Planned once for all layers of a step, so outside of what is timed.
    heads = Heads(NUM_HEADS, NUM_KV_HEADS, head_dim, inputs.query.dtype)
    counts = np.arange(batch, dtype=np.int64)
    sequences = Sequences(
        counts * num_queries,
        np.full_like(counts, num_queries),
        np.full_like(counts, context_len),
        counts * inputs.block_tables.shape[1],
    )
    plans = {
        deterministic: AttentionPlanner(
            heads, (None,), inputs.query.device, context_len, deterministic=deterministic
        ).plan(sequences)[None]
        for deterministic in (False, True)
    }

    def run(deterministic: bool) -> Any:
        return paged_attention_triton(
            inputs.query,
            inputs.keys,
            inputs.values,
            inputs.block_tables,
            inputs.query_start,
            inputs.context_lens,
            scale=inputs.scale,
            deterministic=deterministic,
            plan=plans[deterministic],
        )

    shape = f"{batch} x {num_queries} of {context_len}, dim {head_dim}"
    is_decode = num_queries == 1

    # Decode is bound by reading KV, prefill by arithmetic.
    bounds = (0.0, num_bytes) if is_decode else (flops, 0.0)
    peers = attention_peers(inputs, with_flex=with_flex)
    yield KernelCase("paged_attention", shape, partial(run, False), error, LIMIT, *bounds, peers)
    yield KernelCase("paged_attention, deterministic", shape, partial(run, True), error, LIMIT, *bounds)


def row_cases(rows: int) -> Iterator[KernelCase]:
    """Operations that read and write each row once."""
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    x, residual = torch.randn((rows, HIDDEN), **bf16), torch.randn((rows, HIDDEN), **bf16)
    weight = torch.randn(HIDDEN, **bf16)
    yield KernelCase(
        "rms_norm",
        f"{rows} x {HIDDEN} with residual",
        lambda: rms_norm(x, weight, 1e-5, residual)[0],
        lambda out: relative_error(out, add_rms_norm_reference(x, weight, 1e-5, residual)[0]),
        num_bytes=4 * 2.0 * x.numel(),
    )
    gate_up = torch.randn((rows, 2 * INTERMEDIATE), **bf16)
    yield KernelCase(
        "silu_and_mul",
        f"{rows} x 2 x {INTERMEDIATE}",
        lambda: silu_and_mul(gate_up),
        lambda out: relative_error(out, silu_and_mul_reference(gate_up)),
        num_bytes=3.0 * gate_up.numel(),
    )
    yield from store_cases(rows)


def store_cases(rows: int) -> Iterator[KernelCase]:
    """Rotation fused with storing K and V at shuffled slots."""
    head_dim = HIDDEN // NUM_HEADS
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim
    qkv = torch.randn((rows, width), dtype=torch.bfloat16, device="cuda")
    tables = rotary_tables(head_dim, 8192, 5e5).cuda()
    positions = torch.randint(0, 8192, (rows,), device="cuda")
    shape = (rows // BLOCK_SIZE + 1, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    pool = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(shape[0] * BLOCK_SIZE, device="cuda")[:rows]

    def error(query: Tensor) -> float:
        expected_pool = torch.full_like(pool, torch.nan)
        caches = expected_pool[:, 1, 0], expected_pool[:, 1, 1]
        expected = rotary_kv_store_reference(qkv, positions, tables, *caches, slots, NUM_HEADS)
        if not torch.equal(pool.isnan(), expected_pool.isnan()):
            return float("inf")
        return max(relative_error(query, expected), relative_error(pool.nan_to_num(), expected_pool.nan_to_num()))

    yield KernelCase(
        "rotary_kv_store",
        f"{rows} x {NUM_HEADS}+2x{NUM_KV_HEADS} heads",
        lambda: rotary_kv_store(qkv, positions, tables, pool[:, 1, 0], pool[:, 1, 1], slots, NUM_HEADS),
        error,
        num_bytes=2 * 2.0 * qkv.numel(),
    )


def copy_cases(num_ids: int) -> Iterator[KernelCase]:
    """Whole blocks of 32 layers, 2 MiB each, at shuffled places."""
    shape = (num_ids * 2, 32, 2, NUM_KV_HEADS, BLOCK_SIZE, HIDDEN // NUM_HEADS)
    pool = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
    ids = torch.randperm(num_ids * 2, device="cuda")[:num_ids]
    buffer = kv_pack_reference(pool, ids)
    out = torch.full_like(buffer, 255)
    target = torch.zeros_like(pool)
    yield KernelCase(
        "kv_pack",
        f"{num_ids} blocks of 2 MiB",
        lambda: kv_pack(pool, ids, out),
        lambda packed: 0.0 if torch.equal(packed, buffer) else float("inf"),
        num_bytes=2.0 * buffer.numel(),
        peers={"torch index": lambda: lambda: pool[ids]},
    )
    yield KernelCase(
        "kv_unpack",
        f"{num_ids} blocks of 2 MiB",
        lambda: kv_unpack(buffer, target, ids),
        lambda _: 0.0 if torch.equal(target[ids], pool[ids]) else float("inf"),
        num_bytes=2.0 * buffer.numel(),
    )


def matmul_cases(rows: int) -> Iterator[KernelCase]:
    """The four products of a layer, in the batch-invariant form beside torch's own."""
    for out_features, in_features in (
        (6144, HIDDEN),
        (HIDDEN, HIDDEN),
        (2 * INTERMEDIATE, HIDDEN),
        (HIDDEN, INTERMEDIATE),
    ):
        x = torch.randn((rows, in_features), dtype=torch.bfloat16, device="cuda")
        weight = torch.randn((out_features, in_features), dtype=torch.bfloat16, device="cuda")
        flops = 2.0 * rows * out_features * in_features
        bounds = (0.0, 2.0 * weight.numel()) if rows <= 64 else (flops, 0.0)
        yield KernelCase(
            "batch_invariant_matmul",
            f"{rows} x {in_features} x {out_features}",
            partial(batch_invariant_matmul, x, weight),
            partial(_matmul_error, x, weight),
            LIMIT,
            *bounds,
            {"torch linear": partial(_constant, partial(functional.linear, x, weight))},
        )


def _matmul_error(x: Tensor, weight: Tensor, out: Tensor) -> float:
    return relative_error(out, batch_invariant_matmul_reference(x, weight))


def _constant(peer: Peer) -> Peer:
    return peer


def sample_cases(batch: int) -> Iterator[KernelCase]:
    """Sampling with every kind of truncation; the check counts rows with another token than the specification's."""
    logits = (torch.randn((batch, VOCABULARY), device="cuda") * 3).bfloat16()
    for name, top_k, top_p in (("greedy", 0, 1.0), ("plain", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
        temperature = torch.full((batch,), 0.0 if name == "greedy" else 0.8, device="cuda")
        given = Controls.neutral(batch, "cuda")._replace(
            temperature=temperature,
            top_k=torch.full((batch,), top_k, dtype=torch.int32, device="cuda"),
            top_p=torch.full((batch,), top_p, device="cuda"),
            seed=torch.arange(batch, device="cuda"),
        )
        yield KernelCase(
            "sample",
            f"{batch} x {VOCABULARY}, {name}",
            partial(_sampled, logits, given),
            partial(_sampling_error, logits, given),
            limit=0.02,
            num_bytes=2.0 * logits.numel(),
        )


def _sampled(logits: Tensor, given: Controls) -> Tensor:
    return sample(logits, given).token_ids


def _sampling_error(logits: Tensor, given: Controls, tokens: Tensor) -> float:
    """Share of rows with another token than the specification's: filters may cut elsewhere by a rounding."""
    wrong = 0
    for row, token in enumerate(tokens.tolist()):
        controls: list[Any] = [column[row].item() for column in given]
        wrong += token != sample_row(adjusted_row(logits, row, None, None), *controls)
    return wrong / len(tokens)
