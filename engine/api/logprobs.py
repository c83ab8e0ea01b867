"""Log-probabilities in OpenAI's two formats, and a prompt's in vLLM's.

A chat's `top_logprobs` have as many entries as were asked for and hold the token itself, in the last place where it is
none of the likeliest. A completion's begin with the token itself, as vLLM's do, and hold the likeliest ones besides.

OpenAI's formats name tokens by text, and a token may be part of a character. A chat then shows U+FFFD beside the exact
bytes; a completion, which has no bytes, shows `bytes:\\xf0\\x9f`, as OpenAI does. Probabilities of zero become -9999,
OpenAI's figure for them, since JSON has no infinity.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import orjson

from raydix.engine.api.responses import Json
from raydix.engine.api.slices import Sliced, array_of
from raydix.engine.core.types import TokenLogprobs

TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes a token id stands for."""

LOWEST = -9999.0

# Log-probabilities of an object that is made at once: some milliseconds. A larger one is made in slices.
SMALL = 2048
# Log-probabilities of a slice: one to some milliseconds, the latter where the tokens' names are not known yet.
SLICE = 4096


class TokenNames:
    """The JSON text before a token's log-probability in long lists, made when a list first has the token and kept: of
    each token in the vocabulary a hundred bytes at most, where some list had it."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._of_chats: dict[int, bytes] = {}
        self._of_completions: dict[int, bytes] = {}
        self._of_prompts: dict[int, bytes] = {}

    def of_chats(self, token_ids: Sequence[int], *, names_ids: bool) -> list[bytes]:
        """The beginnings of entries in a chat's list."""
        if names_ids:
            return [self._of_chat(token_id, names_ids=True) for token_id in token_ids]
        known = self._of_chats
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = self._of_chat(token_id, names_ids=False)
        return [known[token_id] for token_id in token_ids]

    def of_completions(self, token_ids: Sequence[int], *, names_ids: bool) -> list[bytes]:
        """The keys of a completion's object."""
        if names_ids:
            return [b'"token_id:%d":' % token_id for token_id in token_ids]
        known = self._of_completions
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = orjson.dumps(_shown(self._token_bytes(token_id))) + b":"
        return [known[token_id] for token_id in token_ids]

    def of_prompts(self, token_ids: Sequence[int]) -> list[bytes]:
        """The texts of a prompt's candidates, as JSON has them."""
        known = self._of_prompts
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = orjson.dumps(_replaced(self._token_bytes(token_id)))
        return [known[token_id] for token_id in token_ids]

    def _of_chat(self, token_id: int, *, names_ids: bool) -> bytes:
        data = self._token_bytes(token_id)
        name = _name_of_id(token_id) if names_ids else data.decode("utf-8", "replace")
        # Without the closing brace: the log-probability, which differs each time, is appended.
        return orjson.dumps({"token": name, "bytes": list(data)})[:-1] + b',"logprob":'


def num_listed(logprobs: Sequence[TokenLogprobs | None]) -> int:
    """Number of log-probabilities, counted as if each position had as many as the last one."""
    if not logprobs:
        return 0
    last = logprobs[-1]
    return len(logprobs) * (1 if last is None else 1 + len(last.top_ids))


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    token_bytes: TokenBytes,
    *,
    num_top: int | None = None,
    names_ids: bool = False,
    names: "TokenNames | None" = None,
) -> Json:
    """The `logprobs` object of a chat choice or delta, for `token_ids` and the log-probabilities at their positions.
    Lists have `num_top` entries; None: all that are known, and the token itself. `names_ids`: tokens are named by their
    ids. With `names` a large object has a `Sliced` as its content."""

    def entry(token_id: int, logprob: float) -> Json:
        data = token_bytes(token_id)
        name = _name_of_id(token_id) if names_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    def content() -> Iterator[Json]:
        for token_id, at in zip(token_ids, logprobs, strict=True):
            assert at is not None, "only a prompt's first token has none, and a chat does not echo its prompt"
            own = entry(token_id, at.chosen)
            if names is not None and len(at.top_ids) > SMALL:
                entries = partial(_entries, names, token_id, at, num_top, names_ids)
                yield {**own, "top_logprobs": Sliced(entries)}
                continue
            top = [entry(top_id, logprob) for top_id, logprob in zip(at.top_ids, at.top_logprobs, strict=True)]
            if top and token_id not in at.top_ids:
                top = [*top[: None if num_top is None else num_top - 1], own]
            yield {**own, "top_logprobs": top}

    # Large objects are made while they are sent, so that no other request waits for all of it.
    if names is not None and num_listed(logprobs) > SMALL:
        return {"content": array_of(content), "refusal": None}
    return {"content": list(content()), "refusal": None}


def _entries(
    names: TokenNames, token_id: int, at: TokenLogprobs, num_top: int | None, names_ids: bool
) -> Iterator[bytes]:
    """The list of one position in a chat, as text."""
    top_ids, logprobs = at.top_ids, at.top_logprobs
    is_missing = token_id not in top_ids
    # The token itself takes the last place, so the list keeps the length that was asked for.
    if is_missing and num_top is not None:
        top_ids, logprobs = top_ids[: num_top - 1], logprobs[: num_top - 1]
    for first in range(0, len(top_ids), SLICE):
        part = slice(first, first + SLICE)
        before = names.of_chats(top_ids[part], names_ids=names_ids)
        entries = [name + number for name, number in zip(before, _numbers(logprobs[part]), strict=True)]
        yield (b"," if first else b"[") + b"},".join(entries) + b"}"
    if is_missing:
        [before_own], [number] = names.of_chats([token_id], names_ids=names_ids), _numbers([at.chosen])
        yield b"," + before_own + number + b"}"
    yield b"]"


