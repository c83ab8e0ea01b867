"""Results of prompts beside the answer: scores of tokens, and sums of hidden states; each is computed once.

A *score* is the log-probability of a prompt token. Position *i* of a prompt scores token *i* + 1, from the KV of cached
blocks as from any other.

A *pooled* hidden state is a sum of the hidden states of some positions, divided by their number: of all positions for
the mean, of the last one alone otherwise. The sum is in float64, its rows added one after the other in the order of the
positions, so its bits do not depend on where chunks begin; only the runner reads its bytes.

A block's hash names its tokens and all tokens before them. The log-probabilities of its tokens, its first included, and
the sum up to its end depend on nothing else. So what is stored under a hash is right for every sequence with this
block, whatever follows and whether or not the KV is still in the pool.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from raydix.engine.core.types import BlockHash, Pooling, PromptEvent, TokenLogprobs
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import RunnerOutput, ScheduledChunk

SUM_CAPACITY_BYTES = 64 << 20  # limit of bytes: of a model with hidden states of 1,024 values some 8,000 blocks
SCORE_CAPACITY = 1 << 19  # limit of log-probabilities: 40 to 85 MB, the less the more alternatives each token has
MAX_SHARE = 0.75  # largest part of that which one block may take


class ScoreStore:
    """A store of at most `capacity` log-probabilities; the least recently used go first."""

    def __init__(self, capacity: int = SCORE_CAPACITY) -> None:
        self._capacity = capacity
        self._size = 0
        self._scores: OrderedDict[tuple[BlockHash, int], tuple[TokenLogprobs, ...]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._scores.clear()
        self._size = 0

    def match(self, hashes: Iterable[BlockHash], num_top: int) -> list[TokenLogprobs]:
        """The scores, with `num_top` alternatives each, of the longest stored prefix of blocks.

        The first block's scores begin with its second token: nothing precedes the first.
        """
        keys = list(takewhile(self._scores.__contains__, ((block_hash, num_top) for block_hash in hashes)))
        for key in reversed(keys):  # a block is of no use without its predecessors, so they are evicted later
            self._scores.move_to_end(key)
        return [score for key in keys for score in self._scores[key]]

    def put(self, block_hash: BlockHash, num_top: int, scores: Sequence[TokenLogprobs]) -> None:
        """Keep one block's scores."""
        # An entry of nearly the whole room, such as one of the whole vocabulary, would take the place of all others.
        size = len(scores) * (num_top + 1)
        if (block_hash, num_top) in self._scores or size > self._capacity * MAX_SHARE:
            return
        self._scores[block_hash, num_top] = tuple(scores)
        self._size += size
        while self._size > self._capacity:
            (_, oldest_top), oldest = self._scores.popitem(last=False)
            self._size -= len(oldest) * (oldest_top + 1)

    def check_integrity(self) -> None:
        """Assert that the entries are counted and within the limit."""
        assert self._size == sum(len(scores) * (num_top + 1) for (_, num_top), scores in self._scores.items())
        assert self._size <= self._capacity


class SumStore:
    """A store of at most `capacity` bytes of sums; the least recently used go first."""

    def __init__(self, capacity: int = SUM_CAPACITY_BYTES) -> None:
        self._capacity = capacity
        self._size = 0
        self._sums: OrderedDict[BlockHash, bytes] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._size = 0

    def match(self, hashes: Sequence[BlockHash]) -> tuple[int, bytes]:
        """The number of blocks of the longest prefix whose sum is stored, and the sum; zero blocks without one."""
        for num_blocks in range(len(hashes), 0, -1):
            block_hash = hashes[num_blocks - 1]
            if block_hash in self._sums:
                self._sums.move_to_end(block_hash)
                return num_blocks, self._sums[block_hash]
        return 0, b""

    def put(self, block_hash: BlockHash, total: bytes) -> None:
        """Keep the sum up to the end of a block."""
        if block_hash in self._sums:
            return
        self._sums[block_hash] = total
        self._size += len(total)
        while self._size > self._capacity:
            self._size -= len(self._sums.popitem(last=False)[1])

    def check_integrity(self) -> None:
        """Assert that the sums are counted and within the limit."""
        assert self._size == sum(map(len, self._sums.values())) <= self._capacity


def take_scores(store: ScoreStore, request: Request) -> None:
    """Take stored scores, and go back to the first position that must be computed for its score."""
    num_top = request.assignment.sampling.prompt_logprobs
    if num_top is not None and request.num_scored < request.num_to_score:
        kept = store.match(request.full_hashes(), num_top)
        request.scores += kept[request.num_scored : request.num_to_score]
    if request.num_scored < request.num_to_score:
        # Cached positions behind the last kept score are computed again, for their scores only.
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
    # Scores are of token position + 1: block `index` has those of positions [index * size - 1, (index + 1) * size - 1).
    first = (first_new + 1) // block_size if first_new else 0
    for index in range(first, (request.num_scored + 1) // block_size):
        begin = max(0, index * block_size - 1) - request.assignment.num_scored
        end = (index + 1) * block_size - 1 - request.assignment.num_scored
        if begin >= 0:
            store.put(request.full_hashes()[index], num_top, request.scores[begin:end])


def take_sum(store: SumStore, request: Request) -> None:
    """Take the stored sum of the longest prefix, and go back to the first position that must be computed for the
    sum."""
    if request.num_pooled == request.num_to_pool:
        return
    if request.assignment.sampling.pooling is Pooling.MEAN:
        num_blocks, stored = store.match(request.full_hashes())
        if num_blocks * request.block_size > request.num_pooled:
            request.num_pooled, request.pooled_sum = num_blocks * request.block_size, stored
    if request.num_pooled < request.num_to_pool:
        request.num_computed = min(request.num_computed, request.num_pooled)


def keep_sums(store: SumStore, chunk: ScheduledChunk, sums: Sequence[bytes]) -> None:
    """Record the sums that came of a chunk, and keep those of whole blocks for other requests."""
    if not chunk.pooled:
        return
    request, block_size = chunk.request, chunk.request.block_size
    request.num_pooled, request.pooled_sum = chunk.pooled.stop, sums[-1]
    if request.assignment.sampling.pooling is Pooling.MEAN and request.is_named:
        hashes = request.full_hashes()
        for index in range(chunk.pooled.start // block_size, chunk.pooled.stop // block_size):
            store.put(hashes[index], sums[index - chunk.pooled.start // block_size])


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
