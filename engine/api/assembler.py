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

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop

    def push(self, events: Sequence[TokenEvent]) -> Piece:
        """Take the next events; the piece has a `finish` if the last of them ended the choice or a stop string did.

        After a stop string the rest of the events are ignored, and the caller ends the generation.
        """
        if self._stops is None:
            token_ids = tuple([event.token_id for event in events if event.token_id is not None])
            finish = events[-1].finish
            return self._piece(self._text(token_ids, finish), events, token_ids, finish)
        text = ""
        for index, event in enumerate(events):
            assert event.token_id is not None
            emitted, matched = self._stops.push(self._text((event.token_id,), event.finish))
            text += emitted
            finish = FinishReason.STOP if matched is not None else event.finish
            if finish is not None:
                break
        if finish is not None and matched is None:
            text += self._stops.flush()
        seen = events[: index + 1]
        return self._piece(text, seen, tuple([event.token_id for event in seen if event.token_id is not None]), finish)

    def _text(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> str:
        shown = token_ids[:-1] if finish is FinishReason.STOP and not self._include_stop else token_ids
        text = self._detokenizer.push(shown)
        return text if finish is None else text + self._detokenizer.flush()

    def _piece(
        self, text: str, events: Sequence[TokenEvent], token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> Piece:
        logprobs = tuple([event.logprobs for event in events if event.logprobs is not None])
        return Piece(text, token_ids, logprobs, finish)
