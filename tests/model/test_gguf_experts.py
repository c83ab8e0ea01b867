"""A GGUF file of a model with experts becomes the model folder that it was made of."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from raydix.engine.core.errors import StartupError
from raydix.engine.model import gguf as module
from raydix.engine.model.families import config_of, read_config
from raydix.engine.model.gguf import GgufModel
from raydix.engine.model.tokenizer import quiet_transformers
from tests.model.random_models import EXPERTS, QWEN3_MOE, SMALL

LAYER_NAMES = {hf: name for name, hf in module._LAYER_TENSORS.items()}
EXPERT_NAMES = {hf.split(".")[-1]: name for name, hf in module._EXPERT_TENSORS.items() if "{}" in hf}


def save_model(folder: Path, **settings: object) -> None:
    """Save a model with random weights, with experts in every layer."""
    with quiet_transformers():
        import transformers

        config = transformers.Qwen3MoeConfig(**{**SMALL, **EXPERTS, **QWEN3_MOE, "mlp_only_layers": [], **settings})
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    architecture: str = "qwen3moe",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> dict[str, torch.Tensor]:
    """Write the model of a folder as llama.cpp stores it, its matrices in blocks of one kind; returns its tensors."""
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    num_experts, config = 8, read_config(folder)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(settings["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(settings["moe_intermediate_size"])

    def add(name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 1 or kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)

    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in module._TENSORS.values():
            known = next(key for key, value in module._TENSORS.items() if value == stem)
            add(f"{known}.weight", tensor)
            continue
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if part == "mlp.gate":
            add(f"blk.{layer}.ffn_gate_inp.weight", tensor)
        elif part.startswith("mlp.experts.0."):
            every = [tensors[name.replace("experts.0.", f"experts.{expert}.")] for expert in range(num_experts)]
            add(f"blk.{layer}.{EXPERT_NAMES[part.rpartition('.')[2]]}.weight", torch.stack(every))
        elif not part.startswith("mlp.experts."):
            add(f"blk.{layer}.{LAYER_NAMES[part]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_every_expert_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    tensors = write_gguf(tmp_path, path := tmp_path / "m.gguf")
    model = GgufModel(path)
    described = config_of(model.config())
    assert replace(described, rms_norm_eps=1e-6) == read_config(tmp_path)  # the file has it in float32

    monkeypatch.setattr(module, "_SHARD_BYTES", 40_000)  # several files
    (folder := tmp_path / "converted").mkdir()
    module._write_weights(model, folder, lambda _: None)
    files = sorted(folder.glob("*.safetensors"))
    converted = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1 and converted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(converted[name], tensor.bfloat16() if tensor.dim() > 1 else tensor), name


def test_experts_of_another_architecture_are_refused_by_the_settings(tmp_path: Path) -> None:
    save_model(tmp_path)
    write_gguf(tmp_path, path := tmp_path / "m.gguf", architecture="qwen3")
    with pytest.raises(StartupError, match="a qwen3 with experts, which raydix reads from safetensors only"):
        GgufModel(path)
