"""The interface between an answer and an API whose answers have one choice.

Such an API is a package beside this module with a parser of its bodies (`raydix.engine.api.routes`) and a writer of its
answers. OpenAI's completions and chats may have several choices, and their writer is `raydix.engine.api.stream`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from raydix.engine.api.assembler import Piece
from raydix.engine.api.compaction import Summary
from raydix.engine.api.context_edits import ContextEdits
from raydix.engine.api.logprobs import TokenBytes
from raydix.engine.api.responses import Choice, Json, ResponseHead, TokenUsage
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.wire import WireFormat
from raydix.engine.core.ingress.parsers.answer import AssembledMessage


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Facts about a request, and about its answer so far, for the writer of the answer."""

    head: ResponseHead
    spec: GenerationSpec
    token_bytes: TokenBytes
    """The bytes of a token, special tokens by their names."""
    marked_tokens: tuple[int, ...] = ()
    """Tokens of the prompt before each of the request's marks."""
    diagnosis: Callable[[int], Json | None] | None = None
    """What the answer says of the prompt beside an earlier one, given the tokens that were found; None: the request
    does not ask."""
    edits: ContextEdits | None = None
    """What was left out of the client's chat, where the request asks for edits."""
    summary: Summary | None = None
    """The summary that was made for this request."""
    logprobs: Callable[[Piece], Json] | None = None
    """Renders a piece's log-probabilities as a chat's, if the request asks for them."""
    message: AssembledMessage | None = None
    """Parts of the answer so far, if the answer is parsed."""
    num_had_events: int = 0
    """Events at the beginning of a stream that its reader has already, and that are left out."""


class AnswerWriter(Protocol):
    """Writes the answer to one request: `body`, or as server-sent events `first`, any number of `piece`, and `end`."""

    @property
    def wire(self) -> WireFormat:
        """Form of errors in the answer's stream."""

    def body(self, choice: Choice, usage: TokenUsage) -> Iterator[bytes]:
        """The whole answer, in slices."""

    def first(self, usage: TokenUsage) -> bytes:
        """Events that open the stream, written when the first piece has come; `usage` is of the prompt."""

    def piece(self, piece: Piece) -> bytes:
        """Events of the next piece, possibly none."""

    def end(self, choice: Choice, usage: TokenUsage) -> Iterator[bytes]:
        """The last events, in slices."""


NewWriter: TypeAlias = Callable[[AnswerContext], AnswerWriter]


def named_event(name: str, data: bytes) -> bytes:
    """A server-sent event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
