"""How far a request's prompt is scored: what is taken from the store, what goes into it, and what is reported.

Position *i* of a prompt scores token *i* + 1, from the KV of cached blocks as from any other.
"""

from collections.abc import Sequence

from engine.core.request import Request
from engine.core.score_store import ScoreStore
from engine.core.types import PromptEvent, TokenLogprobs


def take_scores(store: ScoreStore, request: Request) -> None:
    """Take the scores that are kept, and go back to the first position that must be computed for its own."""
    num_top = request.assignment.sampling.prompt_logprobs
    if num_top is not None and request.num_scored < request.num_to_score:
        kept = store.match(request.full_hashes(), num_top)
        request.scores += kept[request.num_scored : request.num_to_score]
    if request.num_scored < request.num_to_score:
        request.num_computed = min(request.num_computed, request.num_scored)


def report_scores(store: ScoreStore, request: Request, new: Sequence[TokenLogprobs]) -> list[PromptEvent]:
    """Record new scores, keep those of whole blocks for others, and report what has not been reported."""
    first_new = request.num_scored
    request.scores += new
    if len(request.scores) == request.num_reported:
        return []
    _keep_scores(store, request, first_new)
    sent, request.num_reported = request.num_reported, len(request.scores)
    position = request.assignment.num_scored + sent + 1
    return [PromptEvent(request.request_id, request.assignment.attempt, position, tuple(request.scores[sent:]))]


def _keep_scores(store: ScoreStore, request: Request, first_new: int) -> None:
    """Keep the scores of the blocks that have become complete. A block's first token is scored before it."""
    num_top, block_size = request.assignment.sampling.prompt_logprobs, request.block_size
    assert num_top is not None
    first = (first_new + 1) // block_size if first_new else 0
    for index in range(first, (request.num_scored + 1) // block_size):
        begin = max(0, index * block_size - 1) - request.assignment.num_scored
        end = (index + 1) * block_size - 1 - request.assignment.num_scored
        if begin >= 0:
            store.put(request.full_hashes()[index], num_top, request.scores[begin:end])
