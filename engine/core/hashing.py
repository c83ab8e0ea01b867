"""Names for blocks: a chain of cryptographic digests over the tokens of a sequence.

A block's hash covers its own tokens, every token before it, the root, which is what the KV was computed with (model
fingerprint, which includes dtype and layout), and the salt of whoever may share it. Two blocks with the same hash hold
the same KV, in every process and on every machine. BLAKE2b with 128 bits: collisions are out of reach even for someone
who looks for them, which a faster non-cryptographic hash would not give.

The salt enters between two blocks: before the first one, or after the last one that lies wholly in a public prefix. So
the blocks of a public prefix have the same names for everyone, and no block after them has a name that a holder of
another salt could come to. Roots and salts are hashed under keys, blocks under none, so that none passes for another.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.core.types import BlockHash, Salt

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockChain:
    """How the blocks of one sequence are named; the ingress and the workers name them by this one rule."""

    root: BlockHash
    salt: Salt
    block_size: int

    @property
    def num_public_blocks(self) -> int:
        """Blocks from the first that are named without the salt."""
        return self.salt.num_public_tokens // self.block_size

    def parent(self, hashes: Sequence[BlockHash], index: int) -> BlockHash:
        """What block `index` is hashed with, given the `hashes` of those before it."""
        last = hashes[index - 1] if index else self.root
        return salted(last, self.salt.private) if index == self.num_public_blocks else last

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int]) -> None:
        """Append to `hashes`, those of the first blocks of `token_ids`, what it lacks of the full blocks."""
        num_full = len(token_ids) // self.block_size
        for end in (min(self.num_public_blocks, num_full), num_full):
            if len(hashes) < end:
                tokens = token_ids[len(hashes) * self.block_size : end * self.block_size]
                hashes += hash_blocks(self.parent(hashes, len(hashes)), tokens, self.block_size)

    def hashes(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of all full blocks of a sequence."""
        hashes: list[BlockHash] = []
        self.extend(hashes, token_ids)
        return hashes


def root_hash(fingerprint: str) -> BlockHash:
    """Where every chain of one model begins."""
    return blake2b(fingerprint.encode(), digest_size=DIGEST_BYTES, key=b"raydix root").digest()


def salted(parent: BlockHash, private: bytes) -> BlockHash:
    """`parent` for those alone who have the salt `private`."""
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
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
