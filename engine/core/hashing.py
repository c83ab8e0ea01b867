"""Names for blocks: a chain of cryptographic digests over the tokens of a sequence.

A block's hash covers its own tokens, all tokens before them, the root (model fingerprint, including dtype and layout),
and the salt of its readers. Two blocks with the same hash hold the same KV, in every process and on every machine.
BLAKE2b with 128 bits: collisions are out of reach even for an attacker, unlike with a faster non-cryptographic hash.

The salt enters between two blocks: before the first one, or after the last one wholly inside a public prefix. So the
blocks of a public prefix have the same names for everyone, and the blocks after a salt have names that no holder of
another salt can compute. An adapter changes the KV of every token from its first one on, public ones, too, so its
digest enters before the first block with such a token: before block 0, or where the adapter is invoked. The place
enters beside it, since a block in which an invocation begins may be followed by different ones. Roots, adapters, salts
and the places of answers are hashed under keys, blocks under none, so that none passes for another.
"""

import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from raydix.engine.core.types import BlockHash, Salt

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The naming rule for the blocks of one sequence, shared by the ingress and the workers."""

    root: BlockHash
    salt: Salt
    block_size: int

    @property
    def num_public_blocks(self) -> int:
        """Leading blocks that are named without the salt."""
        return self.salt.num_public_tokens // self.block_size

    @property
    def num_plain_blocks(self) -> int:
        """Leading blocks that are named without the adapter."""
        return self.salt.num_plain_tokens // self.block_size

    def parent(self, hashes: Sequence[BlockHash], index: int) -> BlockHash:
        """The parent that block `index` is hashed with, given the `hashes` of the blocks before it."""
        last = hashes[index - 1] if index else self.root
        if index == self.num_plain_blocks:
            last = adapted(last, self.salt.adapter, self.salt.num_plain_tokens)
        return salted(last, self.salt.private) if index == self.num_public_blocks else last

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int]) -> None:
        """Extend `hashes`, of the first blocks of `token_ids`, to all full blocks."""
        num_full = len(token_ids) // self.block_size
        # The parent changes where the salt and the adapter enter, alone.
        for end in sorted(
            {*(min(each, num_full) for each in (self.num_public_blocks, self.num_plain_blocks)), num_full}
        ):
            if len(hashes) < end:
                tokens = token_ids[len(hashes) * self.block_size : end * self.block_size]
                hashes += hash_blocks(self.parent(hashes, len(hashes)), tokens, self.block_size)

    def partial(self, hashes: Sequence[BlockHash], index: int, token_ids: Sequence[int]) -> BlockHash:
        """The hash of block `index` if the block ends with `token_ids`, given the `hashes` of the blocks before it."""
        return hash_block(self.parent(hashes, index), token_ids)

    def answer_name(self, hashes: Sequence[BlockHash], token_ids: Sequence[int]) -> bytes:
        """The name of the place behind `token_ids`, whose full blocks have these hashes: salted inside a public prefix,
        too, since what others have asked is not public."""
        end = self.partial(hashes, len(hashes), token_ids[len(hashes) * self.block_size :])
        return blake2b(end + self.salt.answers, digest_size=DIGEST_BYTES, key=b"raydix answer").digest()

    def hashes(self, token_ids: Sequence[int]) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        self.extend(hashes, token_ids)
        return hashes


def root_hash(fingerprint: str) -> BlockHash:
    """The beginning of every chain of one model."""
    return blake2b(fingerprint.encode(), digest_size=DIGEST_BYTES, key=b"raydix root").digest()


def state_hash(block_hash: BlockHash) -> BlockHash:
    """The name of the recurrent state behind a block: a second kind of block under the same chain."""
    return blake2b(block_hash, digest_size=DIGEST_BYTES, key=b"raydix state").digest()


def adapted(last: BlockHash, adapter: bytes, num_plain_tokens: int = 0) -> BlockHash:
    """The name of `last` where a chain goes on with the adapter of this digest, behind so many tokens without it; at
    the root, the beginning of every chain of the adapter. Without an adapter `last` itself."""
    if not adapter:
        return last
    place = num_plain_tokens.to_bytes(8, "little") if num_plain_tokens else b""
    return blake2b(last + adapter + place, digest_size=DIGEST_BYTES, key=b"raydix adapter").digest()


def salted(parent: BlockHash, private: bytes) -> BlockHash:
    """The name of `parent` under the salt `private`."""
    return blake2b(parent + private, digest_size=DIGEST_BYTES, key=b"raydix salt").digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block that holds `token_ids` after `parent`. A partial block is a block of fewer tokens."""
    return blake2b(parent + _token_bytes(token_ids), digest_size=DIGEST_BYTES).digest()


def hash_blocks(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`, which begin right after `parent`."""
    data, width = _token_bytes(token_ids), 4 * block_size
    hashes = []
    for start in range(0, len(token_ids) // block_size * width, width):
        parent = blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    # Names are the same on every machine: words are hashed in little-endian order.
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def preferred(session: str, worker_ids: Collection[str]) -> str:
    """The worker that a session prefers to all others; `worker_ids` must not be empty. Rendezvous hashing (Thaler and
    Ravishankar, 1998).

    Losing a worker moves only the sessions that preferred the lost one.
    """
    # With one worker there is nothing to choose, and no digest to make.
    if len(worker_ids) == 1:
        return next(iter(worker_ids))
    return min(worker_ids, key=lambda worker_id: _affinity(session, worker_id))


def _affinity(session: str, worker_id: str) -> bytes:
    return blake2b(f"{session}\0{worker_id}".encode(), digest_size=8).digest()
