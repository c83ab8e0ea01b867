"""Text to token ids and back, and chats to prompts.

Wraps the tokenizer that transformers loads from a model folder. Encoding and decoding go to the Rust tokenizer beneath
it, whose every call releases the interpreter lock; transformers is asked for chat templates only.
"""

import inspect
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatTemplate
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.errors import RequestError, StartupError
from raydix.engine.core.ingress.parsers.harmony import CALL, CHANNEL, RETURN, TOKENS
from raydix.engine.model import harmony
from raydix.engine.model.config import read_json

# Characters without a meaning of their own, which nearly no text has.
PRIVATE_USE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)


@dataclass(frozen=True, slots=True)
class MarkedChat:
    """Messages, and functions that they may call, in which `mark` stands in the names of special tokens; without any
    name there is no mark.

    A chat template writes special tokens around messages, and a tokenizer knows them by their names alone, so a message
    with the name of a special token would begin a turn of its own. Before a template is rendered, the mark (a character
    that no message has) is put into each such name inside a message; a name without a mark is the template's.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    mark: str | None = None


def names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern for the names of special tokens, longer ones first; names of one character cannot be marked."""
    longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def mark_names(
    messages: Sequence[Mapping[str, Any]], names: re.Pattern[str], tools: Sequence[Mapping[str, Any]] = ()
) -> MarkedChat:
    """Mark the names of special tokens in messages, except in their roles and their own keys, and in functions."""
    if not any(names.search(text) for text in _texts([*messages, *tools])):
        return MarkedChat(messages, tools)
    mark = _unused_character(_texts([*messages, *tools]))
    marked = [
        {key: value if key == "role" else _marked(value, names, mark) for key, value in message.items()}
        for message in messages
    ]
    return MarkedChat(marked, [_marked(tool, names, mark) for tool in tools], mark)


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _unused_character(texts: Iterable[str]) -> str:
    used = set[str]().union(*texts)
    return next(chr(code) for area in PRIVATE_USE for code in area if chr(code) not in used)


