"""gpt-oss' experts in a GGUF file, and in a model folder as they are published.

A file has the matrices of all experts' gates in one tensor and those of the other half in another one, in blocks of 32
weights with the exponent in front. The published layout has the rows of the two in turns, and exponents apart.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BLOCK = 32  # weights with one exponent
_PART = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")


def is_of_experts(name: str) -> bool:
    """True for the name of a tensor of all experts."""
    return _PART.fullmatch(name) is not None


def published(
    name: str, blocks_of: Callable[[str], Array | None], values_of: Callable[[str], Array]
) -> dict[str, Array]:
    """Return what a tensor of all experts comes to in the published layout, by the names there. The gate's brings along
    the other half, which has nothing of its own.

    `blocks_of`: the bytes of a tensor in MXFP4 [num_experts, rows, bytes of a row], None for one of another kind;
    `values_of`: the numbers of any tensor, the rows of a matrix as the file has them.
    """
    found = _PART.fullmatch(name)
    assert found is not None
    layer, part, kind = found.groups()
    if part == "up":
        return {}
    names = [name, name.replace("_gate_", "_up_")] if part == "gate" else [name]
    place = f"model.layers.{layer}.mlp.experts.{'gate_up' if part == 'gate' else 'down'}_proj"
    if kind == "bias":
        return {f"{place}_bias": _in_turns([values_of(each) for each in names])}
    kept = [blocks_of(each) for each in names]
    if all(each is not None for each in kept):
        blocks = _in_turns([each for each in kept if each is not None])
        return {f"{place}_blocks": _by_pairs(blocks), f"{place}_scales": _rows_of_blocks(blocks)[..., 0]}
    # Widened experts are published with rows and columns exchanged.
    return {place: _in_turns([values_of(each) for each in names]).swapaxes(1, 2)}


def _in_turns(parts: list[Array]) -> Array:
    """The rows of one or two tensors [num_experts, rows, ...], of two in turns."""
    first = parts[0]
    return np.stack(parts, axis=2).reshape(first.shape[0], -1, *first.shape[2:])


def _rows_of_blocks(blocks: Array) -> Array:
    """The bytes of each block: [..., blocks of a row, 17]."""
    return blocks.reshape(*blocks.shape[:-1], -1, 1 + BLOCK // 2)


def _by_pairs(blocks: Array) -> Array:
    """The weights of blocks as they are published, [..., blocks of a row, 16]: a byte has two that follow each other,
    the first in its low half. In the file it has one of each half of the block."""
    halves = _rows_of_blocks(blocks)[..., 1:]
    weights = np.concatenate([halves & 0x0F, halves >> 4], axis=-1)
    return np.asarray(weights[..., 0::2] | (weights[..., 1::2] << 4), np.uint8)


def settings(setting: Callable[..., Any], rope: Mapping[str, Any], *, is_packed: bool) -> dict[str, Any]:
    """What a `config.json` of the family has beside other families' settings."""
    found: dict[str, Any] = {
        "sliding_window": int(setting("attention.sliding_window")),
        "rope_parameters": dict(rope),
        "attention_bias": True,
    }
    if rope["rope_type"] == "yarn":
        # As every published one; the file does not say.
        found["rope_parameters"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return found | ({"quantization_config": {"quant_method": "mxfp4"}} if is_packed else {})
