"""Names for blocks: a chain of cryptographic digests over the tokens of a sequence.

A block's hash covers its own tokens, every token before it, and the root: what the KV was computed with (model
fingerprint, which includes dtype and layout) and the tenant's salt. Two blocks with the same hash hold the same KV, in
every process and on every machine. BLAKE2b with 128 bits: collisions are out of reach even for someone who looks for
them, which a faster non-cryptographic hash would not give.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.core.types import BlockHash

DIGEST_BYTES = 16


def root_hash(fingerprint: str, salt: bytes = b"") -> BlockHash:
    """The parent of every first block of one model and tenant."""
    digest = blake2b(fingerprint.encode(), digest_size=DIGEST_BYTES, key=b"raydix root")
    digest.update(len(salt).to_bytes(4, "little") + salt)
    return digest.digest()


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
