"""The limit of the reasoning with which an answer begins, found in the bytes of tokens.

Tags may come as tokens of their own, or spelled in pieces with whatever text beside them: the reasoning begins and ends
where its readers see the tags.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raydix.engine.core.answers.lead import WHITESPACE, Before, Inside, Lead

MAX_BEFORE = 64  # tokens of white space, and of the opening tag, in which reasoning has to begin
OTHER = b"\0"  # stands for the bytes of a token that has no part of a tag


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """The most tokens of the reasoning with which an answer begins."""

    num_tokens: int
    """Tokens from the beginning of the answer on, without the closing tag, which is forced behind these."""
    closing_id: int
    """Token of the closing tag."""
    lead: Lead
    pieces: Mapping[int, bytes] = field(repr=False)
    """Bytes of the tokens that may be a part of a tag, or white space before one (`tag_pieces`).

    The request brings them along, since a worker has a table of all tokens only once a grammar has needed one. They are
    few: 208 of 49,152 tokens of SmolLM2's, 4 kB, which take 16 us to pickle and 36 us to unpickle.
    """

    def is_due(self, output: Sequence[int]) -> bool:
        """True if the answer's reasoning is open and has just become as long as it may be, or has just begun where it
        may have no token; true once in any answer."""
        begin = self._begin(output)
        if begin is None or len(output) != max(self.num_tokens, begin):
            return False
        *_, last = self._places(output)
        return isinstance(last, Inside)

    def _begin(self, output: Sequence[int]) -> int | None:
        """Number of tokens up to the end of the opening tag; None if no reasoning has begun."""
        for count, place in enumerate(self._places(output[:MAX_BEFORE])):
            if not isinstance(place, Before):
                return count if isinstance(place, Inside) else None
        return None

    def _places(self, output: Sequence[int]) -> Iterator[object]:
        """The place before the first token, and behind each one up to the first behind the reasoning or without any."""
        place: object = self.lead.start
        yield place
        for token_id in output:
            if not isinstance(place, Before | Inside):
                return
            place = self.lead.after(place, self.pieces.get(token_id, OTHER))
            yield place


def tag_pieces(table: Sequence[bytes], tags: Sequence[bytes]) -> dict[int, bytes]:
    """The tokens of a `table` of all tokens' bytes that may be a part of one of the tags, have such a part at their
    beginning or end, or are white space."""
    ends = {tag[:length] for tag in tags for length in range(1, len(tag) + 1)}
    beginnings = {tag[start:] for tag in tags for start in range(len(tag))}
    parts = {end[start:] for end in ends for start in range(len(end))}
    first, last = ({tag[at] for tag in tags} for at in (0, -1))
    return {
        token_id: token
        for token_id, token in enumerate(table)
        if token in parts
        or not token.strip(WHITESPACE)
        or (not first.isdisjoint(token) and (token.endswith(tuple(ends)) or any(tag in token for tag in tags)))
        or (not last.isdisjoint(token) and token.startswith(tuple(beginnings)))
    }
