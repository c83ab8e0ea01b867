"""Where a special token begins tokenizers cut: what stands before it changes no token id behind it."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from raydix.engine.core.errors import StartupError
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
TEXT = st.text(st.sampled_from("ab <|im_endstar>\n1é日🌊\u0301"), max_size=12)
PARTS = st.lists(TEXT | st.sampled_from([START, END, START + "user\n"]), max_size=8).map("".join)
METASPACES = ["first", "always", "never", "prepend"]


@cache
def smollm() -> Tokenizer:
    try:
        return Tokenizer(resolve_model(DEFAULT_MODEL))
    except StartupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tokenizer]]:
    """Small tokenizers of the kinds that treat the beginning of a text in a special way."""
    yield {kind: _sentencepiece(kind, tmp_path_factory.mktemp(kind)) for kind in METASPACES}


def _sentencepiece(kind: str, folder: Path) -> Tokenizer:
    """A tokenizer that writes spaces as a visible character and puts one where `kind` says; `prepend` is Llama 2's."""
    pieces = ["<unk>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "\n", "1"]
    if kind == "prepend":
        vocab = {piece: index for index, piece in enumerate(pieces)}
        backend = Backend(BPE(vocab, [("a", "b"), ("\u2581", "a"), ("\u2581", "ab")], unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend = Backend(Unigram([(piece, -float(len(pieces) - index)) for index, piece in enumerate(pieces)], 0))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    backend.decoder = decoders.Metaspace(prepend_scheme="always" if kind == "prepend" else kind)
    backend.add_special_tokens([AddedToken(START, normalized=False, rstrip=True), AddedToken(END, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    return Tokenizer(folder)


def check_borders(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode_with_borders(text)
    assert list(encoded.token_ids) == tokenizer.encode(text, add_special_tokens=False)
    assert len(encoded.borders) == text.count(START) + text.count(END)
    for character, index in encoded.borders:
        assert list(encoded.token_ids[index:]) == tokenizer.encode(text[character:], add_special_tokens=False)
        assert list(encoded.token_ids[:index]) == tokenizer.encode(text[:character], add_special_tokens=False)


@settings(deadline=None)
@given(text=PARTS)
def test_borders_of_the_default_model(text: str) -> None:
    check_borders(smollm(), text)


@pytest.mark.parametrize("kind", METASPACES)
@settings(deadline=None)
@given(text=PARTS)
def test_borders_where_a_text_s_beginning_is_special(sentencepiece: dict[str, Tokenizer], kind: str, text: str) -> None:
    check_borders(sentencepiece[kind], text)
