"""Drafts in a scheduler's step: chosen, given blocks, accepted or forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from raydix.engine.core.types import DraftSource, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import Draft, DraftCandidate, DraftCounts, decode_step, share
from raydix.engine.core.worker.order import weigh_contexts
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import SampledToken, ScheduledChunk
from raydix.engine.core.worker.swaps import SwapPolicy


class Drafting:
    """Owner of the blocks behind the computed positions of a step's drafts.

    A draft's tokens are no tokens of the request: their KV lies behind `num_computed`, in blocks that nobody else sees,
    and is written again by later steps where the draft was wrong. Only accepted tokens become tokens of the request.
    """

    def __init__(self, pool: BlockPool, policy: SwapPolicy, token_budget: int, max_model_len: int) -> None:
        """`policy`: has the measured costs of the worker."""
        self._pool = pool
        self._policy = policy
        self.token_budget = token_budget
        self._max_model_len = max_model_len
        self.counts = {source: DraftCounts() for source in DraftSource}

    def add(
        self,
        chunks: list[ScheduledChunk],
        drafts: Sequence[Draft],
        budget: float,
        room: Callable[[], int],
        now: float,
    ) -> list[ScheduledChunk]:
        """The chunks of a step, with as much of the drafts of its decodes as is worth its time.

        `budget`: the rest of the step's token budget; `room`: tells the blocks that nobody needs for a next token.
        """
        if not drafts or budget <= 0:
            return chunks
        by_id = {draft.request_id: draft for draft in drafts}
        decodes = [chunk for chunk in chunks if chunk.samples and chunk.num_tokens == 1]
        costs, weigh = self._policy.costs, weigh_contexts(self._policy.costs, self.token_budget)
        step = decode_step(costs, [chunk.start + 1 for chunk in decodes])
        drafted = [chunk for chunk in decodes if chunk.request.request_id in by_id]
        candidates = [
            DraftCandidate(
                draft := by_id[chunk.request.request_id],
                num_tokens=self._most(chunk.request, len(draft.token_ids)),
                cost_s=step.cost_s(costs, chunk.start + 1),
                weight=weigh(chunk.request),
            )
            for chunk in drafted
        ]

        longer, num_free = dict[str, ScheduledChunk](), room()
        for chunk, candidate, count in zip(drafted, candidates, share(candidates, step, budget), strict=True):
            num_tokens, num_taken = self._take_blocks(chunk.request, count, num_free, now)
            num_free -= num_taken
            if num_tokens:
                longer[chunk.request.request_id] = _with_draft(chunk, candidate.draft, num_tokens)
        return [longer.get(chunk.request.request_id, chunk) for chunk in chunks]

    def accept(
        self, chunk: ScheduledChunk, sampled: Sequence[SampledToken], events: Sequence[TokenEvent], now: float
    ) -> None:
        """Record the computed positions of a chunk: draft tokens sampled in their place, all `events` but the last,
        become tokens of the request, and blocks behind them are given back."""
        request = chunk.request
        if chunk.draft_source is None:
            request.num_computed = chunk.start + chunk.num_tokens
            return

        # The last event is the token sampled behind the accepted ones; the scheduler appends it.
        num_accepted = max(0, len(events) - 1)
        request.token_ids += [token.token_id for token in sampled[:num_accepted]]
        request.num_computed = chunk.start + chunk.num_tokens - len(chunk.draft) + num_accepted
        self.counts[chunk.draft_source].add(len(chunk.draft), num_accepted)
        # Rounded up: blocks that hold a computed position stay.
        num_blocks = -(-request.num_computed // self._pool.block_size)
        self._pool.release(request.blocks[num_blocks:], now)
        del request.blocks[num_blocks:]

    def _most(self, request: Request, num_tokens: int) -> int:
        """Draft tokens, of so many, behind which the request may have another token."""
        # A prefill worker samples one token, and nothing behind it.
        if request.assignment.stage is Stage.PREFILL:
            return 0
        num_left = request.assignment.sampling.max_tokens - request.num_output
        return max(0, min(num_tokens, num_left - 1, self._max_model_len - len(request.token_ids) - 1))

    def _take_blocks(self, request: Request, num_tokens: int, room: int, now: float) -> tuple[int, int]:
        """Allocate blocks for a decode and the draft behind it, at most `room`; returns the draft tokens with a place,
        and the number of blocks taken."""
        block_size = self._pool.block_size
        # One position for the decode itself, then one for each draft token.
        num_taken = -(-(request.num_computed + 1 + num_tokens) // block_size) - len(request.blocks)
        num_taken = max(0, min(num_taken, room))
        request.blocks += self._pool.allocate(num_taken, now)
        num_places = len(request.blocks) * block_size - request.num_computed - 1
        return min(num_tokens, num_places), num_taken


def _with_draft(chunk: ScheduledChunk, draft: Draft, num_tokens: int) -> ScheduledChunk:
    return replace(chunk, num_tokens=1 + num_tokens, draft=draft.token_ids[:num_tokens], draft_source=draft.source)
