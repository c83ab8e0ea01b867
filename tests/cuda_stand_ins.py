"""What stands in for CUDA at `raydix.engine.model.cuda`'s borders: the same promises, kept by a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor


class Repetition:
    """A graph is its work, done again on the same memory. Like a graph's, its result is one tensor for all times."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = work().clone()

        def replay() -> Tensor:
            self.num_replays += 1
            return output.copy_(work())

        return replay

    def wait(self) -> None:
        pass


class LateCopies:
    """Copies as late as a device may: when somebody waits. `log` has the order of what was asked."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.log: list[str] = []
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._num_done = 0

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def computed(self) -> Callable[[], None]:
        return lambda: self.log.append("after the computation")

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self.log.append("copy")
        self._queued.append((target, source))
        count = len(self._queued)
        return lambda: self._do(count)

    def finish_before_computing(self) -> None:
        self.log.append("before the computation")
        self._do(len(self._queued))

    def _do(self, count: int) -> None:
        for target, source in self._queued[self._num_done : count]:
            target.copy_(source)
        self._num_done = max(self._num_done, count)
