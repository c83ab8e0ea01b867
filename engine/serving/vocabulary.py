"""Token ids to text, for answers and for log-probabilities."""

from collections.abc import Sequence
from functools import partial

from raydix.engine.core.ingress.detokenizer import ByteDetokenizer, Detokenizer, PrefixDetokenizer, ShowingDetokenizer
from raydix.engine.model.tokenizer import Tokenizer


class Vocabulary:
    """The text of token ids. Tables of bytes are used where the tokenizer has any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown_bytes = tokenizer.token_bytes()
        self._named_bytes = tokenizer.token_bytes(skip_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one answer, which shows special tokens by their names or not at all."""
        table = self._shown_bytes if skip_special_tokens else self._named_bytes
        if table is not None:
            return ByteDetokenizer(table)
        return PrefixDetokenizer(partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens))

    def showing(self, names: Sequence[str]) -> Detokenizer:
        """A detokenizer for one answer, which shows the special tokens of these names."""
        ids = ((self._tokenizer.special_id(name), name) for name in names)
        shown = {token_id: name for token_id, name in ids if token_id is not None}
        return ShowingDetokenizer(self.detokenizer(), shown) if shown else self.detokenizer()

    def added_id(self, name: str) -> int | None:
        """The id of a token beyond the vocabulary's texts, special or not; None if there is none of this name."""
        return self._tokenizer.added_id(name)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens by their names; none of an id that only pads the vocabulary."""
        if self._named_bytes is not None:
            return self._named_bytes[token_id] if token_id < len(self._named_bytes) else b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt, special tokens by their names."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
