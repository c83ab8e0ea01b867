"""Log-probabilities in OpenAI's two formats, and a prompt's in vLLM's.

A chat's `top_logprobs` have as many entries as were asked for and hold the token itself, in the last place where it is
none of the likeliest. A completion's begin with the token itself, as vLLM's do, and hold the likeliest ones besides.

OpenAI's formats name tokens by text, and a token may be part of a character. A chat then shows U+FFFD beside the exact
bytes; a completion, which has no bytes, shows `bytes:\\xf0\\x9f`, as OpenAI does. Probabilities of zero become -9999,
OpenAI's figure for them, since JSON has no infinity.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import TypeAlias

from engine.api.responses import Json
from engine.core.types import TokenLogprobs

TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes a token id stands for."""

LOWEST = -9999.0


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    token_bytes: TokenBytes,
    *,
    num_top: int | None = None,
    names_ids: bool = False,
) -> Json:
    """The `logprobs` object of a chat choice or delta, for `token_ids` and the log-probabilities at their positions.
    Lists have `num_top` entries; None: all that are known, and the token itself. `names_ids`: tokens are named by their
    ids."""

    def entry(token_id: int, logprob: float) -> Json:
        data = token_bytes(token_id)
        name = _name_of_id(token_id) if names_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        assert at is not None, "only a prompt's first token has none, and a chat does not echo its prompt"
        own = entry(token_id, at.chosen)
        top = [entry(top_id, logprob) for top_id, logprob in zip(at.top_ids, at.top_logprobs, strict=True)]
        if top and token_id not in at.top_ids:
            top = [*top[: None if num_top is None else num_top - 1], own]
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], num_top: int, token_bytes: TokenBytes
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each prompt token null, or an object by token id with the token itself and then the
    `num_top` likeliest ones."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        text = token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}

    objects: list[Json | None] = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        if at is None:
            objects.append(None)
            continue
        top = zip(at.top_ids[:num_top], at.top_logprobs[:num_top], strict=True)
        of_token: Json = {str(token_id): entry(token_id, at.chosen, at.rank)}
        for rank, (top_id, logprob) in enumerate(top, start=1):
            of_token.setdefault(str(top_id), entry(top_id, logprob, rank))
        objects.append(of_token)

    return objects


class CompletionLogprobs:
    """Makes the `logprobs` objects of one completion choice, for a stream piece by piece: `text_offset` counts the
    characters of the choice's text before each token. `num_top` alternatives are shown of each; None: all there are.
    `names_ids`: tokens are named by their ids."""

    def __init__(self, token_bytes: TokenBytes, num_top: int | None = None, *, names_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._num_top = num_top
        self._names_ids = names_ids
        self._pending = b""
        self._num_characters = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """The object for the next tokens and the log-probabilities at their positions; an echoed prompt's first token
        has none."""
        tokens, chosen, tops, offsets = [], [], [], []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            tokens.append(self._name(token_id))
            chosen.append(None if at is None else max(at.chosen, LOWEST))
            tops.append(None if at is None else self._top(token_id, at))
            offsets.append(self._num_characters)
            self._advance(token_id)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token_id: int, at: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by name, the token's own first; of others with the same name the likeliest counts."""
        top = {self._name(token_id): max(at.chosen, LOWEST)}
        for top_id, logprob in zip(at.top_ids[: self._num_top], at.top_logprobs[: self._num_top], strict=True):
            top.setdefault(self._name(top_id), max(logprob, LOWEST))
        return top

    def _name(self, token_id: int) -> str:
        if self._names_ids:
            return _name_of_id(token_id)
        data = self._token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, token_id: int) -> None:
        data = self._pending + self._token_bytes(token_id)
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        self._num_characters += len(text)


def _name_of_id(token_id: int) -> str:
    """vLLM's name of a token by its id, with which tokens of equal text are told apart."""
    return f"token_id:{token_id}"
