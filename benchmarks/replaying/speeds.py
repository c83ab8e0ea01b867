"""Speed of the pretended machine: at constant rates, or by the costs that a server has fitted to its workers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from random import Random
from typing import Literal, Protocol

from benchmarks.replaying.traces import ReplayError
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.placement import CostModel

# So many decodes make a step twice as long, the directory thinks; at constant rates they do not, but a choice between
# decode workers needs a reason.
DECODES_PER_STEP = 256
STEP_COSTS = ("step_s", "prefill_token_s", "decode_token_s", "pair_s")
# Costs that a file may leave out: a replay makes no drafts, and takes the weights of contexts from `pair_s` alone.
NOT_REPLAYED = ("draft_token_s", "pair_share")


class Speeds(Protocol):
    """The pretended machine: seconds of each kind of a worker's work."""

    @property
    def imports(self) -> bool:
        """True if a worker gets promised blocks from the pools of others; otherwise it computes them."""
        ...

    @property
    def token_budget(self) -> int: ...

    def prefill_s(self, num_tokens: int, num_cached: int, num_decodes: int) -> float:
        """Computing `num_tokens` positions after `num_cached`, beside `num_decodes` decodes."""
        ...

    def chunk_s(self, num_tokens: int, num_cached: int, num_decodes: int) -> float:
        """Seconds that a prefill adds to each decode step meanwhile."""
        ...

    def decode_step_s(self, num_decodes: int) -> float: ...

    def move_s(self, num_blocks: int) -> float:
        """Taking blocks from another worker."""
        ...

    def cost_model(self, block_size: int) -> tuple[CostModel, int]:
        """Costs that the directory uses, and the bytes of a block."""
        ...

    def slowed(self, factor: float) -> Speeds:
        """The same machine when everything but moving blocks takes `factor` times as long."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantSpeeds:
    """A prefill takes as long beside decodes as alone, and a decode step as long for many as for one."""

    prefill_tokens_per_s: float
    step_s: float
    """Step time of decodes, without prefill beside them."""
    token_budget: int
    handover_blocks_per_s: float
    imports: Literal[False] = False

    def prefill_s(self, num_tokens: int, num_cached: int, num_decodes: int) -> float:
        return num_tokens / self.prefill_tokens_per_s

    def chunk_s(self, num_tokens: int, num_cached: int, num_decodes: int) -> float:
        return self.token_budget / self.prefill_tokens_per_s

    def decode_step_s(self, num_decodes: int) -> float:
        return self.step_s

    def move_s(self, num_blocks: int) -> float:
        return num_blocks / self.handover_blocks_per_s

    def cost_model(self, block_size: int) -> tuple[CostModel, int]:
        """Imports between pools are not replayed: computing a block, which has one byte here, is cheaper, except beside
        many decodes."""
        token_s = 1 / self.prefill_tokens_per_s
        step_s = min(self.step_s, self.token_budget * token_s)
        costs = WorkerCosts(
            step_s=step_s,
            prefill_token_s=token_s - step_s / self.token_budget,
            decode_token_s=step_s / DECODES_PER_STEP,
            import_byte_s=2 * block_size * token_s,
            spread=0.0,
        )
        return CostModel(block_size, prior=costs), 1

    def slowed(self, factor: float) -> ConstantSpeeds:
        return replace(self, prefill_tokens_per_s=self.prefill_tokens_per_s / factor, step_s=self.step_s * factor)


@dataclass(frozen=True, slots=True)
class FittedSpeeds:
    """The sums of `raydix.engine.core.costs`, for the workers as for the directory."""

    costs: WorkerCosts
    token_budget: int
    block_bytes: int
    imports: Literal[True] = True

    def prefill_s(self, num_tokens: int, num_cached: int, num_decodes: int) -> float:
        return self.costs.prefill_s(num_tokens, num_cached, self.token_budget, num_decodes)

    def chunk_s(self, num_tokens: int, num_cached: int, num_decodes: int) -> float:
        num_steps = ceil(num_tokens / max(1, self.token_budget - num_decodes))
        return self.prefill_s(num_tokens, num_cached, num_decodes) / num_steps - self.costs.decode_step_s(num_decodes)

    def decode_step_s(self, num_decodes: int) -> float:
        return self.costs.decode_step_s(num_decodes)

    def move_s(self, num_blocks: int) -> float:
        return self.costs.import_all_s(num_blocks * self.block_bytes)

    def cost_model(self, block_size: int) -> tuple[CostModel, int]:
        return CostModel(block_size, prior=self.costs), self.block_bytes

    def slowed(self, factor: float) -> FittedSpeeds:
        slower = {name: factor * getattr(self.costs, name) for name in STEP_COSTS}
        return replace(self, costs=replace(self.costs, **slower))


def jittered(speeds: Speeds, jitter: float, random: Random) -> tuple[Speeds, Speeds]:
    """One worker's real speeds and its fitted ones: each off its nominal value by up to `jitter`."""
    real = speeds.slowed(1 + random.uniform(-jitter, jitter))
    return real, real.slowed(1 + random.uniform(-jitter, jitter))


def read_costs(path: Path) -> WorkerCosts:
    """The costs of a worker, from JSON as `/v1/cache` shows them.

    Raises:
        ReplayError: the file cannot be read, is no JSON object of exactly the fields of `WorkerCosts`, or a value is no
            time.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"cannot read {path.name}: {error}") from error

    if not isinstance(values, dict):
        raise ReplayError(f"{path.name}: not a JSON object")

    names = [field.name for field in fields(WorkerCosts)]
    if unknown := sorted(values.keys() - set(names)):
        raise ReplayError(f"{path.name}: unknown {_list(unknown)}; there are {', '.join(names)}")
    if missing := [name for name in names if name not in values and name not in NOT_REPLAYED]:
        raise ReplayError(f"{path.name}: {_list(missing)} missing")

    costs = WorkerCosts(**{name: _number(values, name, path) for name in values})
    if not costs.decode_step_s(1) > 0:
        raise ReplayError(f"{path.name}: a step must take time, but step_s and decode_token_s are 0")

    return costs


def _number(values: Mapping[str, object], name: str, path: Path) -> float:
    value = values[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ReplayError(f"{path.name}: {name} must be a number from 0, not {value!r}")
    return float(value)


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names))
