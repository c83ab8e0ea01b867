"""Log-probabilities in OpenAI's two formats, and those of a prompt in vLLM's.

OpenAI's name tokens by text, and a token may be part of a character. A chat then shows U+FFFD beside the exact bytes; a
completion, which has no bytes, shows `bytes:\\xf0\\x9f`, as OpenAI does. Probabilities of zero become -9999, OpenAI's
figure for them, since JSON has no infinity.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import TypeAlias

from engine.api.responses import Json
from engine.core.types import TokenLogprobs

TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes a token id stands for."""

LOWEST = -9999.0


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], token_bytes: TokenBytes) -> Json:
    """The `logprobs` object of a chat choice or delta, for `token_ids` and the log-probabilities at their positions."""

    def entry(token_id: int, logprob: float) -> Json:
        data = token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        assert at is not None, "only a prompt's first token has none, and a chat does not echo its prompt"
        top = [entry(top_id, logprob) for top_id, logprob in zip(at.top_ids, at.top_logprobs, strict=True)]
        content.append({**entry(token_id, at.chosen), "top_logprobs": top})
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
    characters of the choice's text before each token. `num_top` alternatives are shown of each; None: all there are."""

    def __init__(self, token_bytes: TokenBytes, num_top: int | None = None) -> None:
        self._token_bytes = token_bytes
        self._num_top = num_top
        self._pending = b""
        self._num_characters = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """The object for the next tokens and the log-probabilities at their positions; an echoed prompt's first token
        has none."""
        tokens, chosen, tops, offsets = [], [], [], []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            tokens.append(self._name(token_id))
            chosen.append(None if at is None else max(at.chosen, LOWEST))
            tops.append(None if at is None else self._top(at))
            offsets.append(self._num_characters)
            self._advance(token_id)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, at: TokenLogprobs) -> dict[str, float]:
        """By name; of tokens that share a name the likeliest counts."""
        top: dict[str, float] = {}
        for top_id, logprob in zip(at.top_ids[: self._num_top], at.top_logprobs[: self._num_top], strict=True):
            top.setdefault(self._name(top_id), max(logprob, LOWEST))
        return top

    def _name(self, token_id: int) -> str:
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
