"""Builds a worker's engine from a model and sizes."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import GIB, DraftLimits, EngineSettings, SchedulerLimits
from raydix.engine.core.types import Sampling
from raydix.engine.core.worker.block_pool import pool_of
from raydix.engine.core.worker.drafts.draft import MAX_TOKENS as MAX_DRAFT_TOKENS
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.states import States
from raydix.engine.model.adapter_store import AdapterStore
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.cuda import CudaGraphs
from raydix.engine.model.cuda_kv_pool import CudaKVPool
from raydix.engine.model.cuda_runner import CudaRunner, graph_rows
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.device_memory import CudaMemory, measured_pool_bytes, unplanned_pool_bytes
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.identity import ModelIdentity, identify, model_len
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import ModelRunner, NullRunner, Runner, made_up_step
from raydix.engine.model.scripted import ScriptedRunner, read_script
from raydix.engine.model.sizes import (
    LOGITS_BYTES,
    SCORED_ROWS,
    kv_block_bytes,
    kv_bytes,
    num_states,
    pair_share,
    pool_bytes_for,
)
from raydix.engine.model.sources import SCRIPTED, computes_nothing
from raydix.engine.model.state_pool import StatePool
from raydix.engine.model.swap_space import SwapSpace
from raydix.engine.model.tokenizer import Tokenizer
from raydix.kernels.cpp import arithmetic

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)


def build_engine(
    settings: EngineSettings, swap_space: SwapSpace | None = None, on_tensor: Callable[[], None] = lambda: None
) -> Engine:
    """Load the model, lay out the KV pool and put the engine together. `on_tensor` is called before each tensor of the
    model; an error that it raises ends the loading.

    Raises:
        StartupError: the model cannot be found or used, or the pool cannot hold one longest request.
    """
    identity = _identity(settings)
    config, max_model_len = identity.config, identity.max_model_len
    dtype, device = torch_dtype(settings.dtype), torch.device(_device(settings))
    if settings.kv_dtype is not None and device.type == "cuda":
        raise StartupError(f"cache.dtype {settings.kv_dtype} is for CPUs, and this worker computes on a GPU")
    if settings.adapters:  # before the weights, which may take minutes
        config.check_takes_adapters()
    grammars = drafter = decoder = adapters = None
    if not computes_nothing(settings.source):
        decoder = Decoder.from_folder(
            identity.folder,
            dtype,
            device,
            max_model_len,
            settings.quantization,
            deterministic=settings.deterministic,
            vocab_size=identity.vocab_size,
            on_tensor=on_tensor,
        )
        grammars = make_grammars(identity.folder, identity.vocab_size)
        drafter = make_drafter(decoder, settings.drafts, grammars)
        adapters = AdapterStore(decoder)
        for name, folder in settings.adapters:
            adapters.load(name, folder)
    elif settings.source.startswith(SCRIPTED):
        grammars = make_grammars(identity.folder, identity.vocab_size)

    # The weights first: the pool has what they leave.
    num_blocks, num_slots = pool_sizes(config, settings, lambda: _free_bytes(decoder, settings, identity))
    kv_dtype = torch_dtype(settings.kv_dtype or settings.dtype)
    kv_pool = make_pool(config, num_blocks, settings.block_size, kv_dtype, device)
    runner: Runner = NullRunner(config.hidden_size)
    made_by = "null"
    states: States | None = None
    state_pool: StatePool | None = None
    if decoder is not None:
        if num_slots:  # a model that computes nothing needs no states
            states, state_pool = States(num_slots), StatePool(config, num_slots)
        runner = make_runner(decoder, kv_pool, settings.limits, grammars, settings.drafts, adapters, state_pool)
        made_by = arithmetic_of(device)
    elif grammars is not None:
        runner = ScriptedRunner(Tokenizer(identity.folder), read_script(identity.folder), grammars, config.hidden_size)
        made_by = "scripted"

    return Engine(
        runner=runner,
        store=kv_pool,
        pool=pool_of(settings, num_blocks, states),
        limits=settings.limits,
        max_model_len=max_model_len,
        fingerprint=f"{identity.fingerprint}/{made_by}",
        swap_space=swap_space,
        swap_bytes=settings.swap_bytes,
        grammars=grammars,
        drafter=drafter,
        tenants=settings.tenants,
        pair_share=pair_share(config),
        adapters=adapters,
        states=state_pool,
    )


def make_drafter(decoder: Decoder, limits: DraftLimits | None, grammars: Grammars | None = None) -> Drafter | None:
    """The drafter of a worker; None without limits, or where drafts might change an answer's bits."""
    if limits is None:
        return None
    if not decoder.has_independent_rows:
        hint = "; where model.deterministic is true they do not" if decoder.device.type == "cuda" else ""
        logger.info("no drafts: the bits of a row of this model here depend on the number of rows%s", hint)
        return None
    return Drafter(limits, grammars)


def make_grammars(folder: Path, vocab_size: int) -> Grammars:
    """The grammars of a model's worker; the library and the tokenizer are loaded later, in a thread."""

    def load() -> "LLTokenizer":
        from raydix.engine.model.grammar_tokenizer import load_tokenizer

        return load_tokenizer(folder, vocab_size)

    return Grammars(load, vocab_size)


