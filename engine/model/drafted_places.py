"""Places of answers in their grammars whose masks a step wants, each with the places behind a draft."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from raydix.engine.core.answers.lead import Inside
from raydix.engine.model.lead_masks import LeadMasks
from raydix.engine.model.masks import Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from raydix.engine.model.matcher import Matcher

    MaskJob: TypeAlias = tuple[LLMatcher, int, list[int]]
    """A matcher, the number of its mask, and the tokens behind each of which another mask is wanted."""


@dataclass(frozen=True, slots=True)
class DraftedPlace:
    """A request's place in its grammar, and the tokens of the draft behind."""

    row: int
    """The request's own row; those of the draft follow."""
    at: int
    """Number of the first of the `1 + len(draft)` masks."""
    matcher: "Matcher"
    draft: Sequence[int]


@dataclass(frozen=True, slots=True)
class LedPlace:
    """A place split into the part that lies in the answer's lead, and the job for the part that lies in the grammar."""

    masks: tuple[Mask, ...]
    """Masks of the lead for the first rows of the place; a row that the job has a mask for, too, allows the tokens of
    both."""
    job: "MaskJob | None"
    num_consumed: int
    """Tokens of the draft that the matcher has consumed, to be rolled back when the job is done."""


def led_place(place: DraftedPlace, leads: LeadMasks | None) -> LedPlace:
    """Move the matcher of a place through the part of the draft that lies in the lead.

    Where a token may be the beginning of the lead and of the grammar, the draft ends.
    """
    matcher, draft, masks = place.matcher, list(place.draft), list[Mask]()
    num_consumed, is_allowed = 0, True
    while matcher.place is not None and is_allowed:
        assert matcher.lead is not None and leads is not None
        masks.append(leads.at(matcher.lead, matcher.place))
        is_allowed = (
            isinstance(matcher.place, Inside)
            and num_consumed < len(draft)
            and matcher.consume([draft[num_consumed]]) == 1
        )
        num_consumed += is_allowed

    rest = draft[num_consumed:] if matcher.place is None else []
    job = (matcher.state, place.at + num_consumed, rest) if matcher.is_bound else None
    return LedPlace(tuple(masks), job, num_consumed)
