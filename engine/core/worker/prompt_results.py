"""Results of prompts beside their KV: log-probabilities of tokens (`scoring`), sums of hidden states (`pooling`)."""

from raydix.engine.core.types import PromptEvent
from raydix.engine.core.worker.pooling import keep_sums, take_sum
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.score_store import ScoreStore
from raydix.engine.core.worker.scoring import report_scores, take_scores
from raydix.engine.core.worker.step import RunnerOutput, ScheduledChunk
from raydix.engine.core.worker.sum_store import SumStore


class PromptResults:
    """The results of one worker's prompts, stored so that a shared prefix has them computed once."""

    def __init__(self) -> None:
        self.scores = ScoreStore()
        self.sums = SumStore()

    def take(self, request: Request) -> None:
        """Take what is stored for a request that starts, and go back to the first position that must be computed for a
        result."""
        take_scores(self.scores, request)
        take_sum(self.sums, request)

    def record(self, chunk: ScheduledChunk, computed: RunnerOutput) -> list[PromptEvent]:
        """Record and store the results of a chunk; returns the unreported scores of its request as events."""
        if not chunk.request.has_prompt_results:
            return []
        request_id = chunk.request.request_id
        keep_sums(self.sums, chunk, computed.sums.get(request_id, ()))
        return report_scores(self.scores, chunk.request, computed.scores.get(request_id, ()))

    def clear(self) -> None:
        """Forget everything that is stored."""
        self.scores.clear()
        self.sums.clear()

    def check_integrity(self) -> None:
        """Assert that the stores are counted and within their limits."""
        self.scores.check_integrity()
        self.sums.check_integrity()
