"""The token ids of chats that were answered here, found again by their text.

A model's answer comes back as text in the next turn, and its text need not tokenize to the ids that the model
generated. Then the turn's prompt would differ from the sequence whose KV is cached, from the first such place on. So a
chat is remembered under a digest of its text up to the end of the answer, and a prompt begins with the ids of the
longest remembered text that it begins with.

Texts are compared where a special token begins. There the tokenizer has cut anyway, and no token after such a border
depends on what stands before it; so the ids behind it can be taken over from tokenizing the whole prompt.

The store holds ids, never text, and may forget anything: what is forgotten is tokenized anew.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from engine.core.hashing import DIGEST_BYTES
from engine.core.types import BlockHash

MAX_BORDERS = 256
"""Borders of a prompt that are looked up, from its end; a turn has about four."""
ENTRY_BYTES = 256
"""What an entry takes beside its ids: key, array and place in the dictionary, some 210 bytes in CPython."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text and its token ids."""

    text: str
    token_ids: Sequence[int]
    borders: Sequence[tuple[int, int]]
    """Where special tokens begin, ascending: the index of a character, and the index of the token that it begins."""


Found: TypeAlias = "tuple[int, array[int]] | None"
"""Which of some names is known, by its index, and the ids under it."""


def name_beginnings(chat: EncodedText, root: BlockHash) -> tuple[list[bytes], blake2b]:
    """The names of the text's beginnings up to each of its last borders, longest first; and the digest of all of it.

    `root` stands for the model and the tenant (`hashing.root_hash`).
    """
    digest = blake2b(root, digest_size=DIGEST_BYTES, person=b"raydix text")
    names, start = [], 0
    for end, _ in chat.borders[-MAX_BORDERS:]:
        digest.update(chat.text[start:end].encode())
        names.append(digest.digest())
        start = end
    digest.update(chat.text[start:].encode())
    return names[::-1], digest


def extended_name(digest: blake2b, text: str) -> bytes:
    """The name of what `digest` is of with `text` behind it."""
    longer = digest.copy()
    longer.update(text.encode())
    return longer.digest()


def resume(chat: EncodedText, found: Found, max_tokens: int) -> tuple[int, ...]:
    """The ids of a chat: those known of the beginning that was `found` among its names, and the rest as tokenized.

    Known ids may be more than tokenizing anew gives; if they made the chat longer than `max_tokens`, they do not count.
    """
    if found is not None:
        index, known = found
        _, border = chat.borders[-1 - index]
        if len(known) + len(chat.token_ids) - border <= max_tokens:
            return (*known, *chat.token_ids[border:])
    return tuple(chat.token_ids)


class TranscriptStore:
    """Token ids by the digest of their text; the least recently used go first when `budget_bytes` are exceeded."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._token_ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self.num_bytes = 0
        """Memory taken."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def record(self, name: bytes, token_ids: "array[int]") -> None:
        """Remember the ids of a text. Of two with the same text, the later counts."""
        known = self._token_ids.pop(name, None)
        if known is not None:
            self.num_bytes -= _cost(known)
        self._token_ids[name] = token_ids
        self.num_bytes += _cost(token_ids)
        while self.num_bytes > self._budget_bytes:
            self.num_bytes -= _cost(self._token_ids.popitem(last=False)[1])

    def first(self, names: Sequence[bytes]) -> Found:
        """The first of `names` that is known."""
        for index, name in enumerate(names):
            token_ids = self._token_ids.get(name)
            if token_ids is not None:
                self._token_ids.move_to_end(name)
                return index, token_ids
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._token_ids.clear()
        self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raises AssertionError if the memory is not what the entries take, or more than allowed."""
        assert self.num_bytes == sum(map(_cost, self._token_ids.values()))
        assert self.num_bytes <= self._budget_bytes


def _cost(token_ids: "array[int]") -> int:
    return ENTRY_BYTES + len(token_ids) * token_ids.itemsize
