"""Sets of tokens as bits: token t is bit t % 32 of word t // 32.

A mask has the tokens that a request may choose: by its grammar, `allowed_token_ids`, `min_tokens`, `bad_words` and the
limit of its reasoning.
"""

from collections.abc import Collection
from typing import TypeAlias

import numpy as np

from raydix.engine.core.answers.reasoning_limit import MAX_BEFORE
from raydix.engine.core.worker.drafts.rows import Row

Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
"""[num_words]"""
Masks: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]
"""[num_masks, num_words]"""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def mask_of(token_ids: Collection[int], size: int) -> Mask:
    """Return a mask of `size` words with these tokens alone."""
    bits = np.zeros(size * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def own_mask(request: Row, size: int) -> Mask | None:
    """Return the mask of a request without a grammar; None if the request may choose any token."""
    sampling = request.assignment.sampling
    if sampling.allowed_token_ids is None and not _bad_ends(request) and forced_end(request) is None:
        return None
    mask = np.full(size, -1, np.int32)
    restrict(mask, request, frozenset(early_stops(request)))
    return mask


def restrict(mask: Mask, request: Row, ends: Collection[int]) -> None:
    """Take tokens out of a request's mask: first all but `allowed_token_ids`, which may leave nothing.

    Then all but the end of reasoning that is long enough; or, as far as others are left, `ends`, which would end the
    answer too early, and the ends of bad words.
    """
    allowed = request.assignment.sampling.allowed_token_ids
    if allowed is not None:
        mask &= mask_of(allowed, len(mask))
    forced = forced_end(request)
    if forced is not None and (mask & (only := mask_of((forced,), len(mask)))).any():
        mask[:] = only
        return
    _take_out(mask, ends)
    _take_out(mask, _bad_ends(request))


def early_stops(request: Row) -> tuple[int, ...]:
    """Return the tokens that would end the request before its `min_tokens`."""
    sampling = request.assignment.sampling
    return sampling.stop_token_ids if request.num_output < sampling.min_tokens else ()


def forced_end(request: Row) -> int | None:
    """Return the token that ends the request's reasoning, if the reasoning has just become as long as it may be: a
    function of the generated tokens alone."""
    limit = request.assignment.sampling.reasoning_limit
    if limit is None or not limit.num_tokens <= request.num_output <= max(limit.num_tokens, MAX_BEFORE):
        return None
    output = request.token_ids[request.assignment.num_prompt_tokens :]
    return limit.closing_id if limit.is_due(output) else None


def _take_out(mask: Mask, token_ids: Collection[int]) -> None:
    """Take tokens out of a mask if others are left."""
    if not token_ids:
        return
    without = mask & ~mask_of(token_ids, len(mask))
    if without.any():
        mask[:] = without


def _bad_ends(request: Row) -> set[int]:
    """Return the tokens that would complete a bad word of the request: a function of the generated tokens alone."""
    bad_words = request.assignment.sampling.bad_words
    if not bad_words:  # the tokens behind a draft are put together anew at each call
        return set()
    token_ids = request.token_ids
    return {
        last
        for *before, last in bad_words
        if len(before) <= request.num_output and token_ids[len(token_ids) - len(before) :] == before
    }
