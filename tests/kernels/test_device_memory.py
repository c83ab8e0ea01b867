"""A worker's memory on GPUs that are not here: a device that counts bytes, under the code that sizes and fills a GPU.

Tensors are torch's meta tensors, which have a size and no content, and kernels are recorded and not run. What the
device counts is what torch's allocator would hold: the weights, the pool, the graphs, and what each step makes.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raydix.cli.serve import chosen, fitting
from raydix.cli.sizing import sized
from raydix.configs.choose import Machine
from raydix.configs.settings import engine_settings
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import GIB, EngineSettings
from raydix.engine.core.types import Sampling
from raydix.engine.core.worker.step import SchedulerOutput
from raydix.engine.model import build, sampler
from raydix.engine.model.build import make_pool, make_runner, pool_sizes
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.cuda_kv_pool import CudaKVPool
from raydix.engine.model.cuda_runner import CudaRunner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.runner import made_up_step
from raydix.engine.model.sizes import expected_shapes, weight_bytes
from tests.cuda_stand_ins import LateCopies
from tests.kernels.ahead_of_time import Launch, recorded
from tests.kernels.interpreter import INTERPRETING
from tests.kernels.triton_engine import take_triton_kernels
from tests.unit.test_sizing import model

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")

META = torch.device("meta")
CONTEXT_BYTES = GIB // 2
"""What CUDA's context and the loaded kernels take beside torch."""
GRAPH_BYTES = 16 << 20
"""What the driver takes for one recorded graph of a few hundred launches, generously."""
SMALL, SEGMENT = 512, 2 << 20
"""torch's allocator rounds small tensors to the first, and those of 1 MiB and more to the second."""
CARDS = {24: 23.5, 48: 47.4, 80: 79.1, 141: 139.8}
"""By the name of their size in GB, GiB as cards report them."""
GEMMA = {"query_pre_attn_scalar": 256, "sliding_window": 4096}
MODELS = {
    "SmolLM2-135M": model("llama", (49_152, 576, 1536, 30, 9, 3, 64), 8192, True),
    "Llama-3.2-1B": model("llama", (128_256, 2048, 8192, 16, 32, 8, 64), 131_072, True),
    "Qwen3-4B": model("qwen3", (151_936, 2560, 9728, 36, 32, 8, 128), 40_960, True),
    "Phi-3-mini": model("phi3", (32_064, 3072, 8192, 32, 32, 32, 96), 4096, False),
    "Llama-3.1-8B": model("llama", (128_256, 4096, 14_336, 32, 32, 8, 128), 131_072, False),
    "Gemma-2-9B": model("gemma2", (256_000, 3584, 14_336, 42, 16, 8, 256), 8192, True, **GEMMA),
    "Qwen2.5-14B": model("qwen2", (152_064, 5120, 13_824, 48, 40, 8, 128), 32_768, False),
    "Qwen3-32B": model("qwen3", (151_936, 5120, 25_600, 64, 64, 8, 128), 40_960, False),
}


