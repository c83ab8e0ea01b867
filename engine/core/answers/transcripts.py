"""Exact token ids of earlier answers in a chat's prompt, named by the client.

A chat's prompt is tokenized from its text, and an answer's text need not tokenize to the generated ids. A client that
continues from the exact ids names them, by the reference of a kept answer or as the ids themselves. The named ids
replace the message's text in the prompt; everything else is tokenized as usual.

Guarantees: a reference stands for the same ids as long as it is known, and is known only under the same model, tenant
and `cache_salt`.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from raydix.engine.core.hashing import DIGEST_BYTES
from raydix.engine.core.types import BlockHash

REFERENCE_PREFIX = "raydix-"  # prefix of every reference, to tell references from the ids of other servers


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text and its token ids."""

    text: str
    token_ids: Sequence[int]
    borders: Sequence[tuple[int, int]]
    """Places of special tokens, ascending: index of the first character, index of the token. No token behind a border
    depends on the text before the border."""
    places: Mapping[int, int] = field(default_factory=dict)
    """Special tokens that `with_answers` replaces: index of the character, and index of the message that the token
    stands for."""


def with_answers(chat: EncodedText, answers: Mapping[int, Sequence[int]]) -> EncodedText:
    """`chat` with the ids of answers, by the indices of their messages, in place of their placeholders."""
    token_ids: list[int] = []
    borders: list[tuple[int, int]] = []
    start = 0
    for character, index in chat.borders:
        token_ids += chat.token_ids[start:index]
        start = index
        if character in chat.places:
            token_ids += answers[chat.places[character]]
            start += 1
        else:
            borders.append((character, len(token_ids)))
    return EncodedText(chat.text, [*token_ids, *chat.token_ids[start:]], borders)


def num_shown(token_ids: Sequence[int], text: str, text_of: Callable[[Sequence[int]], str]) -> int | None:
    """Number of an answer's ids, from the first, that are wholly in `text`; None if `text` is not a beginning of the
    ids' text.

    A stop string may have cut the text inside a token. Tokens at the end without text, such as an end-of-answer token,
    do not count.
    """
    whole = text_of(token_ids)
    if not whole.startswith(text):
        return None

    # The most ids whose text is not longer than `text`.
    low, high = len(token_ids) if whole == text else 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(text_of(token_ids[:middle])) <= len(text) else (low, middle - 1)

    end = _last_shown(token_ids, low, text_of)
    while end and not text.startswith(text_of(token_ids[:end])):  # inside a character, which has a few tokens that show
        end = _last_shown(token_ids, end - 1, text_of)
    return end


def _last_shown(token_ids: Sequence[int], end: int, text_of: Callable[[Sequence[int]], str]) -> int:
    """`end` less the tokens before it that add no text, neither alone nor behind the others."""
    first = end
    while first and not text_of(token_ids[first - 1 : first]):
        first -= 1
    if first == end:
        return end
    text = text_of(token_ids[:end])
    return bisect_left(range(end + 1), True, lo=first, hi=end, key=lambda index: text_of(token_ids[:index]) == text)


def first_difference(token_ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first index at which two sequences have different ids; None if one begins with the other."""
    return next((i for i, (one, other) in enumerate(zip(token_ids, others, strict=False)) if one != other), None)


def transcript_name(reference: str, root: BlockHash, private_salt: bytes) -> bytes:
    """Name of a kept answer or response: differs by reference, model, tenant and `cache_salt`."""
    digest = blake2b(root, digest_size=DIGEST_BYTES, person=b"raydix answer")
    digest.update(len(private_salt).to_bytes(4, "little") + private_salt + reference.encode())
    return digest.digest()
