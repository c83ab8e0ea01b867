"""Every supported architecture, in a small random configuration, gives the logits that transformers gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raydix.engine.core.settings import Quantization
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import build_batch, made_up_step
from raydix.engine.model.tokenizer import quiet_transformers
from raydix.kernels.decoder_pass import DecoderPass
from tests.model.logits import logits_in_chunks
from tests.skips import NO_PRODUCT

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}

GEMMA3 = {"layer_types": ["sliding_attention", "full_attention"] * 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen 2.5": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 2.5 yarn": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen 3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": ("Gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
    "gemma 3": ("Gemma3", {**GEMMA3, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    token_ids, expected = reference(case, tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.float32, "cpu")
    actual = logits_in_chunks(decoder, token_ids, chunk=40)
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert error.max() < 1e-3


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("case", CASES)
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


WRAPPERS = {
    "gemma 3": (
        "Gemma3",
        {**GEMMA3, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32},
        "siglip_vision_model",
    ),
    "llava llama": ("Llava", {"model_type": "llama", "tie_word_embeddings": False}, "clip_vision_model"),
    "mistral 3": ("Mistral3", {"model_type": "mistral", "head_dim": 32, "sliding_window": None}, "pixtral"),
}
"""Models with a text part and one for images: the class, the text part's settings, the other part's model type."""
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("case", WRAPPERS)
def test_the_text_part_of_a_model_of_several_parts(case: str, layout: str, tmp_path: Path) -> None:
    token_ids, expected = wrapped(case, tmp_path)
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
        parts = {"text_config": {**SMALL, **text}, "vision_config": {"model_type": vision, **VISION}}
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
        is_text = bare != name
        head = "language_model.lm_head.weight" if layout.startswith("language_model") else "lm_head.weight"
        tensors[f"{layout}{bare}" if is_text else head if name.endswith("lm_head.weight") else name] = tensor
    assert any(name.startswith(layout) for name in tensors)
    assert any("language_model" not in name and "lm_head" not in name for name in tensors), "other parts"
    save_file(tensors, path, {"format": "pt"})


def test_more_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    reference("llama 3", tmp_path)
    decoder = Decoder.from_folder(tmp_path, torch.bfloat16, "cpu")
    if not decoder.runs_in_one_call:
        pytest.skip(NO_PRODUCT)
    pool = KVPool(decoder.config, 2, 16, torch.bfloat16)
    batch = build_batch(made_up_step(2, 16).chunks, 16, torch.device("cpu"))
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


def reference(case: str, folder: Path) -> tuple[list[int], torch.Tensor]:
    """Saves a model with random weights to `folder`; some tokens, and the logits that transformers gives for them."""
    family, extra = CASES[case]
    with quiet_transformers():
        import transformers

        name = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **extra})
        torch.manual_seed(0)
        theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():  # norms begin as ones and biases as zeros, which would hide a swapped one
            for parameter in theirs.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        theirs.save_pretrained(folder)
        token_ids = torch.randint(1, 200, (150,))
        with torch.inference_mode():
            return token_ids.tolist(), theirs(token_ids[None]).logits[0]
