"""Log-probabilities in OpenAI's two formats.

Both name tokens by text, and a token may be part of a character. A chat then shows U+FFFD beside the exact bytes; a
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


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> Json:
    """The `logprobs` object of a chat choice or delta, for `token_ids` and the log-probabilities at their positions."""

    def entry(token_id: int, logprob: float) -> Json:
        data = token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        top = [entry(top_id, logprob) for top_id, logprob in zip(at.top_ids, at.top_logprobs, strict=True)]
        content.append({**entry(token_id, at.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes the `logprobs` objects of one completion choice, for a stream piece by piece: `text_offset` counts the
    characters of the choice's text before each token."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._pending = b""
        self._num_characters = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        """The object for the next tokens and the log-probabilities at their positions."""
        tokens, chosen, tops, offsets = [], [], [], []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            tokens.append(self._name(token_id))
            chosen.append(max(at.chosen, LOWEST))
            tops.append(self._top(at))
            offsets.append(self._num_characters)
            self._advance(token_id)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, at: TokenLogprobs) -> dict[str, float]:
        """By name; of tokens that share a name the likeliest counts."""
        top: dict[str, float] = {}
        for top_id, logprob in zip(at.top_ids, at.top_logprobs, strict=True):
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
