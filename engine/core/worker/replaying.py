"""Makes schedulers: of an engine, and to replay the recording of one (`engine.core.worker.notes`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.eviction.policies import make_queue
from engine.core.eviction.queue import EvictionQueue
from engine.core.hashing import BlockChain
from engine.core.settings import EngineSettings
from engine.core.tenants import quotas
from engine.core.types import BlockHash, Grammar, GrammarKind
from engine.core.worker.block_pool import BlockPool
from engine.core.worker.scheduler import Scheduler
from engine.core.worker.swap_policy import SwapPolicy


class NamedToken(int):
    """The note of a block's last token, with the block's name."""

    name: BlockHash

    @staticmethod
    def of(value: int, name: BlockHash | None) -> int:
        """The token, named at the end of a block."""
        if name is None:
            return value
        token = NamedToken(value)
        token.name = name
        return token


@dataclass(frozen=True, slots=True)
class RecordedChain(BlockChain):
    """The naming rule of a replay: the last token of a block brings the name."""

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int]) -> None:
        for end in range((len(hashes) + 1) * self.block_size, len(token_ids) + 1, self.block_size):
            hashes.append(_name_of(token_ids[end - 1]))

    def partial(self, hashes: Sequence[BlockHash], index: int, token_ids: Sequence[int]) -> BlockHash:
        return _name_of(token_ids[-1])


@dataclass(frozen=True, slots=True)
class RecordedGrammar(Grammar):
    """A grammar of which a replay knows the digest alone, in place of the source."""

    @staticmethod
    def of(digest: bytes) -> "RecordedGrammar":
        return RecordedGrammar(GrammarKind.LARK, digest.hex())

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.source)


def _name_of(token_id: int) -> BlockHash:
    assert isinstance(token_id, NamedToken), "a block ends with a token that brings no name"
    return token_id.name


def pool_of(settings: EngineSettings, num_blocks: int) -> BlockPool:
    """The empty pool of an engine."""
    queue: EvictionQueue[BlockHash] = make_queue(settings.eviction, quotas(settings.tenants, num_blocks), num_blocks)
    return BlockPool(num_blocks, settings.block_size, queue, keeps_blocks=settings.prefix_caching)


def replaying_scheduler(settings: EngineSettings, num_blocks: int, max_model_len: int, block_bytes: int) -> Scheduler:
    """The scheduler of an engine of these settings, to be told a recording."""
    swap_policy = SwapPolicy(settings.swap_bytes // block_bytes, block_bytes)
    pool = pool_of(settings, num_blocks)
    return Scheduler(pool, settings.limits, max_model_len, swap_policy, RecordedChain, settings.tenants)
