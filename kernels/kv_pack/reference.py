"""Specification of gathering blocks into one buffer."""

import torch
from torch import Tensor


def kv_pack_reference(pool: Tensor, block_ids: Tensor) -> Tensor:
    """The bytes of `pool[block_ids]`, one block after the other, as a 1-D uint8 tensor."""
    return pool[block_ids.to(pool.device)].view(-1).view(torch.uint8)