def _identity(settings: EngineSettings) -> ModelIdentity:
    return identify(
        settings.source,
        dtype=settings.dtype,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        deterministic=settings.deterministic,
    )


def make_pool(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """The KV pool for the device."""
    kind = KVPool if device.type == "cpu" else CudaKVPool
    return kind(config, num_blocks, block_size, dtype, device)


def make_runner(
    decoder: Decoder,
    kv_pool: KVPool,
    limits: SchedulerLimits,
    grammars: Grammars | None = None,
    drafts: DraftLimits | None = None,
    adapters: AdapterStore | None = None,
    states: StatePool | None = None,
) -> ModelRunner:
    """The runner for the device; on a GPU warm, and with the graphs that steps within `limits`, with drafts within
    `drafts`, may take. `states`: of a model with recurrent layers."""
    if decoder.device.type == "cpu":
        return ModelRunner(decoder, kv_pool, grammars, adapters, states)
    max_drafted = 0
    if drafts is not None and decoder.has_independent_rows:
        max_drafted = min(MAX_DRAFT_TOKENS, limits.max_requests * drafts.depth)
    rows = graph_rows(limits.max_requests, max_drafted)
    runner = CudaRunner(decoder, kv_pool, rows, CudaGraphs(decoder.device), grammars=grammars, adapters=adapters)
    runner.warm_up(limits.token_budget)
    return runner


def pool_sizes(config: ModelConfig, settings: EngineSettings, free_bytes: Callable[[], int]) -> tuple[int, int]:
    """Blocks of the KV pool, and recurrent states beside it: as configured, or as many as its memory holds.
    `free_bytes`: measures the memory that the pool may have, where none is configured.

    Raises:
        StartupError: one request of the greatest length would not fit.
    """
    block_bytes, max_requests = (
        kv_block_bytes(config, settings.block_size, settings.kv_dtype or settings.dtype),
        settings.limits.max_requests,
    )
    num_blocks = settings.num_blocks
    if num_blocks is None:
        pool_bytes = max(0, free_bytes() if settings.pool_gib is None else int(settings.pool_gib * GIB))
        num_blocks = kv_bytes(config, pool_bytes, max_requests) // block_bytes
    else:
        pool_bytes = pool_bytes_for(config, num_blocks * block_bytes)
    num_slots = num_states(config, pool_bytes, max_requests)
    max_model_len = model_len(config, settings.max_model_len)
    num_held = num_blocks * settings.block_size
    if num_held < max_model_len or (config.recurrent is not None and num_slots < 2):
        needed_gib = pool_bytes_for(config, -(-max_model_len // settings.block_size) * block_bytes) / GIB
        way_out = "raise cache.pool_gib to" if settings.pool_gib is not None else "it needs a pool of"
        raise StartupError(
            f"a KV pool of {num_blocks} blocks holds {num_held} tokens, but one request may have {max_model_len}: "
            f"{way_out} {needed_gib:.2f} GiB" + (f", or set model.max_model_len to {num_held}" if num_held else "")
        )
    return num_blocks, num_slots


def _free_bytes(decoder: Decoder | None, settings: EngineSettings, identity: ModelIdentity) -> int:
    """Measure the memory that a pool may have beside the weights."""
    if decoder is None or decoder.device.type == "cpu":
        return unplanned_pool_bytes()
    rows = max(settings.limits.max_requests, SCORED_ROWS)
    logits_bytes = LOGITS_BYTES * rows * identity.vocab_size  # the step that is run samples one row
    run = partial(run_largest_step, decoder, settings)
    return measured_pool_bytes(CudaMemory(decoder.device), run, settings.device_share) - logits_bytes


def run_largest_step(decoder: Decoder, settings: EngineSettings) -> int:
    """Run a step of as many tokens as one may have, over a pool that is dropped; returns the bytes of the pool."""
    block_size = settings.block_size
    num_tokens = min(settings.limits.token_budget, decoder.max_position)
    pool = make_pool(decoder.config, -(-num_tokens // block_size), block_size, decoder.dtype, decoder.device)
    runner = ModelRunner(decoder, pool)
    if decoder.device.type != "cpu":  # with attention's memory, as the worker's own will have it
        runner = CudaRunner(decoder, pool, (), CudaGraphs(decoder.device))
    runner.run(made_up_step([num_tokens], block_size, Sampling(max_tokens=1, logprobs=1)))
    return pool.num_blocks * pool.block_bytes


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def arithmetic_of(device: torch.device) -> str:
    """Name the arithmetic that computes KV on a device. KV of different names may differ in its last bits."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda-{major}.{minor}"
    return f"cpu-{arithmetic()}"


def _device(settings: EngineSettings) -> str:
    if settings.device == "auto":  # what is quantised is computed on CPUs only
        is_quantized = settings.quantization is not None or settings.kv_dtype is not None
        return "cuda" if torch.cuda.is_available() and not is_quantized else "cpu"
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("workers.*.device is cuda, but torch sees no GPU here")
    return settings.device