def _marked(value: Any, names: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        # A mark that breaks one name may let another appear that overlaps with it, which needs its own.
        while names.search(value):
            value = names.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        return value
    if isinstance(value, Mapping):
        return {_marked(key, names, mark): _marked(item, names, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, names, mark) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt made by a chat template. With a `mark`, names of special tokens that contain the mark are text."""

    text: str
    mark: str | None


class Tokenizer:
    """The tokenizer of one model folder. Raises `StartupError` if the folder has none that can be used."""

    def __init__(self, folder: Path) -> None:
        with quiet_transformers():
            try:
                from transformers import AutoTokenizer

                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # of any kind: a damaged or unknown tokenizer
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise StartupError(f"cannot load the tokenizer in {folder}: {reason}") from error

        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise StartupError(f"the tokenizer in {folder} is not a fast one: add its tokenizer.json")

        # A tokenizer.json may say to cut and pad texts, as training did; a server must not cut prompts in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_names = names_pattern(token.content for token in added.values() if token.special)
        self._lock = threading.Lock()  # the backend refuses to be set up differently while another thread uses it
        # Made once: the table of all tokens takes a while for large vocabularies.
        self._longest_token, self._lost_bytes = self._lengths()
        self.eos_token_ids: list[int] = eos_token_ids(folder, self._tokenizer.eos_token_id)
        """The ids that end a generation, ascending: the end of the text and, for chat models, the end of a turn."""
        if self.writes_harmony():
            # A GGUF file names one end alone.
            ends = (self.special_id(name) for name in (RETURN, CALL))
            self.eos_token_ids = sorted({*self.eos_token_ids, *(end for end in ends if end is not None)})

    @property
    def vocab_size(self) -> int:
        """Highest id that has text, plus one; ids below may have none, and the model's own vocabulary may be
        padded beyond."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def border_token(self) -> str | None:
        """Name of a special token that takes no spaces beside it; None if there is none."""
        added = self._backend.get_added_tokens_decoder().values()
        plain = (token for token in added if token.special and not (token.lstrip or token.rstrip or token.single_word))
        return next((str(token.content) for token in plain), None)

    @property
    def spaces_special_tokens(self) -> bool:
        """True if `decode` puts spaces between special tokens."""
        special = min(self._special_ids, default=None)
        if special is None:
            return False
        name: str = self._backend.id_to_token(special)
        return self.decode([special] * 2, skip_special_tokens=False) != 2 * name

    @property
    def has_chat_template(self) -> bool:
        """True if `render_chat` can render chats without a client's template."""
        return self._tokenizer.chat_template is not None or self.writes_harmony()

    def writes_harmony(self, template: ChatTemplate = MODEL_TEMPLATE) -> bool:
        """True if chats are rendered in harmony: by the special tokens, unless a template says otherwise."""
        has_tokens = all(self.special_id(name) is not None for name in TOKENS)
        return has_tokens and template.source is None and (not self.chat_template or CHANNEL in self.chat_template)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a `tokenizer.json`."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; with special tokens, the ones that the model wants before (or after) any text
        are added.

        Raises `RequestError` if the text is not valid Unicode.
        """
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the names of token ids in the vocabulary; an id without one has an empty name."""
        with self._lock:
            return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def encode_with_borders(self, text: str, mark: str | None = None) -> EncodedText:
        """Return the token ids of a text to which no special tokens are added, and the positions of the special tokens
        in it.

        With a `mark`, parts of the text between special tokens that have the mark are text alone, without it.

        Raises `RequestError` as `encode` does.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        special = [
            (index, *encoding.token_to_chars(index)) for index, each in enumerate(ids) if each in self._special_ids
        ]
        if mark is not None and mark in text:
            return self._encode_marked(text, mark, ids, special)
        return EncodedText(text, ids, [(start, index) for index, start, _ in special])

    def _encode_marked(
        self, text: str, mark: str, ids: list[int], special: Sequence[tuple[int, int, int]]
    ) -> EncodedText:
        """Return the same ids except for the parts that have the mark. `special` has each special token's index and, in
        characters of the text, its beginning and end. The text keeps its marks: no other chat's text is equal."""
        token_ids: list[int] = []
        borders: list[tuple[int, int]] = []
        first_id, first_character = 0, 0
        for index, start, end in [*special, (len(ids), len(text), len(text))]:
            part = text[first_character:start]
            # Parts without a mark keep the ids of the whole text, so that most chats are tokenized once.
            token_ids += self._encode_as_text(part.replace(mark, "")) if mark in part else ids[first_id:index]
            if index < len(ids):
                borders.append((start, len(token_ids)))
                token_ids.append(ids[index])
            first_id, first_character = index + 1, end
        return EncodedText(text, token_ids, borders)

    def _encode_as_text(self, text: str) -> list[int]:
        """Return the token ids of a text in which nothing is a special token."""
        with self._lock:
            # A setting of the whole tokenizer, so it is changed and changed back under the lock.
            self._backend.encode_special_tokens = True
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            finally:
                self._backend.encode_special_tokens = False
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        try:
            with self._lock:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:
            raise RequestError(_SURROGATES) from error

    def _lengths(self) -> tuple[int | None, bytes]:
        """Return the most bytes that one token stands for, and the bytes that no token stands for, which are left out.

        None where nothing bounds the former: where text is shortened before it is cut into tokens, or an unknown token
        may stand for any length.
        """
        table = self.token_bytes(skip_special_tokens=False)
        backend = json.loads(self._backend.to_str())
        added = self._backend.get_added_tokens_decoder().values()
        is_by_bytes = backend["model"]["type"] == "BPE" and not backend["model"].get("unk_token")
        # Each of these can make a text shorter than its bytes, and the bound would refuse prompts that fit.
        if table is None or not is_by_bytes or backend["normalizer"] or any(t.lstrip or t.rstrip for t in added):
            return None, b""
        return max(map(len, table)), bytes(set(range(256)) - {token[0] for token in table if len(token) == 1})

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some token ids; bytes that make no character become U+FFFD."""
        with self._lock:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, special_tokens: bool = False) -> EncodedText:
        """Return the prompt made of the messages by the model's chat template, and its token ids; as `render_chat`."""
        rendered = self.render_chat(messages, special_tokens=special_tokens)
        return self.encode_with_borders(rendered.text, rendered.mark)

    @property
    def chat_template(self) -> str:
        """Source of the chat template; empty if there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else ""

    def describe(self) -> dict[str, object]:
        """Return the parts of a `tokenizer_config.json` that tell of this tokenizer, and its size."""
        added = self._backend.get_added_tokens_decoder()
        flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
        named = self._tokenizer.special_tokens_map
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            "vocab_size": self.vocab_size,
            **{name: str(named[name]) if named.get(name) else None for name in _SPECIAL_ROLES},
            "additional_special_tokens": [str(token.content) for token in added.values() if token.special],
            "added_tokens_decoder": {
                str(token_id): {"content": str(token.content), **{flag: bool(getattr(token, flag)) for flag in flags}}
                for token_id, token in sorted(added.items())
            },
            "chat_template": self.chat_template or None,
        }

    def added_id(self, name: str) -> int | None:
        """The id of a token that was added to the vocabulary, special or not; None if there is none of this name. In a
        grammar llguidance takes such a token by its id alone, never for its text."""
        token_id: int | None = self._backend.token_to_id(name)
        return token_id if token_id in self._added_ids else None

    def plain_added_tokens(self) -> Mapping[str, int]:
        """Return the ids by name of tokens that were added to the vocabulary and are part of a text, such as Qwen's
        `<tool_call>`; without white space."""
        added = self._backend.get_added_tokens_decoder().items()
        return {str(token.content): each for each, token in added if not token.special and str(token.content).strip()}

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None if there is none of this name."""
        token_id = self._backend.token_to_id(name)
        return token_id if token_id in self._special_ids else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: ChatTemplate = MODEL_TEMPLATE,
        begins_answer: bool = True,
        special_tokens: bool = False,
    ) -> RenderedChat:
        """Return the prompt made of the messages by `template`, for `encode_with_borders`.

        `tools`: functions that the template is given. `begins_answer`: the prompt ends with the beginning of the
        assistant's answer.

        The template writes special tokens itself: none are added. Names of special tokens in messages and arguments
        stay text, unless `special_tokens` allows their authors to write special tokens. Raises `RequestError` if there
        is no template, the template refuses the messages, or an argument stands in the place of another variable.
        """
        if template.source is None and not self.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        _require_free(template.arguments, self._tokenizer)
        arguments: Mapping[str, Any] = template.arguments
        mark = None
        if not special_tokens:
            # Arguments go through the template like messages, and could write special tokens just the same.
            marked = mark_names([*messages, {"arguments": arguments}], self._special_names, tools)
            *messages, last = marked.messages
            tools, arguments, mark = marked.tools, last["arguments"], marked.mark
        if self.writes_harmony(template):
            text = harmony.render(messages, tools, arguments, today=str(date.today()), begins_answer=begins_answer)
            return RenderedChat(text, mark)
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=template.source,
                add_generation_prompt=begins_answer,
                tokenize=False,
                **arguments,
            )
        except Exception as error:  # a template is a program of the model's publisher and may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            param = "messages" if template.source is None else "chat_template"
            raise RequestError(f"the chat template cannot take these messages: {reason}", param=param) from error
        return RenderedChat(rendered, mark)

    def around(self, text: str, suffix: str) -> str | None:
        """Return the prompt for a text between `text` and `suffix`, as models trained to fill in take it (Bavarian et
        al. 2022, prefix first); None if the tokenizer has no tokens for it."""
        for prefix_token, suffix_token, middle_token in _FILL_IN_TOKENS:
            names = (prefix_token, suffix_token, middle_token)
            if all(self._backend.token_to_id(name) is not None for name in names):
                return f"{prefix_token}{text}{suffix_token}{suffix}{middle_token}"
        return None

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, from its length alone; 0 where the length tells nothing.

        Raises `RequestError` as `encode` does.
        """
        if self._longest_token is None:
            return 0
        return -(-len(_utf8(text).translate(None, self._lost_bytes)) // self._longest_token)

    def token_bytes(self, skip_special_tokens: bool = True) -> list[bytes] | None:
        """Return the exact bytes of each token id, so that text can be put together from tokens one by one.

        Special tokens are empty if skipped. None if this tokenizer's text is not the concatenation of its tokens' bytes
        (some SentencePiece ones drop a space at the beginning), so that `decode` must be used.
        """
        to_bytes = _token_decoder(json.loads(self._backend.to_str()).get("decoder"))
        if to_bytes is None:
            return None
        added = self._backend.get_added_tokens_decoder()
        table = [b""] * self.vocab_size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id not in added:
                table[token_id] = to_bytes(token)
            elif not (added[token_id].special and skip_special_tokens):
                table[token_id] = token.encode()
        return table


_SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
# Names of the tokens before a prefix, before a suffix and before the text between them: of StarCoder and Granite, of
# Qwen and CodeGemma, of SantaCoder, of DeepSeek.
_FILL_IN_TOKENS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)

# Names in a template that are no parameters of `apply_chat_template`.
_TEMPLATE_NAMES = frozenset(
    ("messages", "range", "dict", "namespace", "cycler", "joiner", "lipsum", "raise_exception", "strftime_now")
)

_SURROGATES = "the text has unpaired surrogates, which no UTF-8 text can hold"


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeError as error:
        raise RequestError(_SURROGATES) from error


def _require_free(arguments: Mapping[str, object], tokenizer: Any) -> None:
    """Raise `RequestError` for an argument that would replace what a template is given or can call anyway.
    `tokenizer`: of transformers."""
    if not arguments:
        return
    # Asked of the installed version: a later one may have more parameters that an argument could replace.
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in arguments:
        if name in own or name in _TEMPLATE_NAMES or name in tokenizer.special_tokens_map:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"'{param}' would replace what the chat template is given otherwise.", param=param)


def forgo_torch() -> None:
    """Have this process import transformers without torch, which tokenizers and chat templates do not need: a process
    with torch is four times as large. For processes that never compute; does nothing if torch is loaded already."""
    if "torch" in sys.modules:
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # of which one advises to install torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # to Python a module that is not installed
    try:
        with quiet_transformers():
            from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers, whose log lines and warnings a user cannot act on."""
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


def eos_token_ids(folder: Path, tokenizer_eos: int | None) -> list[int]:
    """Return the ids that end a generation, ascending: the tokenizer's own and those that the folder declares."""
    ids = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    path = folder / "generation_config.json"
    declared = read_json(path).get("eos_token_id") if path.is_file() else None
    # Chat models end a turn by another token than a text, and only this file names both.
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
