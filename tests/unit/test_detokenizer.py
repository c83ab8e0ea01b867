"""Detokenizers: any split of the ids gives the text of all of them, and no half characters on the way."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from raydix.engine.core.ingress.detokenizer import (
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    PrefixDetokenizer,
    ShowingDetokenizer,
    byte_level_bytes,
)

SINGLE_BYTES = [bytes([byte]) for byte in range(256)]
MERGES = [b" the", "é".encode(), "日本".encode(), "😀".encode()[:2], "😀".encode()[2:], b"", b"x\xe6", "�".encode()]
TOKEN_BYTES = [*SINGLE_BYTES, *MERGES]
SKIPPED = len(SINGLE_BYTES) + MERGES.index(b"")

WORDS = ["▁a", "▁", "b", "▁▁", "日", ".", "▁the"]
SPECIAL = len(SINGLE_BYTES) + len(WORDS)


def pieces(detokenizer: Detokenizer, ids: Sequence[int], lengths: Sequence[int]) -> list[str]:
    """Push `ids` in parts of the given lengths, the rest at once; flush."""
    result, start = [], 0
    for length in lengths:
        result.append(detokenizer.push(ids[start : start + length]))
        start += length
    return [*result, detokenizer.push(ids[start:]), detokenizer.flush()]


def decode_bytes(ids: Sequence[int]) -> str:
    return b"".join(TOKEN_BYTES[i] for i in ids).decode("utf-8", "replace")


def decode_words(ids: Sequence[int]) -> str:
    """In the manner of SentencePiece with byte fallback: a run of byte tokens is text only if all of it is UTF-8, and
    the first space of the text is dropped."""
    parts: list[str] = []
    shown = [token for token in ids if token != SPECIAL]
    for is_byte, run in groupby(shown, key=lambda token: token < 256):
        if not is_byte:
            parts += [WORDS[token - 256].replace("▁", " ") for token in run]
            continue
        data = bytes(run)
        try:
            parts.append(data.decode())
        except UnicodeDecodeError:
            parts.append(REPLACEMENT * len(data))
    return "".join(parts).removeprefix(" ")


splits = st.lists(st.integers(0, 5), max_size=40)
byte_ids = st.lists(st.integers(0, len(TOKEN_BYTES) - 1), max_size=60)
utf8_ids = st.text(max_size=30).map(lambda text: list(text.encode("utf-8")))


@given(byte_ids | utf8_ids, splits)
def test_bytes_any_split_gives_the_whole_text(ids: list[int], lengths: list[int]) -> None:
    assert "".join(pieces(ByteDetokenizer(TOKEN_BYTES), ids, lengths)) == decode_bytes(ids)


@given(utf8_ids, splits)
def test_bytes_emits_no_half_character(ids: list[int], lengths: list[int]) -> None:
    text = "".join(pieces(ByteDetokenizer(TOKEN_BYTES), ids, lengths)[:-1])
    assert text == decode_bytes(ids)
    assert text.count(REPLACEMENT) == decode_bytes(ids).count(REPLACEMENT)


def test_bytes_holds_an_incomplete_character_until_flush() -> None:
    detokenizer = ByteDetokenizer(TOKEN_BYTES)
    emoji = "😀".encode()
    assert detokenizer.push([ord("a"), emoji[0], emoji[1]]) == "a"
    assert detokenizer.push([]) == ""
    assert detokenizer.push([SKIPPED]) == ""
    assert detokenizer.push([emoji[2]]) == ""
    assert detokenizer.push([emoji[3]]) == "😀"
    assert detokenizer.push([emoji[0]]) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_bytes_id_outside_the_table() -> None:
    with pytest.raises(IndexError):
        ByteDetokenizer(TOKEN_BYTES).push([len(TOKEN_BYTES)])


@given(byte_ids | utf8_ids, splits)
def test_prefix_over_a_byte_level_decoder(ids: list[int], lengths: list[int]) -> None:
    assert "".join(pieces(PrefixDetokenizer(decode_bytes), ids, lengths)) == decode_bytes(ids)


word_ids = st.lists(
    st.lists(st.integers(256, SPECIAL), min_size=1, max_size=4)
    | st.text(st.characters(exclude_characters=REPLACEMENT, exclude_categories=["Cs"]), min_size=1, max_size=4).map(
        lambda text: list(text.encode())
    ),
    max_size=25,
).map(lambda runs: [token for run in runs for token in run])


@given(word_ids, splits)
def test_prefix_over_a_word_decoder(ids: list[int], lengths: list[int]) -> None:
    out = pieces(PrefixDetokenizer(decode_words), ids, lengths)
    assert "".join(out) == decode_words(ids)
    assert REPLACEMENT not in "".join(out)


@pytest.mark.parametrize("lead", [[], [256], [0x80]])
@pytest.mark.parametrize("token", [SPECIAL, 0x80])
def test_prefix_work_is_bounded_when_nothing_comes_of_the_ids(lead: list[int], token: int) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_words(ids)

    detokenizer = PrefixDetokenizer(decode)
    ids = [*lead, *[token] * 1000]
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert text == decode_words(ids)
    assert longest <= PrefixDetokenizer.WINDOW_LIMIT + 1


@pytest.mark.parametrize(
    "make", [lambda: ByteDetokenizer(TOKEN_BYTES), lambda: PrefixDetokenizer(decode_bytes)], ids=["bytes", "prefix"]
)
def test_is_empty_after_flush(make: Callable[[], Detokenizer]) -> None:
    detokenizer = make()
    detokenizer.push([0xE6, 0x97])
    detokenizer.flush()
    assert detokenizer.push(list("日".encode())) == "日"


def test_byte_level_spelling() -> None:
    assert byte_level_bytes("Ġhello") == b" hello"
    assert byte_level_bytes("Ċ") == b"\n"
    assert byte_level_bytes("æĹ¥") == "日".encode()
    assert byte_level_bytes("<|im_end|>") == b"<|im_end|>"
    assert byte_level_bytes("▁日") == "▁日".encode()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A small byte-level tokenizer with an added token, as models have them."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    result.train_from_iterator(["the cat sat on the mat", "日本語の文", "naïve 😀 café"] * 3, trainer)
    result.add_tokens(["été <x>"])
    return result


@given(data=st.data(), lengths=splits)
def test_against_a_real_tokenizer(tokenizer: Tokenizer, data: st.DataObject, lengths: list[int]) -> None:
    size = tokenizer.get_vocab_size()
    text = st.text(st.sampled_from("the cat日本語😀é<|end|>"), max_size=20)
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=30) | text.map(lambda t: tokenizer.encode(t).ids))
    table = [byte_level_bytes(tokenizer.id_to_token(i) or "") for i in range(size)]
    table[tokenizer.token_to_id("<|end|>") or 0] = b""
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(ByteDetokenizer(table), ids, lengths)) == expected
    assert "".join(pieces(PrefixDetokenizer(tokenizer.decode), ids, lengths)) == expected


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=8), st.data())
def test_shown_special_tokens_stand_among_the_text(parts: list[bytes], data: Any) -> None:
    """Each part is followed by the token 256, which has no bytes."""
    table = [*(bytes([byte]) for byte in range(256)), b""]
    ids = [token for part in parts for token in (*part, 256)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    detokenizer = ShowingDetokenizer(ByteDetokenizer(table), {256: "<end>"})
    pieces = [detokenizer.push(ids[i:j]) for i, j in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join(pieces) + detokenizer.flush()
    assert text == "".join(part.decode("utf-8", "replace") + "<end>" for part in parts)