class Shapes:
    """Weights without content."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_shapes(config)

    def grouped(self, name: str) -> None:
        return None

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16, device=META)


class CountingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device of so many bytes: counts the storages that live, and what is kept of those that do not."""

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total = total
        self._sizes: dict[int, int] = {}
        self.launches: list[Launch] = []
        self.num_launches = 0
        self.live = self.kept = self.highest = self.of_graphs = self.of_driver = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_launches += len(self.launches)
        self.launches.clear()  # a recorded launch would keep its tensors
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device == META:
                self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        unit = SEGMENT if storage.nbytes() >= 1 << 20 else SMALL
        size = -(-storage.nbytes() // unit) * unit
        self._sizes[storage._cdata] = size
        weakref.finalize(storage, self._drop, storage._cdata)
        self.live += size
        self.highest, self.kept = max(self.highest, self.live), max(self.kept, self.live)
        assert self.used() <= self._total, f"out of memory: {self.used() / GIB:.2f} GiB"

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def used(self) -> int:
        """All that is taken on the device."""
        return CONTEXT_BYTES + self.of_driver + self.of_graphs + self.kept

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """As of a graph what its work makes is kept, of all graphs together as much as the largest makes."""
        before, highest, kept = self.live, self.highest, self.kept
        self.highest = self.live
        output = work()
        self.of_graphs = max(self.of_graphs, self.highest - before)
        self.of_driver += GRAPH_BYTES
        self.highest, self.kept = max(highest, self.live), max(kept, self.live)
        return lambda: output

    def wait(self) -> None:
        pass

    # As `DeviceMemory`.

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self.used()

    def reserved(self) -> int:
        return self.kept

    def peak(self) -> int:
        return self.highest

    def begin(self) -> None:
        self.kept = self.highest = self.live

    def release(self) -> None:
        self.kept = self.live


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], "CountingDevice"]:
    """Has the engine's builder take devices that count; returns what makes one of so many bytes."""

    def make(total: int) -> CountingDevice:
        device = CountingDevice(total)
        monkeypatch.setattr(build, "CudaMemory", lambda _: device)
        monkeypatch.setattr(build, "CudaGraphs", lambda _: device)
        return device

    take_triton_kernels(monkeypatch)
    monkeypatch.setattr(build, "CudaKVPool", partial(CudaKVPool, queues=LateCopies))
    monkeypatch.setattr(sampler, "download", lambda tensors: [torch.zeros(t.shape, dtype=t.dtype) for t in tensors])
    return make


def fitted(found: ModelConfig, card: int) -> tuple[EngineSettings, int]:
    """The engine that `raydix serve` starts for a model on a machine with such a card, and its longest request."""
    machine = Machine(16, 256, (CARDS[card],), free_gib=250)
    choice, config = chosen((), {}, machine, options=Namespace())
    _, config, sizes = fitting(choice, config, found, machine)
    mixed = sized(config, sizes).workers.mixed
    assert mixed is not None
    return engine_settings(sized(config, sizes), mixed), sizes.max_model_len


def steps(settings: EngineSettings, longest: int) -> Iterator[SchedulerOutput]:
    """The steps that take most: a whole budget, with a row sampled; a chunk among as many decodes as there may be, each
    with a ranking; and only those."""
    limits, size = settings.limits, settings.block_size
    ranked = Sampling(max_tokens=1, logprobs=20, presence_penalty=1.0, top_p=0.9)
    yield made_up_step([min(limits.token_budget, longest)], size, ranked)
    most = min(limits.max_requests, longest // 2)
    rest = min(limits.token_budget - most + 1, longest)
    yield made_up_step([*[1] * (most - 1), rest], size, ranked)
    yield made_up_step([1] * most, size, ranked)
    yield made_up_step([1], size, ranked, start=longest - 1)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_card_is_filled_and_never_over(name: str, card: int, stood_in: Callable[[int], CountingDevice]) -> None:
    found = MODELS[name]
    try:
        settings, longest = fitted(found, card)
    except StartupError:
        assert weight_bytes(found, "bfloat16", None, on_gpu=True) > 0.8 * CARDS[card] * GIB, "weights that fit run"
        return
    device = stood_in(int(CARDS[card] * GIB))
    with recorded(90) as device.launches, device:
        decoder = Decoder(found, Shapes(found), torch.bfloat16, META, longest, deterministic=True)
        identity: Any = Namespace(vocab_size=decoder.vocab_size)
        num_blocks, _ = pool_sizes(found, settings, lambda: build._free_bytes(decoder, settings, identity))
        pool = make_pool(found, num_blocks, settings.block_size, torch.bfloat16, META)
        runner = make_runner(decoder, pool, settings.limits, drafts=settings.drafts)
        assert isinstance(runner, CudaRunner)
        for step in steps(settings, longest):
            runner.run(step)
    assert device.num_launches > 5 * found.num_layers * len(runner.rows), "kernels were asked for"
    share = device.used() / device.total()
    held = num_blocks * settings.block_size
    print(f"| {name} | {card} | {longest:,} | {held:,} | {share:.1%} |")
    assert 0.85 <= share <= 1.0 and held >= longest
