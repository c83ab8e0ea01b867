"""Text to token ids and back, and chats to prompts.

Wraps the tokenizer that transformers loads from a model folder. Encoding and decoding go to the Rust tokenizer
beneath it, whose every call releases the interpreter lock; transformers is asked for chat templates only.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from engine.core.detokenizer import REPLACEMENT
from engine.core.errors import RequestError, StartupError
from engine.core.transcripts import EncodedText
from engine.model.config import read_json


class Tokenizer:
    """The tokenizer of one model folder. Raises `StartupError` if the folder has none that can be used."""

    def __init__(self, folder: Path) -> None:
        with quiet_transformers():
            try:
                from transformers import AutoTokenizer

                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # whatever a damaged or unknown tokenizer makes transformers stumble over
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise StartupError(f"cannot load the tokenizer in {folder}: {reason}") from error
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise StartupError(f"the tokenizer in {folder} is not a fast one: add its tokenizer.json")
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids: list[int] = _eos_token_ids(folder, self._tokenizer.eos_token_id)
        """The ids that end a generation, ascending: the end of the text and, for chat models, the end of a turn."""

    @property
    def vocab_size(self) -> int:
        """The number of ids that have text; the model's own vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._tokenizer.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; with special tokens, what the model wants before (or after) any text is added.

        Raises `RequestError` if the text is not valid Unicode.
        """
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_with_borders(self, text: str) -> EncodedText:
        """The token ids of a text to which no special tokens are added, and where those begin that it has.

        Raises `RequestError` as `encode` does.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        special = [index for index, token_id in enumerate(ids) if token_id in self._special_ids]
        return EncodedText(text, ids, [(encoding.token_to_chars(index)[0], index) for index in special])

    def shown(self, token_ids: Sequence[int], text: str) -> Sequence[int] | None:
        """Those of the generated ids that `text` stands for: all, or all but the one that ended the answer.

        None if the text hides others, shows bytes that make no character, or ends inside a token.
        """
        if REPLACEMENT not in text:
            for shown in (token_ids[:-1], token_ids):
                if self.decode(shown, skip_special_tokens=False) == text:
                    return shown
        return None

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:
            raise RequestError("the text has unpaired surrogates, which no UTF-8 text can hold") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some token ids; bytes that make no character become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> EncodedText:
        """The prompt that the model's chat template makes of the messages, and its token ids.

        The template writes special tokens itself: none are added. Raises `RequestError` if there is no template, or the
        template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of the model's publisher and may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RequestError(f"the chat template cannot take these messages: {reason}", param="messages") from error
        return self.encode_with_borders(rendered)

    def chat_beginning(self, system: str) -> tuple[int, ...]:
        """The token ids with which every chat with this system message begins, whatever the user says.

        Raises `RequestError` if the template takes no such message.
        """
        chats = [
            self.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": user}]).token_ids
            for user in ("1", "a", "\n")
        ]
        same = takewhile(lambda ids: len(set(ids)) == 1, zip(*chats, strict=False))
        return tuple(ids[0] for ids in same)

    def token_bytes(self, skip_special_tokens: bool = True) -> list[bytes] | None:
        """The exact bytes of each token id, so that text can be put together from tokens one by one.

        Special tokens are empty if skipped. None if this tokenizer's text is not the concatenation of its tokens'
        bytes (some SentencePiece ones drop a space at the beginning), so that `decode` must be used.
        """
        to_bytes = _token_decoder(json.loads(self._backend.to_str()).get("decoder"))
        if to_bytes is None:
            return None
        added = self._backend.get_added_tokens_decoder()
        table = [b""] * (max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id not in added:
                table[token_id] = to_bytes(token)
            elif not (added[token_id].special and skip_special_tokens):
                table[token_id] = token.encode()
        return table


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers, which speaks of what a user cannot act on, from logging and warning."""
    names = ("transformers", "huggingface_hub", "gguf", "httpx")
    loggers = [logging.getLogger(name) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # sets its logger's level, so before the levels are noted

        bars: Any = transformers.utils.logging

        levels = [logger.level for logger in loggers]
        showing_bars = bars.is_progress_bar_enabled()
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        bars.disable_progress_bar()
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            if showing_bars:
                bars.enable_progress_bar()


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> list[int]:
    ids = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    path = folder / "generation_config.json"
    declared = read_json(path).get("eos_token_id") if path.is_file() else None
    ids.update(declared if isinstance(declared, list) else [] if declared is None else [int(declared)])
    return sorted(ids)


def _token_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    """The function from a token's spelling to its bytes, if the tokenizer's decoder only joins tokens."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    if kinds == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces:
        return _sentencepiece_bytes
    return None


def _byte_level_bytes(token: str) -> bytes:
    """Undo the spelling of byte-level BPE, which writes each byte as one printable character."""
    if all(character in _BYTE_OF_CHARACTER for character in token):
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others the characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
