"""A whole Llama-3-8B on a GPU for `benchmarks.kernels`: random weights in the real shapes, the engine's own runner.

A step is timed as an engine runs it, from the scheduled chunks to the sampled tokens on the host, by the clock on the
wall. Decoding is bound by reading every weight and the KV once, prefill by the arithmetic of its rows.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cases import (
    BLOCK_SIZE,
    HIDDEN,
    INTERMEDIATE,
    NUM_HEADS,
    NUM_KV_HEADS,
    VOCABULARY,
    KernelCase,
    relative_error,
)
from raydix.engine.core.hashing import BlockChain, root_hash
from raydix.engine.core.types import Assignment, Sampling, Stage
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk, SchedulerOutput
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.cuda import CudaGraphs
from raydix.engine.model.cuda_kv_pool import CudaKVPool
from raydix.engine.model.cuda_runner import CudaRunner, graph_rows
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.families import config_of
from raydix.engine.model.runner import ModelRunner
from raydix.engine.model.weights import RandomTensors

NUM_LAYERS = 32
DECODES = ((1, 1024), (64, 1024), (256, 512))  # sequences of a decoding step, and tokens of each
PROMPT = 8192
# Relative norm of the difference that another order of summation makes to what logits are made of, after all layers.
LIMIT = 5e-2


def model_cases(quick: bool) -> Iterator[KernelCase]:
    """Decoding with graphs and without, and prefill; each in the fast and in the deterministic mode."""
    config = llama(4 if quick else NUM_LAYERS)
    device = torch.device("cuda")
    num_blocks = max(PROMPT, *(batch * context for batch, context in DECODES)) // BLOCK_SIZE
    pool = CudaKVPool(config=config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=device)
    pool.data.normal_()
    for deterministic in (False, True):
        weights = RandomTensors(config, device="cuda")
        decoder = Decoder(config, weights, torch.bfloat16, device, deterministic=deterministic)
        yield from _cases(decoder, pool, ", deterministic" if deterministic else "")


def llama(num_layers: int) -> ModelConfig:
    """Llama-3-8B, or the beginning of one."""
    return config_of(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": num_layers,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "max_position_embeddings": PROMPT,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
        }
    )


def decode_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes read by a step in bfloat16: all weights but the embedding, and the KV of every sequence."""
    weights = config.num_layers * sum(layer_weights(config)) + config.vocab_size * config.hidden_size
    kv = batch * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return 2.0 * (weights + kv)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Arithmetic of a prompt up to its last token's logits: of the last layer little more than keys and values."""
    qkv, rest = layer_weights(config)
    products = config.num_layers * qkv + (config.num_layers - 1) * rest
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = (config.num_layers - 1) * 4.0 * config.num_heads * config.head_dim * pairs
    return 2.0 * num_tokens * products + attention


def layer_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights of a layer: of query, key and value, and of the other products."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = config.hidden_size * (query + 2 * kv)
    return qkv, config.hidden_size * (query + 3 * config.intermediate_size)


def decodes(batch: int, context: int) -> tuple[ScheduledChunk, ...]:
    """The newest token of each of `batch` sequences of `context` tokens, in blocks of their own."""
    return tuple(ScheduledChunk(_request(index, context), context - 1, 1, 0, samples=True) for index in range(batch))


def prefills(num_tokens: int, chunk: int) -> list[ScheduledChunk]:
    """A prompt in chunks; the last one samples."""
    request = _request(0, num_tokens)
    return [
        ScheduledChunk(request, start, min(chunk, num_tokens - start), 0, samples=start + chunk >= num_tokens)
        for start in range(0, num_tokens, chunk)
    ]


def _request(index: int, num_tokens: int) -> Request:
    token_ids = tuple((7919 * (index + 1) * position) % VOCABULARY for position in range(num_tokens))
    sampling = Sampling(max_tokens=1)
    assignment = Assignment(
        request_id=str(index),
        attempt=0,
        stage=Stage.WHOLE,
        token_ids=token_ids,
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        reply_to="benchmark",
    )
    chain = BlockChain(root_hash("benchmark"), assignment.salt, BLOCK_SIZE)
    request = Request(assignment, chain, arrival=index)
    blocks = -(-num_tokens // BLOCK_SIZE)
    request.blocks += range(index * blocks, (index + 1) * blocks)
    return request


def _cases(decoder: Decoder, pool: CudaKVPool, mode: str) -> Iterator[KernelCase]:
    config = decoder.config
    eager = ModelRunner(decoder, pool)
    rows = graph_rows(max(batch for batch, _ in DECODES))
    runner = CudaRunner(decoder, pool, rows, CudaGraphs(decoder.device))

    for batch, context in DECODES:
        chunks = decodes(batch, context)
        for name, used in (("model decode", runner), ("model decode, no graph", eager)):
            yield KernelCase(
                name + mode,
                f"{batch} x 1 of {context}, {config.num_layers} layers",
                partial(used.run, SchedulerOutput(chunks, ())),
                partial(_difference, runner, [chunks], eager, [chunks]),
                limit=0.0,
                num_bytes=decode_bytes(config, batch, context),
                returns_when_done=True,
            )

    [whole], parts = prefills(PROMPT, PROMPT), prefills(PROMPT, PROMPT // 4)
    yield KernelCase(
        "model prefill" + mode,
        f"1 x {PROMPT}, {config.num_layers} layers",
        partial(runner.run, SchedulerOutput((whole,), ())),
        partial(_difference, runner, [(whole,)], eager, [(part,) for part in parts]),
        limit=0.0 if decoder.deterministic else LIMIT,
        flops=prefill_flops(config, PROMPT),
        returns_when_done=True,
    )


Steps = Sequence[Sequence[ScheduledChunk]]


def _difference(runner: ModelRunner, steps: Steps, other: ModelRunner, other_steps: Steps, _: object) -> float:
    """Relative difference of the rows for the last step's logits, computed in two ways."""
    return relative_error(_last(runner, steps), _last(other, other_steps))


def _last(runner: ModelRunner, steps: Steps) -> Tensor:
    with torch.inference_mode():
        return [runner.hidden(chunks) for chunks in steps][-1].clone()
