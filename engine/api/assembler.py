"""Makes the visible text of one choice of its token events: without half characters, cut at stop strings."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from raydix.engine.core.ingress.detokenizer import Detokenizer
from raydix.engine.core.ingress.parsers.answer import AnswerParser
from raydix.engine.core.ingress.parsers.events import AnswerEvent
from raydix.engine.core.ingress.stop_strings import StopStrings
from raydix.engine.core.types import FinishReason, TokenEvent, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a choice. `text` may lag behind `token_ids` by characters that are not certain yet."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of each token if the request asked for them, else empty."""
    finish: FinishReason | None
    stop_reason: str | int | None = None
    """Stop string, or requested stop token, at the end of the choice."""
    events: tuple[AnswerEvent, ...] = ()
    """Contents of `text` and of text held back before, where the choice is parsed."""


class ChoiceAssembler:
    """Assembles one choice.

    A token that ends generation by its id is counted but not shown, unless `include_stop`. `stop_token_ids` may
    become a piece's `stop_reason`. With a `parser` the pieces have events, and the choice may end with a call.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        parser: AnswerParser | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._parser = parser
        has_reasoning = parser is not None and parser.has_reasoning
        self.num_reasoning_tokens = 0 if has_reasoning else None
        """Tokens of reasoning so far, its tags included; None if it is not told from the text."""

    def push(self, events: Sequence[TokenEvent]) -> Piece:
        """Take the next events, each with a token; the piece has a `finish` if one of them or a stop string ended the
        choice.

        Stop strings count from `min_tokens` on. After one, and where a call ends the choice, the rest of the events are
        ignored, and the caller ends the generation.
        """
        return self._push(events) if self._parser is None else self._push_parsed(events, self._parser)

    def _push_parsed(self, events: Sequence[TokenEvent], parser: AnswerParser) -> Piece:
        text = ""
        found: list[AnswerEvent] = []
        for count, event in enumerate(events, start=1):
            piece = self._push([event])
            text += piece.text
            was_reasoning = parser.is_reasoning
            found += parser.push(piece.text)
            if self.num_reasoning_tokens is not None:
                # A token that begins or ends the reasoning counts as reasoning: it has a tag in it.
                self.num_reasoning_tokens += was_reasoning or parser.is_reasoning
            if piece.finish is None and not parser.is_done:
                continue
            found += parser.finish(is_cut=piece.finish is FinishReason.LENGTH)
            # An answer that is cut behind a call ends by its length: another call may have been to come.
            is_called = parser.is_done or (parser.has_called and piece.finish is FinishReason.STOP)
            finish = FinishReason.TOOL_CALLS if is_called else piece.finish
            whole = _piece(text, events[:count], finish, piece.stop_reason)
            return replace(whole, events=tuple(found))
        return replace(_piece(text, events, None, None), events=tuple(found))

    def _push(self, events: Sequence[TokenEvent]) -> Piece:
        if self._stops is None:
            finish = events[-1].finish
            return _piece(self._text(_token_ids(events), finish), events, finish, self._stop_token(events))
        text = ""
        for count, event in enumerate(events, start=1):
            part, finish, matched = self._text(_token_ids([event]), event.finish), event.finish, None
            # Text before is not looked at later either: a stop string across that border does not count.
            if event.position + 1 >= self._min_tokens:
                part, matched = self._stops.push(part)
            text += part
            if matched is not None:
                return _piece(text, events[:count], FinishReason.STOP, matched)
            if finish is not None:
                text += self._stops.flush()
        return _piece(text, events, finish, self._stop_token(events))

    def _stop_token(self, events: Sequence[TokenEvent]) -> int | None:
        """The requested token at the end of the choice, if there is one."""
        last = events[-1]
        return last.token_id if last.finish is FinishReason.STOP and last.token_id in self._stop_token_ids else None

    def _text(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> str:
        # A token that ends the answer by its id has no part in the text.
        shown = token_ids[:-1] if finish is FinishReason.STOP and not self._include_stop else token_ids
        text = self._detokenizer.push(shown)
        return text if finish is None else text + self._detokenizer.flush()


def _token_ids(events: Sequence[TokenEvent]) -> tuple[int, ...]:
    return tuple([event.token_id for event in events if event.token_id is not None])


def _piece(
    text: str, events: Sequence[TokenEvent], finish: FinishReason | None, stop_reason: str | int | None
) -> Piece:
    logprobs = tuple([event.logprobs for event in events if event.logprobs is not None])
    return Piece(text, _token_ids(events), logprobs, finish, stop_reason=stop_reason)
