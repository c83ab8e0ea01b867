"""Sizes for a model on one machine: the KV pool of its workers, and the longest request.

All is computed from the model's description before its weights are fetched. On a CPU: what is free, less Ray's object
store, the processes of the server, and each worker's weights and one step's results, is shared by the workers; a pool
takes half of its worker's share, and up to four fifths where one longest request needs more. On a GPU each worker
measures its own pool when its weights are loaded (`raydix.engine.model.device_memory`); here only the longest request
is computed, from somewhat less than the worker will find. A number in the configuration stands.
"""

from dataclasses import dataclass
from math import floor

from raydix.cli.cluster import STORE_RESERVE_GIB
from raydix.configs import Config
from raydix.configs.choose import Machine
from raydix.configs.pools import WorkerSection
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import GIB
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.identity import model_len
from raydix.engine.model.sizes import (
    kv_block_bytes,
    num_states,
    pool_bytes_for,
    state_bytes,
    step_bytes,
    weight_bytes,
)

# Memory of Ray's processes, Serve's controller and HAProxy, the manager with its standby, and the command itself.
SERVER_GIB = 1.5
INGRESS_GIB = 0.75  # memory of an ingress replica and its readers
WORKER_GIB = 0.75  # memory of a worker besides the model, and of its host
# Shares of a worker's free memory that its pool takes, and may take for one longest request. The rest is the machine's:
# page cache, peaks while weights are laid out, other programs.
POOL_SHARE, MOST_SHARE = 0.5, 0.8
# Share of a GPU's memory that is counted on, below what a worker may take (`raydix.engine.model.device_memory.SHARE`).
GPU_SHARE = 0.85
GPU_CONTEXT_GIB = 0.75  # memory of CUDA's context and of graphs
# Tokens below which a longest request is too short to be worth starting, unless the model's own context is shorter.
LEAST_LEN = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one configuration with one model."""

    max_model_len: int
    pool_gib: float | None
    """None: as configured, or measured by workers on GPUs."""
    weights_gib: float


def size_up(config: Config, model: ModelConfig, machine: Machine) -> Sizes:
    """Compute the sizes of `config` for a model.

    Raises:
        StartupError: nothing of use fits, or a configured number does not; says what would.
    """
    if model.cpu_only is not None and any(
        runs_on_gpu(config, each, machine) for each in config.workers.sections.values()
    ):
        raise StartupError(
            f"{model.architecture} has {model.cpu_only}, which run on CPUs only: set workers.*.device to cpu, or take "
            "another model"
        )
    if config.model.adapters:
        model.check_takes_adapters()
    block_bytes = kv_block_bytes(model, config.cache.block_size, config.kv_dtype)
    rooms = {role: _room_gib(config, section, model, machine) for role, section in config.workers.sections.items()}
    weights_gib = max(_weights_gib(config, section, model, machine) for section in config.workers.sections.values())
    on_cpu = [role for role, section in config.workers.sections.items() if not runs_on_gpu(config, section, machine)]

    # A configured pool stands, however much is free.
    configured = config.cache.num_blocks
    if configured is None and config.cache.pool_gib is not None:
        configured = _tokens(_kv_gib(config, model, config.cache.pool_gib), block_bytes, 1)
    if configured is None:
        shares = {role: MOST_SHARE if role in on_cpu else 1.0 for role in rooms}
        # A request may need every role, so the worker with the least room decides.
        most_len = min(
            _tokens(_kv_gib(config, model, rooms[role] * shares[role]), block_bytes, config.cache.block_size)
            for role in rooms
        )
    else:
        most_len = configured * config.cache.block_size

    wanted = config.model.max_model_len
    model_len(model, wanted)  # refuses more than the model's context
    # Somebody who names a length wants that one; otherwise any useful one will do.
    least = wanted or min(LEAST_LEN, model.max_position)
    if most_len < least:
        raise StartupError(_refusal(config, model, machine, rooms=rooms, most_len=most_len, least=least))
    max_model_len = wanted or min(model.max_position, most_len)

    pool_gib = None
    if configured is None and on_cpu:
        # Rounded up: a longest request fills a part of its last block.
        blocks = -(-max_model_len // config.cache.block_size)
        half = min(rooms[role] for role in on_cpu) * POOL_SHARE
        pool_gib = max(half, pool_bytes_for(model, blocks * block_bytes) / GIB)
    return Sizes(max_model_len, pool_gib, weights_gib)


def sized(config: Config, sizes: Sizes) -> Config:
    """The configuration with these sizes as its numbers, which every process of the server gets."""
    model = config.model.model_copy(update={"max_model_len": sizes.max_model_len})
    cache = config.cache
    if sizes.pool_gib is not None:
        cache = cache.model_copy(update={"pool_gib": sizes.pool_gib})
    return config.model_copy(update={"model": model, "cache": cache})


def described(config: Config, sizes: Sizes, model: ModelConfig, machine: Machine) -> str:
    """A line for the start: what was chosen, and why."""
    if sizes.pool_gib is None:
        given = config.cache.num_blocks is not None or config.cache.pool_gib is not None
        pool = "a KV pool as configured" if given else "a KV pool of what is free on the GPU"
    else:
        block_bytes = kv_block_bytes(model, config.cache.block_size, config.kv_dtype)
        tokens = _tokens(_kv_gib(config, model, sizes.pool_gib), block_bytes, config.cache.block_size)
        states = _num_states(config, model, sizes.pool_gib)
        holds = f"{tokens:,} tokens" + (f", {states} recurrent states" if states else "")
        pool = f"a KV pool of {sizes.pool_gib:.2f} GiB ({holds})"
    longest = f"requests of up to {sizes.max_model_len:,} tokens"
    if sizes.max_model_len < model.max_position:
        why = "as configured" if config.model.max_model_len is not None else "as many as the memory holds"
        longest += f", {why}; the model's context has {model.max_position:,}"
    return f"each worker: {sizes.weights_gib:.2f} GiB of weights and {pool}, {_free(machine)}; {longest}"


def runs_on_gpu(config: Config, section: WorkerSection, machine: Machine) -> bool:
    """True if the workers of a section will compute on a GPU."""
    if section.device == "auto":
        return bool(machine.large_gpus_gib) and config.model.quantization is None and config.cache.kv_dtype is None
    return section.device == "cuda"


def _num_states(config: Config, model: ModelConfig, pool_gib: float) -> int:
    """Recurrent states that a pool keeps beside its KV."""
    most = max(section.max_requests for section in config.workers.sections.values())
    return num_states(model, max(0, int(pool_gib * GIB)), most)


def _kv_gib(config: Config, model: ModelConfig, pool_gib: float) -> float:
    """What a pool has for keys and values beside recurrent states, in GiB."""
    return pool_gib - _num_states(config, model, pool_gib) * state_bytes(model) / GIB


def _tokens(gib: float, block_bytes: int, block_size: int) -> int:
    """Tokens whose KV so much memory holds; none where it is negative."""
    return max(0, floor(gib * GIB)) // block_bytes * block_size


def _room_gib(config: Config, section: WorkerSection, model: ModelConfig, machine: Machine) -> float:
    """Memory that the pool of one worker of a section could have, in GiB; negative if not even its weights fit."""
    sections = config.workers.sections.values()
    own_gib = _weights_gib(config, section, model, machine)
    own_gib += step_bytes(model, section.token_budget, section.max_requests) / GIB
    if runs_on_gpu(config, section, machine):
        share = min(1.0, section.num_gpus or 1.0)
        return GPU_SHARE * share * min(machine.large_gpus_gib, default=0.0) - GPU_CONTEXT_GIB - own_gib

    free_gib = machine.memory_gib if machine.free_gib is None else machine.free_gib
    # As many as may ever run: elastic workers start later, when nobody sizes up anew.
    num_workers = sum(each.numbers.most for each in sections)
    fixed_gib = SERVER_GIB + config.ingress.replicas * INGRESS_GIB + config.stored_gib + STORE_RESERVE_GIB
    worker_gib = WORKER_GIB + config.speculation.memory_mib / 1024
    num_on_cpu = sum(each.numbers.most for each in sections if not runs_on_gpu(config, each, machine))
    return (free_gib - fixed_gib - num_workers * worker_gib) / num_on_cpu - own_gib


def _weights_gib(config: Config, section: WorkerSection, model: ModelConfig, machine: Machine) -> float:
    on_gpu = runs_on_gpu(config, section, machine)
    return weight_bytes(model, config.model.dtype, config.model.quantization, on_gpu=on_gpu) / GIB


def _refusal(
    config: Config, model: ModelConfig, machine: Machine, *, rooms: dict[str, float], most_len: int, least: int
) -> str:
    """Say what does not fit, and what would."""
    block_size = config.cache.block_size
    kv_needed = -(-least // block_size) * kv_block_bytes(model, block_size, config.kv_dtype)
    needed_gib = pool_bytes_for(model, kv_needed) / GIB
    if config.cache.num_blocks is not None or config.cache.pool_gib is not None:
        return (
            f"the configured KV pool holds {most_len} tokens, but one request may have {least}: raise cache.pool_gib "
            f"to {needed_gib:.2f}, or leave it out, or lower model.max_model_len"
        )
    # The worker that lacks most: if it fits, the others do.
    role = min(rooms, key=lambda each: rooms[each])
    section = config.workers.sections[role]
    weights_gib = _weights_gib(config, section, model, machine)
    reason = (
        f"the model does not fit: a {role} worker needs {weights_gib:.1f} GiB for its weights and {needed_gib:.2f} GiB "
        f"for the KV of {least} tokens, {_free(machine)}"
    )
    return f"{reason}; {', or '.join(_ways_out(config, model, machine, most_len))}"


def _ways_out(config: Config, model: ModelConfig, machine: Machine, most_len: int) -> list[str]:
    """Changes with which the model would run, each tried; or the advice to take a smaller one."""
    ways = []
    least = min(LEAST_LEN, model.max_position)
    if config.model.max_model_len is not None and most_len >= least:
        ways.append(f"model.max_model_len of at most {most_len} fits")
    on_cpus = all(not runs_on_gpu(config, section, machine) for section in config.workers.sections.values())
    if config.model.quantization is None and on_cpus:
        block_bytes = kv_block_bytes(model, config.cache.block_size, config.kv_dtype)
        for quantization in ("int8",) if model.stored_bits is None else ("stored", "int8"):
            less = config.model_copy(update={"model": config.model.model_copy(update={"quantization": quantization})})
            room = min(_room_gib(less, section, model, machine) for section in less.workers.sections.values())
            # Computed and not guessed: a way out that is named must work.
            tokens = _tokens(_kv_gib(config, model, MOST_SHARE * room), block_bytes, config.cache.block_size)
            tokens = min(tokens, model.max_position)
            if tokens >= least:
                ways.append(f"with model.quantization {quantization} requests of up to {tokens} tokens fit")
    return ways or ["take a smaller model, or a machine with more memory"]


def _free(machine: Machine) -> str:
    if machine.large_gpus_gib:
        return f"of {min(machine.large_gpus_gib):.0f} GiB of GPU memory"
    free_gib = machine.memory_gib if machine.free_gib is None else machine.free_gib
    return f"of {free_gib:.1f} GiB of free memory"
