"""Every supported architecture, in a small random configuration, gives the logits that transformers gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import Quantization
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import build_batch, made_up_step
from raydix.engine.model.tokenizer import quiet_transformers
from raydix.kernels.cpp import cpu_ops
from raydix.kernels.decoder_pass import DecoderPass
from tests.model.logits import logits_in_chunks
from tests.model.random_models import CASES, DELTA, GEMMA3, GEMMA4, GEMMA4_UNIFIED, LAYER_BY_LAYER, SMALL, reference
from tests.skips import NO_KERNELS, NO_PRODUCT


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    token_ids, expected = reference(case, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.float32, "cpu")
    actual = logits_in_chunks(decoder, token_ids, chunk=40)
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert error.max() < 1e-3


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("case", [case for case in CASES if case not in LAYER_BY_LAYER])
def test_all_layers_in_one_call_give_the_bits_of_layer_by_layer(
    case: str, quantization: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, _ = reference(case, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu", quantization=quantization)
    if not decoder.runs_in_one_call:
        pytest.skip(NO_PRODUCT)
    at_once = logits_in_chunks(decoder, token_ids, chunk=40)
    monkeypatch.setattr(DecoderPass, "supports", lambda *_: False)
    step_by_step = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu", quantization=quantization)
    assert not step_by_step.runs_in_one_call
    assert torch.equal(at_once, logits_in_chunks(step_by_step, token_ids, chunk=40))


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
@pytest.mark.parametrize("head_dim", [24, 1040])
def test_heads_that_no_kernel_takes_are_refused(head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "other heads", ("Llama", {"head_dim": head_dim}))
    reference("other heads", tmp_path)
    with pytest.raises(StartupError, match=f"heads of {head_dim} numbers"):
        Decoder.from_folder(tmp_path, torch.bfloat16, "cpu")


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
MROPE_PART = {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.25}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma 3": (
        "Gemma3",
        {**GEMMA3, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32},
        {"model_type": "siglip_vision_model", **VISION},
    ),
    "gemma 4": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 2}, {**VISION, "model_type": "gemma4_vision"}),
    "gemma 4 unified": ("Gemma4Unified", GEMMA4_UNIFIED, {"model_type": "gemma4_unified_vision"}),
    "llava llama": (
        "Llava",
        {"model_type": "llama", "tie_word_embeddings": False},
        {"model_type": "clip_vision_model", **VISION},
    ),
    "mistral 3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        {"model_type": "pixtral", **VISION},
    ),
    "qwen 2.5 vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, {**QWEN_VISION, "fullatt_block_indexes": [0]}),
    "qwen 3.5 vl": ("Qwen3_5", {**DELTA, "rope_parameters": MROPE_PART}, {**QWEN_VISION, "model_type": "qwen3_5"}),
    "qwen 3 vl": (
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
}
"""Models with a text part and one for images: the class, the settings of the text part and of the other one."""


@pytest.mark.parametrize("case", sorted(LAYER_BY_LAYER))
def test_what_the_pass_does_not_know_runs_layer_by_layer(case: str, tmp_path: Path) -> None:
    reference(case, tmp_path)
    assert not Decoder.from_folder(tmp_path, torch.bfloat16, "cpu").runs_in_one_call


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model.", "as saved"])
@pytest.mark.parametrize("case", WRAPPERS)
def test_the_text_part_of_a_model_of_several_parts(case: str, layout: str, tmp_path: Path) -> None:
    token_ids, expected = wrapped(case, tmp_path)
    if layout != "as saved":
        rename_text_part(tmp_path / "model.safetensors", layout)
    decoder = Decoder.from_folder(tmp_path, torch.float32, "cpu")
    actual = logits_in_chunks(decoder, token_ids, chunk=40)
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert error.max() < 1e-3


def wrapped(case: str, folder: Path) -> tuple[list[int], torch.Tensor]:
    """Saves a model of several parts with random weights; some tokens, and the logits that transformers gives."""
    family, text, vision = WRAPPERS[case]
    with quiet_transformers():
        import transformers

        extra = {"mm_tokens_per_image": 4} if family == "Gemma3" else {"image_token_index": 199}
        extra = {} if family.startswith(("Qwen", "Gemma4")) else extra
        parts = {"text_config": {**SMALL, **text}, "vision_config": vision}
        config = getattr(transformers, f"{family}Config")(**parts, **extra)
        torch.manual_seed(0)
        theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        theirs.save_pretrained(folder)
        token_ids = torch.randint(1, 190, (150,))
        with torch.inference_mode():
            return token_ids.tolist(), theirs(input_ids=token_ids[None]).logits[0].float()


def rename_text_part(path: Path, layout: str) -> None:
    """Name the tensors of the text part as one or the other version of transformers does."""
    tensors = {}
    for name, tensor in load_file(path).items():
        bare = name.removeprefix("language_model.model.").removeprefix("model.language_model.")
        if name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.")):  # Qwen 2.5's, beside `visual`
            bare = name.removeprefix("model.")
        is_text = bare != name
        head = "language_model.lm_head.weight" if layout.startswith("language_model") else "lm_head.weight"
        tensors[f"{layout}{bare}" if is_text else head if name.endswith("lm_head.weight") else name] = tensor
    assert any(name.startswith(layout) for name in tensors)
    assert any("language_model" not in name and "lm_head" not in name for name in tensors), "other parts"
    save_file(tensors, path, {"format": "pt"})


def test_experts_of_a_layer_may_be_one_tensor(tmp_path: Path) -> None:
    """As Qwen 3.5 is published; transformers saves them one by one."""
    token_ids, _ = reference("qwen 3.5 moe", tmp_path)
    path = tmp_path / "model.safetensors"
    apart = load_file(path)
    one_by_one = Decoder.from_folder(tmp_path, torch.bfloat16)
    expected = logits_in_chunks(one_by_one, token_ids, chunk=40)
    stacked = {name: tensor for name, tensor in apart.items() if ".mlp.experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = {
            part: torch.stack([apart[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        stacked[f"{prefix}.gate_up_proj"] = torch.cat((each["gate"], each["up"]), 1)
        stacked[f"{prefix}.down_proj"] = each["down"]
    save_file(stacked, path, {"format": "pt"})
    assert torch.equal(logits_in_chunks(Decoder.from_folder(tmp_path, torch.bfloat16), token_ids, chunk=40), expected)


def test_more_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    reference("llama 3", tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu")
    if not decoder.runs_in_one_call:
        pytest.skip(NO_PRODUCT)
    pool = KVPool(decoder.config, 2, 16, torch.bfloat16)
    batch = build_batch(made_up_step([2], 16).chunks, 16, torch.device("cpu"))
    twice = replace(batch, logits_rows=torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="more than the batch has tokens"):
        decoder.hidden(twice, pool)


@pytest.mark.parametrize("case", ["llama biases", "gemma 2"])
def test_int8_weights_are_close_to_what_they_were_rounded_from(case: str, tmp_path: Path) -> None:
    """In float32 on the reference product: what remains is the rounding of the weights, and it is there."""
    token_ids, expected = reference(case, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.float32, "cpu", quantization="int8")
    actual = logits_in_chunks(decoder, token_ids, chunk=40)
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert 1e-3 < error.median() < error.max() < 0.05
