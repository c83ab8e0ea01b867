"""From token events to what a caller sees of one choice: text without half characters, cut at stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.detokenizer import Detokenizer
from engine.core.stop_strings import StopStrings
from engine.core.types import FinishReason, TokenEvent, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a choice. `text` may lag behind `token_ids` by what is not certain yet."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token where the request asked for them, else empty."""
    finish: FinishReason | None


class ChoiceAssembler:
    """Assembles one choice.

    A token that ends generation by its id is counted but not shown, unless `include_stop`.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens

    def push(self, events: Sequence[TokenEvent]) -> Piece:
        """Take the next events, each with a token; the piece has a `finish` if one of them or a stop string ended the
        choice.

        Stop strings count from `min_tokens` on. After one, the rest of the events are ignored, and the caller ends the
        generation.
        """
        if self._stops is None:
            finish = events[-1].finish
            return _piece(self._text(_token_ids(events), finish), events, finish)
        text = ""
        for count, event in enumerate(events, start=1):
            part, finish, matched = self._text(_token_ids([event]), event.finish), event.finish, None
            if event.position + 1 >= self._min_tokens:
                part, matched = self._stops.push(part)
            text += part
            if matched is not None:
                return _piece(text, events[:count], FinishReason.STOP)
            if finish is not None:
                text += self._stops.flush()
        return _piece(text, events, finish)

    def _text(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> str:
        shown = token_ids[:-1] if finish is FinishReason.STOP and not self._include_stop else token_ids
        text = self._detokenizer.push(shown)
        return text if finish is None else text + self._detokenizer.flush()


def _token_ids(events: Sequence[TokenEvent]) -> tuple[int, ...]:
    return tuple([event.token_id for event in events if event.token_id is not None])


def _piece(text: str, events: Sequence[TokenEvent], finish: FinishReason | None) -> Piece:
    logprobs = tuple([event.logprobs for event in events if event.logprobs is not None])
    return Piece(text, _token_ids(events), logprobs, finish)
