"""Attention through a latent: weights and latents of 8 bits, a checkpoint as it is published, and hand-over."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import Quantization
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.sizes import kv_block_bytes, weight_bytes
from tests.model.logits import logits_in_chunks
from tests.model.random_models import CASES, SMALL, reference
from tests.model.test_exactness import BLOCK_SIZE, run
from tests.model.test_family_exactness import OTHERS, PROMPT, ask, make_engine
from tests.model.test_packed_weights import write_float8
from tests.skips import NO_PRODUCT

LATENTS = ["deepseek v2 lite", "deepseek v3", "glm 4.7 flash"]


def load(case: str, folder: Path, quantization: Quantization | None = None) -> Decoder:
    reference(case, folder)
    decoder = Decoder.from_folder(folder, torch.bfloat16, quantization=quantization)
    if not decoder.has_independent_rows:
        pytest.skip(NO_PRODUCT)
    return decoder


@pytest.mark.parametrize("case", LATENTS)
@pytest.mark.parametrize(("quantization", "kv_dtype"), [("int8", torch.bfloat16), (None, torch.int8)])
def test_weights_or_latents_of_eight_bits_give_the_same_bits(
    case: str, quantization: Quantization | None, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = load(case, tmp_path, quantization)
    engine = make_engine(decoder, kv_dtype=kv_dtype)
    cold = run(engine, [ask("ours")])
    assert run(engine, [ask("ours")]) == cold, "from the cache"
    assert run(make_engine(decoder, budget=16, kv_dtype=kv_dtype), [ask("ours")]) == cold, "in chunks"
    every = [ask("ours"), *(ask(name, ids) for name, ids in OTHERS.items())]
    assert run(make_engine(decoder, kv_dtype=kv_dtype), every)["ours"] == cold["ours"], "in a batch"
    name = str(kv_dtype).removeprefix("torch.")
    assert engine.store.block_bytes == kv_block_bytes(decoder.config, BLOCK_SIZE, name)


@pytest.mark.parametrize("case", LATENTS)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_latents_are_handed_over(case: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    """An engine that imports the blocks of another one computes only what stands behind them."""
    decoder = load(case, tmp_path)
    first, second = (make_engine(decoder, kv_dtype=kv_dtype) for _ in range(2))
    cold = run(first, [ask("ours")])
    second.submit(ask("ours"), 0.0)
    request = second.scheduler.requests.get("ours")
    assert request is not None
    segments, _ = first.exchange.export(request.full_hashes(), 0.0)
    for segment in map(ExportedSegment.arrived, segments):
        assert second.exchange.import_segment(segment.header, segment.payload, 0.0)
    outputs, num_prefilled = [], 0
    while (step := second.step(0.0)) is not None:
        outputs += [(event.token_id, event.logprobs) for event in step.events]
        num_prefilled += step.shape.num_prefill_tokens
    assert outputs == cold["ours"]
    assert num_prefilled == len(PROMPT) % BLOCK_SIZE


@pytest.mark.parametrize("case", LATENTS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_computed_size_of_weights_is_what_they_take(
    case: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    """All products, norms and tables of a loaded model, padded rows of panels apart."""
    decoder = load(case, tmp_path, quantization)
    products = [product for layer in decoder._layers for product in layer.products()]
    products.append(decoder._lm_head)
    width = 1 if quantization else 2
    kept = sum(
        product.in_features * product.out_features * (2 if product.scales is None else width)
        + (0 if product.scales is None else 4 * product.out_features)
        for product in products
    )
    expected = weight_bytes(decoder.config, "bfloat16", quantization, on_gpu=False)
    tables = decoder.config.latent.rope_dim * decoder.config.max_position * 4  # type: ignore[union-attr]
    assert expected == pytest.approx(kept + tables + 2 * decoder._embedding.numel(), rel=0.1)
    assert expected > kept + tables


def test_a_published_checkpoint_in_fp8_with_a_layer_that_drafts(tmp_path: Path) -> None:
    """As DeepSeek V3 is published: matrices in FP8, and behind the last layer another one."""
    _, sizes = CASES["deepseek v3"]
    sizes = {**SMALL, **sizes, "attention_bias": False, "num_nextn_predict_layers": 1}
    torch.manual_seed(0)
    tensors = write_float8("blocks", tmp_path, family="DeepseekV3", sizes=sizes)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    drafting = {"eh_proj.weight": torch.ones(64, 128), "mlp.up_proj.weight": torch.ones(96, 64).to(torch.float8_e4m3fn)}
    drafting["mlp.up_proj.weight_scale_inv"] = torch.ones(2, 1)
    behind = {f"model.layers.4.{name}": tensor for name, tensor in drafting.items()}
    save_file({**load_file(path), **behind}, path)
    decoder = Decoder.from_folder(tmp_path)

    wide = tmp_path / "wide"
    wide.mkdir()
    config = json.loads(config_path.read_text())
    (wide / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    save_file(tensors, wide / "model.safetensors")
    ids = list(range(3, 43))
    expected = logits_in_chunks(Decoder.from_folder(wide), ids, 16)
    assert torch.equal(logits_in_chunks(decoder, ids, 16), expected)

    kept = Decoder.from_folder(tmp_path, quantization="stored")
    logits = logits_in_chunks(kept, ids, 16)
    assert not kept.has_independent_rows or torch.equal(logits_in_chunks(kept, ids, 7), logits)
    # Of the median, for where weights are not rounded to bfloat16 a token may have another expert.
    assert torch.nn.functional.cosine_similarity(logits.float(), expected.float()).median() > 0.9

    config_path.write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(StartupError, match=r"does not call for: model\.layers\.4\.eh_proj\.weight"):
        Decoder.from_folder(tmp_path)
