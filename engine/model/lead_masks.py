"""Tokens that may stand in the lead of an answer whose grammar begins behind."""

from collections.abc import Collection, Sequence

import numpy as np

from raydix.engine.core.answers.lead import Before, Behind, Inside, Lead
from raydix.engine.model.masks import Mask, mask_of


class LeadMasks:
    """Masks of `size` words over the tokens of a `table` of their bytes, each made when first asked for.

    Inside a lead every token is allowed but `end_ids`, the ends of a sequence, and a token that brings a part of the
    answer along with the end of the closing tag. Before a lead it is the tokens of the opening tag.
    """

    def __init__(self, table: Sequence[bytes], end_ids: Collection[int], size: int) -> None:
        self._table = table[: size * 32]
        self._end_ids = end_ids
        self._size = size
        self._masks: dict[tuple[Lead, Before | Inside], Mask] = {}

    def at(self, lead: Lead, place: Before | Inside) -> Mask:
        """Return the mask at a place, to be read only."""
        mask = self._masks.get((lead, place))
        if mask is None:
            mask = self._opening(lead, place) if isinstance(place, Before) else self._inside(lead, place)
            self._masks[lead, place] = mask
        return mask

    def _opening(self, lead: Lead, place: Before) -> Mask:
        rest = lead.opening[len(place.held) :]
        fitting = [
            token_id
            for token_id, token in enumerate(self._table)
            if token[:1] == rest[:1] and (rest.startswith(token) or token.startswith(rest))
        ]
        return mask_of([token_id for token_id in fitting if self._is_clean(lead, place, token_id)], self._size)

    def _inside(self, lead: Lead, place: Inside) -> Mask:
        last = lead.closing[-1:]
        closing = [token_id for token_id, token in enumerate(self._table) if last in token]
        unclean = [token_id for token_id in closing if not self._is_clean(lead, place, token_id)]
        ends = [token_id for token_id in self._end_ids if token_id < self._size * 32]
        return np.asarray(~mask_of([*unclean, *ends], self._size), np.int32)

    def _is_clean(self, lead: Lead, place: Before | Inside, token_id: int) -> bool:
        after = lead.after(place, self._table[token_id])
        return not isinstance(after, Behind) or after.is_clean
