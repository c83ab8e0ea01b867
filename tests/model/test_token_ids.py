"""Rows of a table of embeddings beyond the tokenizer are never sampled, drafted, listed, or taken from a client.

Each family serves random weights, in which the rows beyond the tokenizer are the likeliest by far: under a small
tokenizer made here, and under the published one of the family, where `make test-tokenizers` has fetched it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from raydix.actors.ingress.build import _model
from raydix.configs import load_config
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import DraftLimits, EngineSettings, SchedulerLimits
from raydix.engine.core.types import (
    Assignment,
    Grammar,
    GrammarKind,
    PromptEvent,
    Sampling,
    Stage,
    TokenEvent,
    TokenLogprobs,
)
from raydix.engine.model.build import build_engine
from raydix.engine.model.engine import Engine
from raydix.engine.model.families import FAMILIES, config_of
from raydix.engine.model.identity import num_token_ids
from raydix.engine.model.sizes import expected_shapes
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.output import Vocabulary
from tests.model.random_logits import wait_for_grammars

Event: TypeAlias = PromptEvent | TokenEvent

FETCHED = Path(os.environ.get("RAYDIX_TOKENIZERS", Path(__file__).parents[2] / ".venv-clients" / "tokenizers"))
PUBLISHED = {
    "llama": "llama3_1",
    "mistral": "mistral_nemo",
    "qwen2": "qwen2_5",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
"""The fetched tokenizers of families, which npm has without weights."""
NUM_PADDING = 267
"""As many as Qwen 3 has."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}
KINDS = {"layers_block_type": ["mamba", "attention"] * 2}
HYBRID: dict[str, dict[str, Any]] = {
    "granitemoehybrid": KINDS,
    "nemotronh": KINDS,
    "bamba": {"attn_layer_indices": [1, 3]},
}
"""Where families have attention that have none unless told."""


