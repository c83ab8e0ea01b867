"""Scores of a request's prompt: taken from the store, computed, kept, reported.

Position *i* of a prompt scores token *i* + 1, from the KV of cached blocks as from any other.
"""

from collections.abc import Sequence

from raydix.engine.core.types import PromptEvent, TokenLogprobs
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.score_store import ScoreStore


def take_scores(store: ScoreStore, request: Request) -> None:
    """Take stored scores, and go back to the first position that must be computed for its score."""
    num_top = request.assignment.sampling.prompt_logprobs
    if num_top is not None and request.num_scored < request.num_to_score:
        kept = store.match(request.full_hashes(), num_top)
        request.scores += kept[request.num_scored : request.num_to_score]
    if request.num_scored < request.num_to_score:
        request.num_computed = min(request.num_computed, request.num_scored)


def report_scores(store: ScoreStore, request: Request, new: Sequence[TokenLogprobs]) -> list[PromptEvent]:
    """Record new scores, keep the scores of whole blocks for other requests, and return unreported scores as events."""
    first_new = request.num_scored
    request.scores += new
    if len(request.scores) == request.num_reported:
        return []
    _keep_scores(store, request, first_new)
    sent, request.num_reported = request.num_reported, len(request.scores)
    position = request.assignment.num_scored + sent + 1
    return [PromptEvent(request.request_id, request.assignment.attempt, position, tuple(request.scores[sent:]))]


def _keep_scores(store: ScoreStore, request: Request, first_new: int) -> None:
    """Keep the scores of newly complete blocks. A block's first token is scored in the block before it."""
    if not request.is_named:
        return
    num_top, block_size = request.assignment.sampling.prompt_logprobs, request.block_size
    assert num_top is not None
    first = (first_new + 1) // block_size if first_new else 0
    for index in range(first, (request.num_scored + 1) // block_size):
        begin = max(0, index * block_size - 1) - request.assignment.num_scored
        end = (index + 1) * block_size - 1 - request.assignment.num_scored
        if begin >= 0:
            store.put(request.full_hashes()[index], num_top, request.scores[begin:end])