def _numbers(logprobs: Sequence[float]) -> list[bytes]:
    """Log-probabilities as JSON has them; at least one."""
    # One call for all numbers, of which there may be a hundred thousand, and not one call for each.
    return orjson.dumps([max(logprob, LOWEST) for logprob in logprobs])[1:-1].split(b",")


def prompt_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int | None,
    token_bytes: TokenBytes,
    names: TokenNames | None = None,
) -> Sequence[Json | Sliced | None] | Sliced:
    """vLLM's `prompt_logprobs`: for each prompt token null, or an object by token id with the token itself and then the
    `num_top` likeliest ones; None: all that are known. With `names` a `Sliced` stands for a large object of one
    position."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": _replaced(token_bytes(token_id))}

    def objects() -> Iterator[Json | Sliced | None]:
        for token_id, at in zip(token_ids, logprobs, strict=True):
            if at is None:
                yield None
                continue
            if names is not None and num_top is None and len(at.top_ids) > SMALL:
                yield Sliced(partial(_candidates, names, token_id, at))
                continue
            top = zip(at.top_ids[:num_top], at.top_logprobs[:num_top], strict=True)
            of_token: Json = {str(token_id): entry(token_id, at.chosen, at.rank)}
            for rank, (top_id, logprob) in enumerate(top, start=1):
                # The token itself stands there with its own rank already, and may be among the likeliest.
                of_token.setdefault(str(top_id), entry(top_id, logprob, rank))
            yield of_token

    return array_of(objects) if num_listed(logprobs) > SMALL else list(objects())


def _candidates(names: TokenNames, token_id: int, at: TokenLogprobs) -> Iterator[bytes]:
    """Yield the object of one position of a prompt as text: the token itself, then all others, likeliest first."""
    [name], [number] = names.of_prompts([token_id]), _numbers([at.chosen])
    yield b'{"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % (token_id, number, at.rank or 0, name)
    for first in range(0, len(at.top_ids), SLICE):
        part = at.top_ids[first : first + SLICE]
        numbers = _numbers(at.top_logprobs[first : first + SLICE])
        rows = zip(part, numbers, names.of_prompts(part), strict=True)
        yield b"".join(
            b',"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % (top_id, number, rank, name)
            for rank, (top_id, number, name) in enumerate(rows, start=first + 1)
            if top_id != token_id
        )
    yield b"}"


class CompletionLogprobsWriter:
    """Makes the `logprobs` objects of one completion choice, for a stream piece by piece: `text_offset` counts the
    characters of the choice's text before each token. `num_top` alternatives are shown of each; None: all there are.
    `names_ids`: tokens are named by their ids. With `names` a `Sliced` stands for a large object of one position."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        num_top: int | None = None,
        *,
        names_ids: bool = False,
        names: TokenNames | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._names = names
        self._num_top = num_top
        self._names_ids = names_ids
        self._pending = b""
        self._num_characters = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """The object for the next tokens and the log-probabilities at their positions; an echoed prompt's first token
        has none."""
        tokens, chosen, offsets = [], [], []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            tokens.append(self._name(token_id))
            chosen.append(None if at is None else max(at.chosen, LOWEST))
            # Before the token: its own characters count for the next one.
            offsets.append(self._num_characters)
            self._advance(token_id)

        def tops() -> Iterator[object]:
            for token_id, at in zip(token_ids, logprobs, strict=True):
                yield None if at is None else self._top(token_id, at)

        is_large = self._names is not None and num_listed(logprobs) > SMALL
        top = array_of(tops) if is_large else list(tops())
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def _top(self, token_id: int, at: TokenLogprobs) -> dict[str, float] | Sliced:
        """Log-probabilities by name, the token's own first; of others with the same name the likeliest counts."""
        if self._names is not None and len(at.top_ids) > SMALL:
            return Sliced(partial(self._texts, self._names, token_id, at))
        top = {self._name(token_id): max(at.chosen, LOWEST)}
        for top_id, logprob in zip(at.top_ids[: self._num_top], at.top_logprobs[: self._num_top], strict=True):
            # Tokens of equal text share a key. They come in falling order, so the likeliest stays.
            top.setdefault(self._name(top_id), max(logprob, LOWEST))
        return top

    def _texts(self, names: TokenNames, token_id: int, at: TokenLogprobs) -> Iterator[bytes]:
        """Yield the alternatives at a position as text (`_top` makes objects of them)."""
        [own], [number] = names.of_completions([token_id], names_ids=self._names_ids), _numbers([at.chosen])
        yield b"{" + own + number
        seen = {own}
        most = len(at.top_ids) if self._num_top is None else self._num_top
        for first in range(0, most, SLICE):
            part = slice(first, min(first + SLICE, most))
            entries = []
            keys = names.of_completions(at.top_ids[part], names_ids=self._names_ids)
            for name, number in zip(keys, _numbers(at.top_logprobs[part]), strict=True):
                if name not in seen:
                    seen.add(name)
                    entries.append(b"," + name + number)
            yield b"".join(entries)
        yield b"}"

    def _name(self, token_id: int) -> str:
        return _name_of_id(token_id) if self._names_ids else _shown(self._token_bytes(token_id))

    def _advance(self, token_id: int) -> None:
        data = self._pending + self._token_bytes(token_id)
        # Not final: bytes of a character that is not whole wait for the next token, and count with it.
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        self._num_characters += len(text)


def _replaced(data: bytes) -> str:
    """The text of a token, with U+FFFD for parts of characters."""
    return data.decode("utf-8", "replace")


def _shown(data: bytes) -> str:
    """A completion's name of a token by its bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _name_of_id(token_id: int) -> str:
    """vLLM's name of a token by its id, with which tokens of equal text are told apart."""
    return f"token_id:{token_id}"
