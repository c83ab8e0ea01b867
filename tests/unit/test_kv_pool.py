"""Blocks of a pool whose layers have different heads, or latents."""

import pytest
import torch

from raydix.engine.model.families import config_of
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.sizes import kv_block_bytes

CONFIG = config_of(
    {
        "model_type": "gemma4",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 48,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    }
)


def test_each_layer_has_its_own_numbers_of_a_block() -> None:
    pool = KVPool(CONFIG, num_blocks=5, block_size=8, dtype=torch.bfloat16)
    assert [keys.shape for keys, _ in pool.layers] == [(5, 2, 8, 16), (5, 1, 8, 48), (5, 2, 8, 16)]
    assert pool.block_bytes == kv_block_bytes(CONFIG, 8, "bfloat16")
    parts = [part for layer in pool.layers for part in layer]
    for number, part in enumerate(parts):
        part[3] = number
        assert part.stride()[1:] == (8 * part.shape[3], part.shape[3], 1), "as the kernels take it"
    assert [set(part[3].flatten().tolist()) for part in parts] == [{number} for number in range(6)]
    assert pool.data[3].numel() == sum(part[3].numel() for part in parts)


def test_blocks_are_copied_whole() -> None:
    pool = KVPool(CONFIG, num_blocks=4, block_size=8, dtype=torch.bfloat16)
    pool.data.copy_(torch.randn(pool.data.shape))
    taken = pool.data[[1, 3]].clone()
    exported = pool.export_blocks([1, 3])
    assert exported.nbytes == 2 * pool.block_bytes
    pool.import_blocks(exported, [0, 2])
    pool.copy_block(0, 1)
    assert torch.equal(pool.data[[0, 2]], taken) and torch.equal(pool.data[1], taken[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_latent_is_kept_once(dtype: torch.dtype) -> None:
    config = config_of(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "kv_lora_rank": 48,
            "qk_rope_head_dim": 16,
        }
    )
    pool = KVPool(config, num_blocks=4, block_size=8, dtype=dtype)
    width = 64 if dtype is torch.bfloat16 else 68
    assert [keys.shape for keys, _ in pool.layers] == [(4, 1, 8, width)] * 2
    assert all(keys.data_ptr() == values.data_ptr() for keys, values in pool.layers)
    assert pool.block_bytes == kv_block_bytes(config, 8, str(dtype).removeprefix("torch."))
