"""Rows of a step's logits: for a request its own next token, then one row behind each token of its draft.

A row is computed behind the tokens before it, so the tokens sampled from the rows are those of the answer up to the
first that differs from the draft; the rows further on follow a token that the answer does not have.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from raydix.engine.core.types import Assignment
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import SampledToken, ScheduledChunk


class Row(Protocol):
    """A request as one row has it: its tokens before the row's next token."""

    @property
    def request_id(self) -> str: ...

    @property
    def assignment(self) -> Assignment: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def num_output(self) -> int:
        """Position of the next token among the generated ones."""
        ...


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """The row of a request behind some tokens of its draft."""

    request: Request
    drafted: tuple[int, ...]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def assignment(self) -> Assignment:
        return self.request.assignment

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids, *self.drafted]

    @property
    def num_output(self) -> int:
        return self.request.num_output + len(self.drafted)


def rows_of(chunks: Iterable[ScheduledChunk]) -> list[Row]:
    """The rows of the sampling chunks, in order."""
    rows: list[Row] = []
    for chunk in chunks:
        if chunk.samples:
            rows.append(chunk.request)
            rows += [DraftedRow(chunk.request, chunk.draft[: index + 1]) for index in range(len(chunk.draft))]
    return rows


def with_drafts(rows: Sequence[Row]) -> Iterator[tuple[Row, Sequence[int]]]:
    """The rows of requests themselves, in order, each with the draft behind."""
    row = 0
    while row < len(rows):
        last = row
        while last + 1 < len(rows) and isinstance(rows[last + 1], DraftedRow):
            last += 1
        behind = rows[last]
        yield rows[row], behind.drafted if isinstance(behind, DraftedRow) else ()
        row = last + 1


def sampled_by_request(
    chunks: Iterable[ScheduledChunk], tokens: Iterable[SampledToken], ended: Collection[int] = ()
) -> dict[str, Sequence[SampledToken]]:
    """The new tokens of each sampling chunk's request, of the tokens sampled from `rows_of` the chunks.

    `ended`: rows behind a draft's token that have no token of their own, so that the draft ends before.
    """
    left, first = iter(tokens), 0
    sampled: dict[str, Sequence[SampledToken]] = {}
    for chunk in chunks:
        if chunk.samples and not chunk.draft:  # its own row always has a token
            sampled[chunk.request.request_id] = (next(left),)
            first += 1
        elif chunk.samples:
            found = tuple(islice(left, 1 + len(chunk.draft)))
            end = next((index for index in range(len(found)) if first + index in ended), len(found))
            sampled[chunk.request.request_id] = up_to_difference(chunk.draft, found[:end])
            first += len(found)
    return sampled


def up_to_difference(draft: Sequence[int], tokens: Sequence[SampledToken]) -> Sequence[SampledToken]:
    """The tokens of a request's rows up to the first that differs from the draft, this one included."""
    pairs = enumerate(zip(draft, tokens, strict=False), start=1)
    end = next((count for count, (guess, token) in pairs if token.token_id != guess), len(tokens))
    return tokens[:end]
