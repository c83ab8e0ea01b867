"""Builds a worker's engine from a model and sizes."""

import logging
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from engine.core.block_pool import BlockPool
from engine.core.errors import StartupError
from engine.core.eviction.policies import make_queue
from engine.core.scheduler import SchedulerLimits
from engine.core.settings import GIB, EngineSettings, Quantization
from engine.core.tenants import quotas
from engine.model.config import ModelConfig
from engine.model.cuda import CudaGraphs
from engine.model.cuda_kv_pool import CudaKVPool
from engine.model.cuda_runner import CudaRunner, graph_shapes
from engine.model.decoder import Decoder
from engine.model.engine import Engine
from engine.model.kv_pool import KVPool
from engine.model.runner import ModelRunner, NullRunner, Runner
from engine.model.sources import NULL, resolve_model
from engine.model.swap_space import SwapSpace
from engine.model.weights import fingerprint
from kernels.cpp import cpu_ops

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def prepare(engines: Iterable[EngineSettings], progress: Callable[[str], None]) -> None:
    """Do beforehand, once and with somebody watching, what every worker would otherwise do when it starts: find the
    model (fetch or convert it), check that each engine's pool suits it, build the CPU kernels.

    Raises:
        StartupError: as `build_engine`.
    """
    for settings in engines:
        progress("looking at the model")
        pool_blocks(ModelConfig.from_folder(resolve_model(settings.source, progress)), settings)
    progress("building the CPU kernels, once per machine")
    cpu_ops()


def build_engine(settings: EngineSettings, swap_space: SwapSpace | None = None) -> Engine:
    """Load the model, lay out the KV pool and put the engine together.

    Raises:
        StartupError: the model cannot be found or used, or the pool cannot hold one longest request.
    """
    folder = resolve_model(settings.source)
    dtype, quantization = DTYPES[settings.dtype], settings.quantization
    device = torch.device(_device(settings))
    config = ModelConfig.from_folder(folder)
    max_model_len = model_len(config, settings.max_model_len)
    num_blocks = pool_blocks(config, settings)
    shares = quotas(settings.tenants, num_blocks)
    kv_pool = make_pool(config, num_blocks, settings.block_size, dtype, device)
    runner: Runner = NullRunner()
    if not settings.source.startswith(NULL):
        decoder = Decoder.from_folder(
            folder, dtype, device, max_model_len, quantization, deterministic=settings.deterministic
        )
        runner = make_runner(decoder, kv_pool, settings.limits)
    return Engine(
        runner,
        kv_pool,
        BlockPool(num_blocks, settings.block_size, make_queue(settings.eviction, shares)),
        settings.limits,
        max_model_len,
        kv_fingerprint(settings.source, folder, dtype, quantization, settings.deterministic, settings.block_size),
        swap_space,
        settings.swap_bytes,
    )


def make_pool(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """The KV pool for the device."""
    kind = CudaKVPool if device.type == "cuda" else KVPool
    return kind(config, num_blocks, block_size, dtype, device)


def make_runner(decoder: Decoder, kv_pool: KVPool, limits: SchedulerLimits) -> ModelRunner:
    """The runner for the device; on a GPU warm, and with the graphs that steps within `limits` may take."""
    if decoder.device.type != "cuda":
        return ModelRunner(decoder, kv_pool)
    shapes = graph_shapes(limits.max_requests, decoder.max_position, kv_pool.block_size)
    runner = CudaRunner(decoder, kv_pool, shapes, CudaGraphs(decoder.device))
    runner.warm_up(limits.token_budget)
    return runner


def pool_blocks(config: ModelConfig, settings: EngineSettings) -> int:
    """Blocks of the KV pool, as configured or as many as its memory holds.

    Raises:
        StartupError: one request of the greatest length would not fit.
    """
    block_bytes = kv_block_bytes(config, settings.block_size, DTYPES[settings.dtype])
    num_blocks = settings.num_blocks or int(settings.pool_gib * GIB) // block_bytes
    max_model_len = model_len(config, settings.max_model_len)
    if num_blocks * settings.block_size < max_model_len:
        needed_gib = max_model_len / settings.block_size * block_bytes / GIB
        raise StartupError(
            f"a KV pool of {num_blocks} blocks holds {num_blocks * settings.block_size} tokens, but one request may "
            f"have {max_model_len}: raise cache.pool_gib to {needed_gib:.2f} or lower model.max_model_len"
        )
    return num_blocks


def model_len(config: ModelConfig, wanted: int | None) -> int:
    """The longest request in tokens: the model's context, or less if so configured.

    Raises:
        StartupError: more is wanted than the model can do.
    """
    if wanted is not None and wanted > config.max_position:
        raise StartupError(f"model.max_model_len is {wanted}, but the model's context has {config.max_position} tokens")
    return wanted or config.max_position


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize


def kv_fingerprint(
    source: str,
    folder: Path,
    dtype: torch.dtype,
    quantization: Quantization | None,
    deterministic: bool,
    block_size: int,
) -> str:
    """What KV depends on: the model, what its weights are rounded to, whether it is run at all and by which products,
    its dtype, the layout of a block, and the version of what computes it, which matters where KV outlives a process."""
    products = f"{quantization or 'computed'}{'-deterministic' if deterministic else ''}"
    runs = "" if source.startswith(NULL) else products
    return f"{fingerprint(folder, dtype)}/{block_size}/{runs}/{version('raydix')}"


def _device(settings: EngineSettings) -> str:
    if settings.device == "auto":  # quantised products are fast on CPUs only
        return "cuda" if torch.cuda.is_available() and settings.quantization is None else "cpu"
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("workers.*.device is cuda, but torch sees no GPU here")
    return settings.device
