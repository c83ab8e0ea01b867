"""Folders of adapters: what names them, and what is refused by its name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raydix.engine.core.errors import StartupError
from raydix.engine.core.types import Adapter
from raydix.engine.model.adapter_store import AdapterStore
from raydix.engine.model.adapters import CONFIG, WEIGHTS, identify_adapter, read_adapter
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.families import read_config
from raydix.engine.model.weights import RandomTensors
from tests.model.random_adapters import write_adapter
from tests.model.random_models import SMALL

LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return read_config(tmp_path)


def digest(folder: Path, config: ModelConfig) -> bytes:
    return identify_adapter("name", str(folder), config).digest


def test_a_digest_is_of_the_numbers_alone(config: ModelConfig, tmp_path: Path) -> None:
    """Not of the name, the folder, the time, the order in the file, or settings of training."""
    first, second = tmp_path / "a", tmp_path / "b"
    write_adapter(first, config, 1)
    write_adapter(second, config, 1, settings={"lora_dropout": 0.5, "target_modules": ".*_proj", "revision": "main"})
    os.utime(second / WEIGHTS, (1.0, 1.0))
    tensors = load_file(second / WEIGHTS)
    save_file(dict(reversed(tensors.items())), second / WEIGHTS, metadata={"format": "pt"})
    assert digest(first, config) == digest(second, config)

    name = next(name for name in tensors if "layers.3" in name)
    tensors[name][-1, -1] += 1
    save_file(tensors, second / WEIGHTS)
    assert digest(first, config) != digest(second, config)


@pytest.mark.parametrize(
    "settings",
    [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_digest_is_of_the_scaling(settings: dict[str, Any], config: ModelConfig, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", config, 1)
    write_adapter(tmp_path / "b", config, 1, settings=settings)
    assert digest(tmp_path / "a", config) != digest(tmp_path / "b", config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"bias": "lora_only"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"alora_invocation_tokens": "<call>"}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"alpha_pattern": {"q_proj": "16"}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_with_another_effect_is_refused(
    settings: dict[str, Any], named: str, config: ModelConfig, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a", config, 1, settings=settings)
    with pytest.raises(StartupError, match=named):
        read_adapter(tmp_path / "a", config)


PLACE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"base_model.model.lm_head.lora_A.weight": (4, 64), "base_model.model.lm_head.lora_B.weight": (200, 4)}, "lm"),
        ({"base_model.model.lm_head.weight": (200, 64)}, "lm_head"),
        ({f"{PLACE}.lora_magnitude_vector": (64,)}, "lora_magnitude_vector"),
        ({f"{PLACE}.lora_A.weight": (4, 64)}, "only one"),
        ({f"{PLACE}.lora_A.weight": (4, 64), f"{PLACE}.lora_B.weight": (32, 4)}, "shapes"),
        ({f"{PLACE}.lora_A.weight": (4, 64), f"{PLACE}.lora_B.weight": (64, 5)}, "shapes"),
        ({PLACE.replace("0", "7") + f".lora_{factor}.weight": (64, 64) for factor in "AB"}, "layers.7"),
        ({}, "no tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_would_be_left_out_is_refused(
    tensors: dict[str, tuple[int, ...]], named: str, config: ModelConfig, tmp_path: Path
) -> None:
    write_adapter(tmp_path, config, 1)
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / WEIGHTS)
    with pytest.raises(StartupError, match=named):
        read_adapter(tmp_path, config)


def test_a_folder_that_is_none_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"adapter sql: .*nowhere is not .*{CONFIG}"):
        identify_adapter("sql", str(tmp_path / "nowhere"), config)
    write_adapter(tmp_path / "a", config, 1)
    (tmp_path / "a" / WEIGHTS).rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(StartupError, match=WEIGHTS):
        identify_adapter("sql", str(tmp_path / "a"), config)


def test_a_request_gets_the_weights_that_were_named_or_none(config: ModelConfig, tmp_path: Path) -> None:
    """Between the naming by one process and the loading by another the folder may have changed."""
    store = AdapterStore(Decoder(config, RandomTensors(config, 1), torch.float32))
    write_adapter(tmp_path / "a", config, 1)
    first = identify_adapter("sql", str(tmp_path / "a"), config)
    write_adapter(tmp_path / "a", config, 2)
    second = store.load("sql", str(tmp_path / "a"))
    assert second.digest != first.digest
    with pytest.raises(LookupError, match="sql"):
        store.require(first)
    store.require(Adapter("another name", "anywhere", second.digest))


def test_only_the_named_weights_are_added(config: ModelConfig, tmp_path: Path) -> None:
    """What one process names is loaded by all, or by none."""
    store = AdapterStore(Decoder(config, RandomTensors(config, 1), torch.float32))
    write_adapter(tmp_path / "a", config, 1)
    named = identify_adapter("sql", str(tmp_path / "a"), config)
    write_adapter(tmp_path / "a", config, 2)
    with pytest.raises(StartupError, match=r"adapter sql: .* has other weights here than elsewhere"):
        store.add(named)
    assert named.digest not in store
    with pytest.raises(StartupError, match=r"adapter gone: .* is not an adapter's folder"):
        store.add(Adapter("gone", str(tmp_path / "gone"), b"g" * 16))
    kept = store.load("sql", str(tmp_path / "a"))
    store.add(kept)
    store.drop(kept.digest)
    store.require(kept)


def test_numbers_that_are_none_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", config, 1)
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    tensors[f"{PLACE}.lora_B.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    decoder = Decoder(config, RandomTensors(config, 1), torch.float32)
    with pytest.raises(StartupError, match="no numbers"):
        decoder.load_lora(tmp_path / "a")