def byte_level(folder: Path) -> None:
    """A byte-level tokenizer with a token that ends a sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    content = json.loads(backend.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": 256, "content": "<|end|>", **flags}]
    content["model"]["vocab"]["<|end|>"] = 256
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def model_folder(folder: Path, family: str, num_tokens: int, num_rows: int, seed: int = 0) -> Path:
    """Write random weights of a family, with the rows from `num_tokens` on as the likeliest."""
    config = {**TINY, **HYBRID.get(family, {}), "model_type": family, "vocab_size": num_rows}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator).mul_(0.1).to(torch.bfloat16)
        for name, shape in expected_shapes(config_of(config)).items()
    }
    tensors[config_of(config).stored_name("model.embed_tokens.weight")][num_tokens:] *= 100
    save_file(tensors, folder / "model.safetensors")
    return folder


def settings(folder: Path, drafts: DraftLimits | None = None) -> EngineSettings:
    return EngineSettings(
        source=str(folder),
        dtype="bfloat16",
        device="cpu",
        max_model_len=512,
        block_size=16,
        num_blocks=200,
        pool_gib=1.0,
        limits=SchedulerLimits(256, 16),
        drafts=drafts,
    )


def request(name: str, token_ids: Sequence[int], **changes: Any) -> Assignment:
    params = replace(Sampling(max_tokens=40, temperature=1.5, seed=sum(name.encode())), **changes)
    return Assignment(name, 0, Stage.WHOLE, tuple(token_ids), len(token_ids), params, "ingress")


def logprobs_of(events: Sequence[Event]) -> Iterator[TokenLogprobs]:
    for event in events:
        if isinstance(event, PromptEvent):
            yield from event.logprobs
        elif event.logprobs is not None:
            yield event.logprobs


def answers(engine: Engine, requests: Sequence[Assignment]) -> dict[str, list[Event]]:
    for each in requests:
        engine.submit(each, 0.0)
    refused = wait_for_grammars(engine)
    assert not refused, refused
    found: dict[str, list[Event]] = {each.request_id: [] for each in requests}
    while (step := engine.step(0.0)) is not None:
        assert not step.failures, step.failures
        events: list[Event] = [*step.scores, *step.events]
        for event in events:
            found[event.request_id].append(event)
    return found


def require_known_ids(folder: Path, num_tokens: int) -> None:
    """Serve a model and check every id that it writes or lists."""
    tokenizer = Tokenizer(folder)
    assert num_token_ids(folder) == num_tokens <= tokenizer.vocab_size, "transformers adds what a class thinks it needs"
    config = load_config("cpu_mixed", {"model": {"source": str(folder)}})
    assert _model(config).served.vocab_size == num_tokens, "a client's ids beyond it get 400"

    engine = build_engine(settings(folder))
    prompt = tokenizer.encode("The capital of France is ") * 3
    requests = [
        *(request(f"sampled {number}", prompt, logprobs=5) for number in range(6)),
        request("greedy", prompt, temperature=0.0, logprobs=3),
        request("all", prompt, max_tokens=2, logprobs=num_tokens),
        request("scored", prompt, max_tokens=1, prompt_logprobs=4),
        request("penalised", prompt, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.2),
        request("banned", prompt, bad_words=((prompt[0],),), logit_bias=((prompt[1], 5.0),)),
        request("regex", prompt, grammar=Grammar(GrammarKind.REGEX, "[ab]{8}")),
    ]
    vocabulary = Vocabulary(tokenizer)
    for name, events in answers(engine, requests).items():
        ids = [event.token_id for event in events if isinstance(event, TokenEvent) and event.token_id is not None]
        listed = [token_id for each in logprobs_of(events) for token_id in each.top_ids]
        assert ids and max([*ids, *listed]) < num_tokens, name
        detokenizer = vocabulary.detokenizer()
        text = "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()])
        assert name != "regex" or set(text) <= set("ab"), text
        assert name != "all" or len(set(listed)) == num_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_never_seen(family: str, tmp_path: Path) -> None:
    byte_level(tmp_path)
    require_known_ids(model_folder(tmp_path, family, 257, 257 + NUM_PADDING), 257)


@pytest.mark.parametrize("family", PUBLISHED)
def test_padding_under_the_published_tokenizer_is_never_seen(family: str, tmp_path: Path) -> None:
    source = FETCHED / PUBLISHED[family]
    if not source.is_dir():
        pytest.skip(f"make test-tokenizers has not fetched {PUBLISHED[family]}")
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    num_tokens = Tokenizer(source).vocab_size
    require_known_ids(model_folder(tmp_path, family, num_tokens, num_tokens + NUM_PADDING), num_tokens)


def test_a_tokenizer_longer_than_its_model(tmp_path: Path) -> None:
    """As the text models of Gemma 3, which have no embedding for the image token of their tokenizer."""
    byte_level(tmp_path)
    model_folder(tmp_path, "gemma3", 256, 256)
    model = _model(load_config("cpu_mixed", {"model": {"source": str(tmp_path)}}))
    assert (model.tokenizer.vocab_size, model.served.vocab_size) == (257, 256)
    engine = build_engine(settings(tmp_path))
    [events] = answers(engine, [request("sampled", [1, 2, 3], logprobs=5)]).values()
    assert all(event.token_id is not None and event.token_id < 256 for event in events if isinstance(event, TokenEvent))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"vocab": {"a": 0, "b": 5}}}, 6),
        ({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}, 2),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<x>"}]}, 10),
    ],
)
def test_ids_of_a_tokenizer_file(content: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert num_token_ids(tmp_path) is None, "no tokenizer, no limit"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert num_token_ids(tmp_path) == expected
    (tmp_path / "added_tokens.json").write_text('{"<y>": 11}')
    assert num_token_ids(tmp_path) == 12
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"20": {"content": "<z>"}}}')
    assert num_token_ids(tmp_path) == 21


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json: KeyError: 'vocab'"):
        num_token_ids(tmp_path)
